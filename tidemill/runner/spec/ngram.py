"""Prompt lookup: what followed the last few tokens when they occurred before in the same request."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.runner.spec import Ask

_LONGEST, _SHORTEST = 4, 2
_AT_ONCE = 8192  # tokens that enter indexes in one step: long prompts must not hold it up


class NgramDrafter:
    name = "ngram"
    is_free = True

    def __init__(self) -> None:
        self._indexes: dict[int, _Index] = {}

    def propose(self, asks: Sequence[Ask]) -> list[Sequence[int]]:
        made, room = [], _AT_ONCE
        for ask in asks:
            index = self._indexes.get(ask.seq)
            if index is None:
                index = self._indexes[ask.seq] = _Index()
            room -= index.add(ask.tokens, room)
            made.append(index.propose(ask.tokens, ask.most))
        return made

    def forget(self, seq: int, tokens: Sequence[int], salt: str) -> None:
        self._indexes.pop(seq, None)


class _Index:
    """The last ends of each n-gram of a request, for a few n."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        self._num_seen = 0  # tokens whose n-grams are in the index

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        if self._num_seen < len(tokens) - 1:
            return ()
        last = tuple(tokens[-_LONGEST:])
        for n in range(len(last), _SHORTEST - 1, -1):
            end = self._ends.get(last[-n:])
            if end is not None:
                return _follow(tokens, end, most)
        return ()

    def add(self, tokens: Sequence[int], most: int) -> int:
        """All n-grams that end before the last token (the one that ends with it is what is looked
        up), of at most so many tokens. Returns of how many."""
        first, until = self._num_seen, min(len(tokens) - 1, self._num_seen + most)
        for end in range(max(first, _SHORTEST - 1) + 1, until + 1):
            last = tuple(tokens[max(end - _LONGEST, 0) : end])
            for n in range(_SHORTEST, len(last) + 1):
                self._ends[last[-n:]] = end
        self._num_seen = max(first, until)
        return self._num_seen - first


def _follow(tokens: Sequence[int], end: int, most: int) -> Sequence[int]:
    """The tokens from `end` on; past the last, as if the stretch between were repeated."""
    found = list(tokens[end : end + most])
    while len(found) < most:
        found += found[-(len(tokens) - end) :][: most - len(found)]
    return found
