"""Structured output: text that a grammar forces, as the tokenizer would write it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tidemill.runner.spec import Ask


class ForcedDrafter:
    name = "forced"
    is_free = True

    def __init__(self, forced: Callable[[int], Sequence[int]]) -> None:
        """`forced`: the tokens that must follow the output of a sequence, none if it is free to go
        on in several ways."""
        self._forced = forced

    def propose(self, asks: Sequence[Ask]) -> list[Sequence[int]]:
        return [self._forced(ask.seq)[: ask.most] if ask.params.has_masks else () for ask in asks]

    def forget(self, seq: int, tokens: Sequence[int], salt: str) -> None:
        pass
