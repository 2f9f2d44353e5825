"""Segments: the parts of a prompt that are more than token ids.

ids         | 5  9  7 | 0  0  0  0 | 3  8 |
segments              | "picture"  |            rows of embeddings stand in the place of what is looked up by id

Whoever compares prompts compares ids and segments: their keys tell apart what the same ids stand
for.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

import msgspec

from tidemill.errors import InvalidRequest

TOKEN_TYPE, EMBEDDINGS, PICTURE = "token_type", "embeddings", "picture"


class Kind(NamedTuple):
    has_rows: bool  # rows of embeddings stand in the place of those of its ids
    is_whole: bool  # its tokens are computed in one step


KINDS = {
    TOKEN_TYPE: Kind(has_rows=False, is_whole=False),  # its key is the type, which is 0 elsewhere
    EMBEDDINGS: Kind(has_rows=True, is_whole=False),
    PICTURE: Kind(has_rows=True, is_whole=True),
}


class Segment(msgspec.Struct, frozen=True):
    """Tokens of a prompt that stand for something else, or for something more."""

    start: int
    length: int
    kind: str  # one of KINDS
    key: bytes  # a digest of its content, or the content itself if that is small

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def has_rows(self) -> bool:
        return KINDS[self.kind].has_rows

    @property
    def is_whole(self) -> bool:
        return KINDS[self.kind].is_whole


def second_text(start: int, num: int) -> list[Segment]:
    """The segment of the second text of a pair of `num` tokens, if the model tells texts apart by
    types; 0: it does not."""
    return [Segment(start, num - start, TOKEN_TYPE, b"\1")] if 0 < start < num else []


name_of = msgspec.msgpack.Encoder().encode  # all of a segment, as bytes


def key_of(content: bytes) -> bytes:
    return sha256(content).digest()


def overlapping(segments: Sequence[Segment], start: int, end: int) -> list[Segment]:
    """The segments with tokens from `start` to `end` - 1."""
    return [segment for segment in segments if segment.start < end and start < segment.end]


def uncut(segments: Sequence[Segment], position: int) -> int:
    """The last position up to this one at which the prompt may be cut."""
    return next(
        (each.start for each in segments if each.is_whole and each.start < position < each.end),
        position,
    )


def content_ids(token_ids: Sequence[int], segments: Sequence[Segment]) -> array[int]:
    """The ids, with words of the keys of segments mixed in: prompts that differ in either differ in
    these, but for accidents."""
    ids = array("I", [token & 0xFFFFFFFF for token in token_ids])
    for segment in segments:
        mask = int.from_bytes(sha256(name_of(segment)).digest()[:4], "little")
        for at in range(segment.start, min(segment.end, len(ids))):
            ids[at] ^= mask
    return ids


def check_segments(
    segments: Sequence[Segment],
    contents: dict[bytes, bytes],
    num_prompt: int,
    row_bytes: int,
    most: int,
    most_rows: int,
) -> None:
    """Raises what is wrong with the segments of a prompt. `row_bytes`: of the content of a token;
    0: the model takes token ids only. `most`: tokens of a prompt that any step can compute;
    `most_rows`: of which there can be rows at once."""
    before = 0
    for segment in segments:
        where = f"The segment of tokens {segment.start} to {segment.end - 1}"
        if segment.kind not in KINDS:
            raise InvalidRequest(
                f"There is no kind of segment {segment.kind!r}.", fix=f"Choose {', '.join(KINDS)}."
            )
        if segment.length < 1 or not before <= segment.start <= segment.end <= num_prompt:
            what = (
                f"{where} is not within the prompt of {num_prompt}, or not after the one before it."
            )
            raise InvalidRequest(
                what, fix="Give segments of one token or more in their order.", param="segments"
            )
        before = segment.end
        if segment.kind == TOKEN_TYPE and len(segment.key) != 1:
            raise InvalidRequest(
                "The key of a segment of a token type is one byte: the type.", param="segments"
            )
        if not segment.has_rows:
            continue
        if not row_bytes:
            raise InvalidRequest(
                "This model takes token ids only.", fix="Leave segments out.", param="segments"
            )
        if segment.end == num_prompt:
            raise InvalidRequest(
                f"{where} ends the prompt.",
                fix="Give at least one token after it.",
                param="segments",
            )
        if segment.length > (limit := most if segment.is_whole else most_rows):
            what = f"{where} is too long: at most {max(limit, 0)} tokens are computed together."
            raise InvalidRequest(what, fix="Serve with more --token-budget.", param="segments")
        content = contents.get(segment.key)
        if (
            content is None
            or len(content) != segment.length * row_bytes
            or key_of(content) != segment.key
        ):
            what = f"{where} needs {segment.length} x {row_bytes} bytes of content under their SHA-256 digest."
            raise InvalidRequest(what, param="segments")
