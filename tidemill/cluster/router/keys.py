"""The parts of a request that decide where it goes: the model, the keys of its prefix, and what it
refers to that one server has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw

from tidemill.sched.placement import MAX_BLOCKS, hash_of, prefix_keys
from tidemill.server.api.responses.types import is_reference
from tidemill.server.http.body import is_too_much

BLOCK_BYTES = 512  # of a prompt as JSON text
_MAX_BYTES = MAX_BLOCKS * BLOCK_BYTES
_MAX_COMMAS = 2**17  # of a body whose messages are looked at one by one
_MAX_FIRST = 64  # messages among which the first of the user is looked for
_NOTHING = Raw()
_NONE = _NOTHING, _NOTHING, _NOTHING


class _Body(msgspec.Struct):
    """Parts of the request bodies of all APIs. The others, and their types, are for the server."""

    model: str | None = None
    messages: Raw = _NOTHING
    tools: Raw = _NOTHING
    system: Raw = _NOTHING  # Anthropic, Ollama
    instructions: Raw = _NOTHING  # Responses
    input: Raw = _NOTHING
    prompt: Raw = _NOTHING
    text: Raw = _NOTHING  # SGLang
    input_ids: Raw = _NOTHING
    contents: Raw = _NOTHING  # Gemini
    system_instruction: Raw = msgspec.field(default=_NOTHING, name="systemInstruction")
    prompt_cache_key: str | None = None
    prompt_cache: str | None = None
    previous_response_id: str | None = None
    conversation: str | dict | None = None
    input_file_id: str | None = None


class _Message(msgspec.Struct):
    role: str = ""


# a Raw's strings are not checked before they are decoded
_BROKEN = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_decode = msgspec.json.Decoder(_Body).decode
_decode_items = msgspec.json.Decoder(list[dict[str, Raw]]).decode
_decode_list = msgspec.json.Decoder(list[Raw]).decode
_decode_message = msgspec.json.Decoder(_Message).decode


@dataclass(slots=True)
class Prompt:
    """The known parts of a request's body; nothing, if it is not JSON of the kind."""

    model: str | None = None
    keys: list[int] | tuple[()] = ()
    anchor: int | None = None  # the same for all requests of a conversation
    refers_to: tuple[str, str] | None = None  # the kind and the id of what a server keeps


def read_prompt(
    body: bytes, tenant: bytes, session: bytes = b"", model: str | None = None
) -> Prompt:
    """`tenant`: whoever shares no cache with others. `session`: as a header names it. `model`: as
    the path names it."""
    if not body.startswith(b"{") and not body.lstrip(b" \t\r\n").startswith(b"{"):
        return Prompt(model)
    try:
        if is_too_much(body):
            return Prompt(model)  # for the server to refuse
        fields = _decode(body)
        is_long = body.count(b",") > _MAX_COMMAS
        listed = fields.messages if len(bytes(fields.messages)) else fields.contents
        messages = None if is_long or bytes(listed) in (b"", b"null") else _decode_list(listed)
    except _BROKEN:
        return Prompt(model)
    model = model or fields.model
    root = b"\0".join((tenant, (model or "").encode()))
    around = (
        fields.tools,
        fields.system if len(bytes(fields.system)) else fields.system_instruction,
        fields.instructions,
    )
    before = b"\0\0" if around == _NONE else b"\0".join(map(bytes, around))
    if messages is not None:
        text = before + b"," + b",".join(_leading(messages, _MAX_BYTES - len(before)))
        opening = before + b",".join(map(bytes, messages[: _num_opening(messages)]))
    else:
        texts = fields.input, fields.prompt, fields.text, fields.input_ids
        rest = next((bytes(text) for text in texts if len(bytes(text))), b"")
        text, opening = before + rest, b""
    keys = prefix_keys(root, text, BLOCK_BYTES)
    named = session or (fields.prompt_cache_key or "").encode()
    anchor = hash_of(root, named or opening or text) if named or opening or not keys else None
    return Prompt(model, keys, anchor if text or named else None, _reference(fields))


def _leading(messages: list[Raw], num_bytes: int) -> list[bytes]:
    """The leading messages, as many as have any effect."""
    taken = []
    for message in messages:
        if num_bytes <= 0:
            break
        taken.append(bytes(message))
        num_bytes -= len(taken[-1])
    return taken


def _num_opening(messages: list[Raw]) -> int:
    """Messages up to the user's first: they stay the same while the conversation goes on, and tell
    it from others."""
    for number, message in enumerate(messages[:_MAX_FIRST], 1):
        try:
            if _decode_message(message).role == "user":
                return number
        except _BROKEN:
            break
    return 1


def _reference(fields: _Body) -> tuple[str, str] | None:
    conversation = (
        fields.conversation.get("id")
        if isinstance(fields.conversation, dict)
        else fields.conversation
    )
    if fields.previous_response_id:
        return "responses", fields.previous_response_id
    if isinstance(conversation, str) and conversation:
        return "conversations", conversation
    if fields.input_file_id:
        return "files", fields.input_file_id
    if fields.prompt_cache:
        return "prompt_caches", fields.prompt_cache
    return _item_reference(bytes(fields.input))


def _item_reference(items: bytes) -> tuple[str, str] | None:
    """The first item of a Responses request that a server has stored."""
    if b'"id"' not in items:
        return None
    try:
        found = next(
            (item["id"] for item in map(_described, _decode_items(items)) if is_reference(item)),
            None,
        )
    except _BROKEN:
        return None
    return None if found is None else ("response_items", found)


def _described(item: dict[str, Raw]) -> dict[str, Any]:
    """Its type and id; of the rest, the names."""
    return {
        name: msgspec.json.decode(value) if name in ("type", "id") else None
        for name, value in item.items()
    }
