"""What the Responses API keeps in memory: responses and conversations, each with its items."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec

from tidemill.errors import InvalidRequest

_json = msgspec.json.Encoder().encode
MAX_STORED, MAX_STORED_BYTES = 1000, 64 * 2**20  # of one tenant
MAX_CONTINUED_BYTES = 16 * 2**20  # of what one response or conversation keeps: it is read on the event loop
MAX_STORED_OF_ALL, MAX_STORED_BYTES_OF_ALL = 4 * MAX_STORED, 4 * MAX_STORED_BYTES


class Unknown(InvalidRequest):
    status = 404


class _Shelf:
    """What one tenant has stored, oldest first: the items and the object, as JSON, and the events of its stream, if it was one in
    the background."""

    def __init__(self) -> None:
        self.stored: OrderedDict[str, tuple[bytes, bytes, bytes]] = OrderedDict()
        self.num_bytes = 0
        self.homes: dict[str, str] = {}  # of output items, by their ids: the response
        self._outputs: dict[str, list[str]] = {}

    def put(self, items: list[dict[str, Any]], body: dict[str, Any], events: bytes) -> None:
        name = body["id"]
        self.drop(name)
        made = self.stored[name] = (_json(items), _json(body), events)
        self.num_bytes += sum(map(len, made))
        self._outputs[name] = [item["id"] for item in body.get("output", ())]
        self.homes |= dict.fromkeys(self._outputs[name], name)

    def drop(self, name: str) -> None:
        self.num_bytes -= sum(map(len, self.stored.pop(name, ())))
        for item in self._outputs.pop(name, ()):
            self.homes.pop(item, None)

    def drop_oldest(self) -> None:
        self.drop(next(iter(self.stored)))


class Store:
    """Objects that can be retrieved or continued, each by its tenant only. A tenant that stores too much loses its oldest; if
    all together store too much, the tenant that stores most does. Nobody can evict the objects of a tenant that stores less."""

    def __init__(self) -> None:
        self._shelves: dict[str, _Shelf] = {}

    def put(self, tenant: str, items: list[dict[str, Any]], body: dict[str, Any], events: bytes = b"") -> None:
        shelf = self._shelves.setdefault(tenant, _Shelf())
        shelf.put(items, body, events)
        while len(shelf.stored) > MAX_STORED or shelf.num_bytes > MAX_STORED_BYTES:
            shelf.drop_oldest()
        shelves = self._shelves.values()
        while sum(len(one.stored) for one in shelves) > MAX_STORED_OF_ALL:
            max(shelves, key=lambda one: len(one.stored)).drop_oldest()
        while sum(one.num_bytes for one in shelves) > MAX_STORED_BYTES_OF_ALL:
            max(shelves, key=lambda one: one.num_bytes).drop_oldest()

    def get(self, tenant: str, name: str, kind: str = "response") -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The items and the object."""
        shelf = self._shelves.get(tenant)
        found = shelf.stored.get(name) if shelf is not None else None
        body = msgspec.json.decode(found[1]) if found is not None else {}
        if found is None or body.get("object") != kind:
            raise Unknown(f"{kind.capitalize()} with id {name[:100]!r} not found.", param=f"{kind}_id")  # OpenAI's words
        return msgspec.json.decode(found[0]), body

    def get_to_continue(self, tenant: str, name: str, kind: str = "response") -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """As `get`, unless it has become too large for more."""
        shelf = self._shelves.get(tenant)
        if shelf is not None and sum(map(len, shelf.stored.get(name, ())[:2])) > MAX_CONTINUED_BYTES:
            what = f"The {kind} {name[:100]!r} has more than {MAX_CONTINUED_BYTES} bytes."
            raise InvalidRequest(what, fix="Begin a new one.", param=f"{kind}_id")
        return self.get(tenant, name, kind)

    def events(self, tenant: str, name: str) -> bytes:
        """Of the stream of a response, in wire format; empty: it was not streamed in the background."""
        self.get(tenant, name)
        return self._shelves[tenant].stored[name][2]

    def drop(self, tenant: str, name: str) -> None:
        if tenant in self._shelves:
            self._shelves[tenant].drop(name)

    def output_item(self, tenant: str, name: str) -> dict[str, Any]:
        """An output item of a stored response."""
        shelf = self._shelves.get(tenant)
        if shelf is None or name not in shelf.homes:
            raise Unknown(f"There is no stored item {name[:100]!r}.", fix="Send the item itself.", param="input")
        output: list[dict[str, Any]] = msgspec.json.decode(shelf.stored[shelf.homes[name]][1])["output"]
        return next(item for item in output if item["id"] == name)


def page_of(items: list[dict[str, Any]], query: dict[str, str], limit: int) -> dict[str, Any]:
    """A page of items: `order` (desc by default) and `after`."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order is asc or desc.", param="order")
    ordered = items if order == "asc" else items[::-1]
    if (after := query.get("after")) is not None:
        at = next((i for i, item in enumerate(ordered) if item.get("id") == after), None)
        if at is None:
            raise InvalidRequest(f"There is no item {after[:100]!r}.", param="after")
        ordered = ordered[at + 1 :]
    data = ordered[:limit]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": "", "last_id": ""}
    return {"object": "list", "data": data, "has_more": len(ordered) > limit, **ends}
