"""Stop strings as one automaton (Aho-Corasick): each character of an output takes constant time,
however many strings there are and however long they are."""

from __future__ import annotations

from functools import lru_cache

_NUM_KNOWN = 64  # sets of strings


class StopStrings:
    """A state is the longest end of the text that one of the strings begins with. Does not change:
    the outputs of a request share one. States are numbered along the strings, so that most are
    followed by the next number."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.first_chars = frozenset(stop[:1] for stop in stops)
        self.depth = [0]  # of each state: the length of what it stands for
        self._next_char = [""]  # that leads to the next number
        # other transitions: as many as there are strings, at most
        self._branches: dict[tuple[int, str], int] = {}
        self._shorter = [0]  # the state of the longest shorter end of the same text
        self.ended = [0]  # the length of the longest string that ends there
        parents = [0]
        for stop in stops:
            state = 0
            for char in stop:
                following = self._following(state, char)
                if not following:
                    following = len(parents)
                    if following == state + 1:
                        self._next_char[state] = char
                    else:
                        self._branches[state, char] = following
                    self._next_char.append("")
                    self.depth.append(self.depth[state] + 1)
                    self.ended.append(0)
                    parents.append(state)
                state = following
            self.ended[state] = len(stop)
        self._shorter *= len(parents)
        chars = {child: char for (_, char), child in self._branches.items()}
        for state in sorted(range(1, len(parents)), key=self.depth.__getitem__):
            parent = parents[state]
            if parent:
                char = chars.get(state) or self._next_char[parent]
                self._shorter[state] = self.step(self._shorter[parent], char)
            self.ended[state] = self.ended[state] or self.ended[self._shorter[state]]

    def _following(self, state: int, char: str) -> int:
        """The state in which one more character of a string has come; 0: none."""
        return state + 1 if self._next_char[state] == char else self._branches.get((state, char), 0)

    def step(self, state: int, char: str) -> int:
        """The state after another character."""
        while True:
            if following := self._following(state, char):
                return following
            if state == 0:
                return 0
            state = self._shorter[state]


@lru_cache(maxsize=_NUM_KNOWN)
def compiled_stops(stops: tuple[str, ...]) -> StopStrings:
    """Shared by the outputs of a request, and by requests with the same strings."""
    return StopStrings(stops)
