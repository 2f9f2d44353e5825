"""Suffix decoding: what followed the longest match of the last tokens, in the same request and in
recent outputs of others."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tidemill.runner.spec import Ask

# tokens by which matches are found: in all texts, and in the request's own where there are none
_LONG, _SHORT = 4, 2
_LONGEST = 32  # tokens of a match that are compared
# matches that are looked at in one index: the most recent, up to one that is as long as can be
_CANDIDATES = 6
_SURE = 0.5  # drafts end where what followed the matches differs too much
# tokens that enter the indexes in one step: of running requests, and of ended ones
_AT_ONCE, _ENDED_AT_ONCE = 4096, 1024
_PIECE = 2048  # tokens of an output that are kept and dropped together
_PER_SALT, _IN_ALL = 2**16, 2**18  # tokens of ended requests, of 0.2 KB each

_BITS = 20  # of a token in a key
_LONG_KEY, _SHORT_KEY = (1 << _LONG * _BITS) - 1, (1 << _SHORT * _BITS) - 1
_PLACE_BITS = 32  # of a position in a text: a place is the text's number and where a match ends
_PLACE = (1 << _PLACE_BITS) - 1


class SuffixDrafter:
    name = "suffix"
    is_free = True

    def __init__(self, per_salt: int = _PER_SALT, in_all: int = _IN_ALL) -> None:
        self._per_salt, self._in_all = per_salt, in_all
        self._own: dict[int, _Own] = {}
        # by salt, the one used last at the end
        self._pools: OrderedDict[str, _Pool] = OrderedDict()
        self._ended: deque[tuple[str, list[int]]] = deque()  # texts that are to enter their pools
        self.num_kept = 0  # tokens in all pools

    def propose(self, asks: Sequence[Ask]) -> list[Sequence[int]]:
        self._take_ended()
        room, guesses = _AT_ONCE, []
        for ask in asks:
            own = self._own.setdefault(ask.seq, _Own(ask.num_prompt))
            room -= own.add(ask.tokens, room)
            guesses.append(self._guess(own, ask))
        return guesses

    def forget(self, seq: int, tokens: Sequence[int], salt: str) -> None:
        own = self._own.pop(seq, None)
        if own is None or len(tokens) <= own.num_prompt:
            return
        for start in range(
            own.num_prompt, min(len(tokens), own.num_prompt + self._per_salt), _PIECE
        ):
            self._ended.append((salt, list(tokens[max(0, start - _LONGEST) : start + _PIECE])))

    def _guess(self, own: _Own, ask: Ask) -> Sequence[int]:
        tokens, pool = ask.tokens, self._pools.get(ask.salt)
        if not own.is_ready(tokens):
            return ()
        key = _key(tokens[-_LONG:])
        found = own.find(tokens, key) if len(tokens) > _LONG else []
        if pool is not None and len(tokens) >= _LONG:
            self._pools.move_to_end(ask.salt)
            found += pool.find(tokens, key)
        return _vote(tokens, found or own.find_short(tokens), ask.most)

    def _take_ended(self) -> None:
        """Takes up the tokens of requests that have ended, a piece or more in a step; the least
        recently used goes for it."""
        room = _ENDED_AT_ONCE
        while self._ended and room > 0:
            salt, tokens = self._ended.popleft()
            pool = self._pools.setdefault(salt, _Pool())
            self._pools.move_to_end(salt)
            self.num_kept += pool.add(tokens)
            room -= len(tokens)
            while pool.num_tokens > self._per_salt:
                self.num_kept -= pool.drop_oldest()
            while self.num_kept > self._in_all:
                oldest, other = next(iter(self._pools.items()))
                self.num_kept -= other.drop_oldest()
                if not other.num_tokens:
                    del self._pools[oldest]


@dataclass(slots=True)
class _Match:
    """A text in which tokens up to `end` are the last ones of the request."""

    tokens: Sequence[int]
    end: int
    length: int
    weight: float

    def after(self, own: Sequence[int], most: int) -> tuple[int, ...]:
        """The tokens that followed. Past the last token of the request itself, as if the stretch
        from the match on were repeated."""
        found = tuple(self.tokens[self.end : self.end + most])
        while len(found) < most and self.tokens is own:
            found += found[self.end - len(own) :][: most - len(found)]
        return found


class _Own:
    """The ends of each n-gram of a running request: the last time, and from there the times before."""

    def __init__(self, num_prompt: int) -> None:
        self.num_prompt = num_prompt
        self._long: dict[int, int] = {}
        self._short: dict[int, int] = {}
        self._before = array("q", [-1])  # by end: where the same n-gram ended before
        self._key = 0

    def add(self, tokens: Sequence[int], room: int) -> int:
        """All n-grams that end before the last token: the one that ends with it is what is looked
        up. Returns how many are new, at most `room`."""
        first = len(self._before)
        until = min(len(tokens), first + room)
        long, short, key = self._long, self._short, self._key
        for end in range(first, until):
            key = (key << _BITS | tokens[end - 1]) & _LONG_KEY
            self._before.append(long.get(key, -1) if end >= _LONG else -1)
            if end >= _LONG:
                long[key] = end
            if end >= _SHORT:
                short[key & _SHORT_KEY] = end
        self._key = key
        return max(until - first, 0)

    def is_ready(self, tokens: Sequence[int]) -> bool:
        return len(self._before) >= len(tokens)

    def find(self, tokens: Sequence[int], key: int) -> list[_Match]:
        found, end = list[_Match](), self._long.get(key, -1)
        while end >= 0 and not _enough(found):
            found.append(_match(tokens, tokens, end, 1))
            end = self._before[end]
        return found

    def find_short(self, tokens: Sequence[int]) -> list[_Match]:
        end = self._short.get(_key(tokens[-_SHORT:])) if len(tokens) > _SHORT else None
        return [] if end is None else [_Match(tokens, end, _SHORT, _SHORT)]


@dataclass(slots=True)
class _Text:
    """The end of a prompt and the output after it. `count`: how many requests had just this one."""

    tokens: list[int]
    before: array[int]  # by end: place where the same n-gram ended before
    count: int = 1


class _Pool:
    """Texts of ended requests, the one used last at the end, and where their n-grams ended."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._texts: OrderedDict[int, _Text] = OrderedDict()
        self._numbers: dict[bytes, int] = {}  # by content
        self._last: dict[int, int] = {}  # n-gram to place
        self._next = 0

    def add(self, tokens: list[int]) -> int:
        """Returns how many tokens more are kept."""
        content = array("q", tokens).tobytes()
        number = self._numbers.get(content)
        if number is not None:
            self._texts[number].count += 1
            self._texts.move_to_end(number)
            return 0
        number, self._next = self._next, self._next + 1
        text = _Text(tokens, array("q", [-1] * len(tokens)))
        for end, key in _keys(tokens):
            text.before[end] = self._last.get(key, -1)
            self._last[key] = number << _PLACE_BITS | end
        self._texts[number], self._numbers[content] = text, number
        self.num_tokens += len(tokens)
        return len(tokens)

    def drop_oldest(self) -> int:
        """Returns how many tokens that were."""
        number, text = self._texts.popitem(last=False)
        del self._numbers[array("q", text.tokens).tobytes()]
        for end, key in _keys(text.tokens):
            if self._last.get(key) == number << _PLACE_BITS | end:
                place = text.before[end]
                while place >> _PLACE_BITS == number:
                    place = text.before[place & _PLACE]
                if place >> _PLACE_BITS in self._texts:
                    self._last[key] = place
                else:
                    del self._last[key]
        self.num_tokens -= len(text.tokens)
        return len(text.tokens)

    def find(self, tokens: Sequence[int], key: int) -> list[_Match]:
        found, place = list[_Match](), self._last.get(key, -1)
        longest, used = 0, -1
        while not _enough(found) and (text := self._texts.get(place >> _PLACE_BITS)) is not None:
            found.append(_match(tokens, text.tokens, place & _PLACE, text.count))
            if found[-1].length > longest:
                longest, used = found[-1].length, place >> _PLACE_BITS
            place = text.before[place & _PLACE]
        if used >= 0:
            self._texts.move_to_end(used)
        return found


def _enough(found: list[_Match]) -> bool:
    return len(found) >= _CANDIDATES or (bool(found) and found[-1].length >= _LONGEST)


def _key(tokens: Sequence[int]) -> int:
    key = 0
    for token in tokens:
        key = key << _BITS | token
    return key & _LONG_KEY


def _keys(tokens: list[int]) -> Iterator[tuple[int, int]]:
    """The end and the key of every n-gram that a token follows."""
    key = _key(tokens[: _LONG - 1])
    for end in range(_LONG, len(tokens)):
        key = (key << _BITS | tokens[end - 1]) & _LONG_KEY
        yield end, key


def _match(tokens: Sequence[int], other: Sequence[int], end: int, count: int) -> _Match:
    most, length, last = min(_LONGEST, end), _LONG, len(tokens)
    for more in (16, 8, 4, 2, 1):
        at = length + more
        if at <= most and other[end - at : end - length] == tokens[last - at : last - length]:
            length = at
    return _Match(other, end, length, count * length**3)


def _vote(tokens: Sequence[int], found: list[_Match], most: int) -> Sequence[int]:
    """The likeliest continuation of the matches, of which long ones weigh more: as many tokens as
    the longest has, or fewer where what followed differs too much."""
    longest = max((match.length for match in found), default=0)
    weights: dict[tuple[int, ...], float] = {}
    for match in found:
        if 2 * match.length > longest:
            after = match.after(tokens, min(most, longest))
            weights[after] = weights.get(after, 0.0) + match.weight
    num, sure = 0, 1.0
    while len(weights) > 1:
        votes: dict[int, float] = {}
        for row, weight in weights.items():
            if len(row) > num:
                votes[row[num]] = votes.get(row[num], 0.0) + weight
        best = max(votes, key=votes.__getitem__)
        sure *= votes[best] / sum(votes.values())
        if sure < _SURE:
            return next(iter(weights))[:num]
        weights = {row: weight for row, weight in weights.items() if row[num : num + 1] == (best,)}
        num += 1
    return next(iter(weights), ())
