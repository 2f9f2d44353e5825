"""The memory of the Responses API: responses and conversations, each with its items.

Items are kept as JSON, one by one: one is read without the rest of the conversation, and a response
shares the items of the conversation so far with those before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import msgspec

from tidemill.errors import InvalidRequest
from tidemill.server.http.aside import LARGE_BYTES, encoded
from tidemill.server.http.limits import MAX_MESSAGES

_json = msgspec.json.Encoder().encode
MAX_STORED, MAX_STORED_BYTES = 1000, 64 * 2**20  # of one tenant
MAX_CONTINUED_BYTES = (
    16 * 2**20
)  # of what one response or conversation keeps: it is read for every response that continues it
MAX_STORED_OF_ALL, MAX_STORED_BYTES_OF_ALL = 4 * MAX_STORED, 4 * MAX_STORED_BYTES
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_parts = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode


class Unknown(InvalidRequest):
    status = 404


class Item(NamedTuple):
    id: str
    text: bytes  # JSON

    @staticmethod
    def of(item: dict[str, Any]) -> Item:
        return Item(item["id"], _json(item))

    def members(self) -> dict[str, Any]:
        """The members of the item that go into a prompt: for a large one, without the
        log-probabilities of its text, which are most of it."""
        if len(self.text) < LARGE_BYTES:
            return dict(msgspec.json.decode(self.text))
        members: dict[str, Any] = _members(self.text)
        content = members.pop("content", None)
        members = {name: msgspec.json.decode(value) for name, value in members.items()}
        if content is None:
            return members
        if bytes(memoryview(content)[:1]) != b"[":
            return members | {"content": msgspec.json.decode(content)}
        read = msgspec.json.decode
        try:
            parts = _parts(content)
        except msgspec.ValidationError:  # not all are objects
            return members | {"content": read(content)}
        return members | {
            "content": [
                {name: read(part[name]) for name in part if name != "logprobs"} for part in parts
            ]
        }


@dataclass(frozen=True)
class Stored:
    """A response or a conversation."""

    kind: str  # its `object`
    items: tuple[Item, ...]  # before the output
    outputs: tuple[Item, ...]
    head: bytes  # the object without its output, as JSON
    is_background: bool = False
    events: bytes = b""  # of its stream, in wire format, if it was one in the background

    @staticmethod
    def of(items: Sequence[Item], body: dict[str, Any], events: bytes = b"") -> Stored:
        outputs = tuple(map(Item.of, body.get("output", ())))
        head = _json({name: value for name, value in body.items() if name != "output"})
        return Stored(
            body["object"], tuple(items), outputs, head, bool(body.get("background")), events
        )

    @cached_property
    def num_bytes(self) -> int:
        """Items that are shared count for each who has them; events do not, which are not
        continued."""
        return (
            len(self.head)
            + sum(len(item.text) for item in self.items)
            + sum(len(item.text) for item in self.outputs)
        )

    def body(self) -> bytes:
        """The whole object, as JSON."""
        if self.kind != "response":
            return self.head
        return b"".join(
            [self.head[:-1], b',"output":[', b",".join([item.text for item in self.outputs]), b"]}"]
        )


class _Shelf:
    """The items that one tenant has stored, oldest first."""

    def __init__(self) -> None:
        self.stored: OrderedDict[str, Stored] = OrderedDict()
        self.num_bytes = 0
        self.homes: dict[str, Item] = {}  # output items, by their ids

    def put(self, name: str, stored: Stored) -> None:
        self.drop(name)
        self.stored[name] = stored
        self.num_bytes += stored.num_bytes + len(stored.events)
        self.homes |= {item.id: item for item in stored.outputs}

    def drop(self, name: str) -> None:
        if (gone := self.stored.pop(name, None)) is not None:
            self.num_bytes -= gone.num_bytes + len(gone.events)
            for item in gone.outputs:
                self.homes.pop(item.id, None)

    def drop_oldest(self) -> None:
        self.drop(next(iter(self.stored)))


class Store:
    """Objects that can be retrieved or continued, each by its tenant only. A tenant that stores too
    much loses its oldest; if all together store too much, the tenant that stores most does. Nobody
    can evict the objects of a tenant that stores less."""

    def __init__(self) -> None:
        self._shelves: dict[str, _Shelf] = {}
        # Responses that are being generated, by tenant and id. They are held by those who run them.
        self.running: WeakValueDictionary[tuple[str, str], Any] = WeakValueDictionary()

    def put(self, tenant: str, name: str, stored: Stored) -> None:
        shelf = self._shelves.setdefault(tenant, _Shelf())
        shelf.put(name, stored)
        while len(shelf.stored) > MAX_STORED or shelf.num_bytes > MAX_STORED_BYTES:
            shelf.drop_oldest()
        shelves = self._shelves.values()
        while sum(len(each.stored) for each in shelves) > MAX_STORED_OF_ALL:
            max(shelves, key=lambda each: len(each.stored)).drop_oldest()
        while sum(each.num_bytes for each in shelves) > MAX_STORED_BYTES_OF_ALL:
            max(shelves, key=lambda each: each.num_bytes).drop_oldest()

    def get(self, tenant: str, name: str, kind: str = "response") -> Stored:
        shelf = self._shelves.get(tenant)
        found = shelf.stored.get(name) if shelf is not None else None
        if found is None or found.kind != kind:
            raise Unknown(
                f"{kind.capitalize()} with id {name[:100]!r} not found.", param=f"{kind}_id"
            )  # OpenAI's words
        return found

    def get_to_continue(self, tenant: str, name: str, kind: str = "response") -> Stored:
        """The same as `get`, unless it has become too large for more."""
        found = self.get(tenant, name, kind)
        if found.num_bytes > MAX_CONTINUED_BYTES:
            what = f"The {kind} {name[:100]!r} has more than {MAX_CONTINUED_BYTES} bytes."
            raise InvalidRequest(what, fix="Begin a new one.", param=f"{kind}_id")
        return found

    def append_to_conversation(self, tenant: str, name: str, items: Sequence[Item]) -> None:
        """Unless the conversation is gone, or full."""
        with suppress(InvalidRequest):
            before = self.get_to_continue(tenant, name, "conversation")
            if len(before.items) + len(items) <= MAX_MESSAGES:
                self.put(tenant, name, replace(before, items=(*before.items, *items)))

    def drop(self, tenant: str, name: str) -> None:
        if tenant in self._shelves:
            self._shelves[tenant].drop(name)

    def output_item(self, tenant: str, name: str) -> Item:
        """An output item of a stored response."""
        shelf = self._shelves.get(tenant)
        if shelf is None or name not in shelf.homes:
            raise Unknown(
                f"There is no stored item {name[:100]!r}.",
                fix="Send the item itself.",
                param="input",
            )
        return shelf.homes[name]


def page_of(items: Sequence[Item], query: dict[str, str], limit: int) -> bytes:
    """A page of items, as JSON: `order` (desc by default) and `after`."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order is asc or desc.", param="order")
    ordered = items if order == "asc" else items[::-1]
    if (after := query.get("after")) is not None:
        at = next((i for i, item in enumerate(ordered) if item.id == after), None)
        if at is None:
            raise InvalidRequest(f"There is no item {after[:100]!r}.", param="after")
        ordered = ordered[at + 1 :]
    data = ordered[:limit]
    ends = (
        {"first_id": data[0].id, "last_id": data[-1].id}
        if data
        else {"first_id": "", "last_id": ""}
    )
    texts = encoded(msgspec.Raw(item.text) for item in data)
    return _json({"object": "list", "data": texts, "has_more": len(ordered) > limit, **ends})
