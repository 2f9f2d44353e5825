"""The records of a recording, and the blocks of its files.

    file    = block block ...                 a valid .zst file: `zstd -dc` reads all that is not sealed
    block   = skippable frame: b"P", length of what follows    then a zstd frame: a MessagePack list of records
            | skippable frame: b"S", nonce, ciphertext         the same zstd frame, sealed with the owner's key

Each file can be read without the others: it repeats the start, the models and the segments of
prompts that its requests have. A file that was being written when the machine stopped ends with
part of a block, which is left out.
"""

from __future__ import annotations

import hashlib
import os
import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, BinaryIO, TypeAlias

import msgspec
import zstandard

from tidemill.errors import ConfigError
from tidemill.types.events import Event
from tidemill.types.wire import AdapterInfo, Delta, Submit

VERSION = 1
SUFFIX = ".zst"
SEGMENT_LEN = 256  # tokens of a prompt that are stored once, however many prompts have them
TOKEN_BYTES = 4
KEY_BYTES = 32
MAX_BLOCK = 1 << 28  # bytes of a block, and of what it holds
_MAGIC = 0x184D2A50  # of a skippable frame
_FRAME, _HEAD = struct.Struct("<II"), struct.Struct("<cQ")
_NONCE_BYTES = _DIGEST_BYTES = 12
_IDS_AT_ONCE = 8192
_LEVEL = 3
_DAMAGE = (zstandard.ZstdError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The server that records. Times are of its monotonic clock; `wall_s` is the time of day at
    `clock_s`."""

    version: int
    recording: str  # the same in all files of one server's life
    build: str
    wall_s: float
    clock_s: float
    machine: dict[str, Any]


class ModelStart(msgspec.Struct, frozen=True, tag="model"):
    """A model, and all of its engine that tokens or batches depend on. Told again for an engine
    with other values."""

    model: str
    path: str
    fingerprint: bytes  # of the weights
    template: bytes  # digest of the chat template
    tokenizer: bytes
    options: dict[str, Any]  # an engine with these has the same values
    config: dict[str, Any]
    kernels: str  # why they are slower than they could be; empty: they are not


class AdapterStart(msgspec.Struct, frozen=True, tag="adapter"):
    model: str
    info: AdapterInfo


class Segment(msgspec.Struct, frozen=True, tag="segment"):
    """Token ids of prompts."""

    digest: bytes
    ids: bytes


class Begun(msgspec.Struct, frozen=True, tag="begun", omit_defaults=True):
    """A request as the engine gets it."""

    model: str
    time_s: float
    request: Submit  # without its prompt
    segments: list[bytes]
    num_prompt: int
    api: str = ""  # the route


class Output(msgspec.Struct, frozen=True, array_like=True):
    """One sample, as the client got it."""

    ids: bytes
    finish_reason: str | None
    by_text: bool  # a stop string or a pattern ended it, which the engine does not see
    digest: bytes  # of log-probabilities, embeddings and scores; empty: there are none


class Ended(msgspec.Struct, frozen=True, tag="ended", omit_defaults=True):
    model: str
    request_id: str
    time_s: float
    outputs: list[Output]
    error: str = ""  # its kind; client_left: the client went away
    first_s: float | None = None  # when the first token was there


class Events(msgspec.Struct, frozen=True, tag="events"):
    """Events of an engine, in their order."""

    model: str
    events: msgspec.Raw


RecordType: TypeAlias = Start | ModelStart | AdapterStart | Segment | Begun | Ended | Events

encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[RecordType]).decode
_decode_events = msgspec.msgpack.Decoder(list[Event]).decode
_decode_any = msgspec.msgpack.Decoder(list[Any]).decode
_decode_event = msgspec.msgpack.Decoder(Event).decode


def ids_of(data: bytes) -> array[int]:
    ids = array("I", data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def bytes_of(ids: Sequence[int]) -> bytes:
    """Raises OverflowError for what is no token."""
    found = array("I")
    for at in range(0, len(ids), _IDS_AT_ONCE):
        found.extend(ids[at : at + _IDS_AT_ONCE])  # other threads have a turn between two of them
    if sys.byteorder == "big":
        found.byteswap()
    return found.tobytes()


def digest_of(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def has_values(delta: Delta) -> bool:
    """It has log-probabilities, an embedding or a score, of which a digest is recorded."""
    return bool(delta.logprobs or delta.prompt_pieces or delta.embedding or delta.score is not None)


def add_values(digest: hashlib.blake2b, delta: Delta, num: int) -> None:
    """Adds what a delta has besides its first `num` tokens, whatever pieces it comes in."""
    # come with the first token, and others may be joined to it
    for piece in delta.prompt_pieces or ():
        digest.update(piece)
    for entry in (delta.logprobs or ())[:num]:
        digest.update(encode(entry))
    digest.update(encode_end(delta))


def encode_end(delta: Delta) -> bytes:
    return (
        b""
        if delta.embedding is None and delta.score is None
        else encode((delta.embedding, delta.score))
    )


def new_digest() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=_DIGEST_BYTES)


def events_of(record: Events, where: str) -> list[Event]:
    """Events that this build does not know are left out."""
    try:
        return _decode_events(record.events)
    except (msgspec.DecodeError, UnicodeDecodeError):
        try:
            each = _decode_any(record.events)
        except _DAMAGE as error:
            raise damaged(where) from error
    found = []
    for fields in each:
        with suppress(msgspec.ValidationError):
            found.append(_decode_event(encode(fields)))
    return found


class Packer:
    """Makes blocks of records."""

    def __init__(self, key: bytes | None) -> None:
        """`key`: the owner's; None: nothing is sealed."""
        self._pack = zstandard.ZstdCompressor(_LEVEL, write_checksum=True)
        self._cipher = None if key is None else _cipher(key)

    def block(self, records: Sequence[RecordType], is_sealed: bool) -> bytes:
        frame = self._pack.compress(encode(records))
        if not is_sealed:
            return _FRAME.pack(_MAGIC, _HEAD.size) + _HEAD.pack(b"P", len(frame)) + frame
        assert self._cipher is not None, "records are sealed with a key"
        nonce = os.urandom(_NONCE_BYTES)
        sealed = b"S" + nonce + self._cipher.encrypt(nonce, frame, None)
        return _FRAME.pack(_MAGIC, len(sealed)) + sealed


class Sealed(Exception):
    """A block cannot be read without the owner's key."""


class Cut(Exception):
    """The file ends within a block."""


def read_blocks(file: BinaryIO, key: bytes | None, where: str) -> Iterator[list[RecordType]]:
    """The records of each block. Raises Sealed, Cut, or ConfigError for what was damaged."""
    cipher, unpack = None if key is None else _cipher(key), zstandard.ZstdDecompressor()
    while len(head := file.read(_FRAME.size)) == _FRAME.size:
        magic, size = _FRAME.unpack(head)
        if magic != _MAGIC or not 0 < size <= MAX_BLOCK:
            raise damaged(where)
        content = file.read(size)
        if len(content) < size:
            raise Cut
        if content[:1] == b"P" and size == _HEAD.size:
            _, num = _HEAD.unpack(content)
            if num > MAX_BLOCK:
                raise damaged(where)
            frame = file.read(num)
            if len(frame) < num:
                raise Cut
        elif content[:1] == b"S" and size > _NONCE_BYTES:
            if cipher is None:
                raise Sealed
            frame = _unsealed(cipher, content, where)
        else:
            raise damaged(where)
        try:
            if not 0 < zstandard.frame_content_size(frame) <= MAX_BLOCK:
                raise damaged(where)
            records = _decode(unpack.decompress(frame))
        except _DAMAGE as error:
            raise damaged(where) from error
        yield records
    if head:
        raise Cut


def _unsealed(cipher: Any, content: bytes, where: str) -> bytes:
    from cryptography.exceptions import InvalidTag

    nonce, sealed = content[1 : 1 + _NONCE_BYTES], content[1 + _NONCE_BYTES :]
    try:
        frame: bytes = cipher.decrypt(nonce, sealed, None)
    except InvalidTag:
        raise ConfigError(
            f"{where} was sealed with another key, or is damaged.",
            fix="Give the --key of the server that recorded.",
            param="key",
        ) from None
    return frame


def _cipher(key: bytes) -> Any:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key)


def damaged(where: str) -> ConfigError:
    what = f"{where} is no recording of a server, or is damaged."
    return ConfigError(what, fix="Fetch it again from where it was recorded.")
