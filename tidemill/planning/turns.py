"""Turns: prompts that go on with what was generated before find it in a simulated prefix cache, as
in the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.planning.drafter import token_of


@dataclass(frozen=True, slots=True)
class _Sample:
    """A sample as it was recorded, and as the simulation has it."""

    recorded: tuple[int, ...]
    simulated: tuple[int, ...]  # of its prompt; then comes its own token, again and again
    token: int

    def prefix(self, num: int) -> tuple[int, ...]:
        return self.simulated[:num] + (self.token,) * (num - len(self.simulated))


class Turns:
    """A simulated sequence generates one token again and again. So that the next turn of a
    conversation finds the pages of the turns before it, the tokens that these generated are
    replaced in its prompt. Of one engine."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        # by the hash of all tokens up to the end of a page: who had them first
        self._samples: dict[int, _Sample] = {}

    def simulated(self, prompt_ids: tuple[int, ...], salt: str) -> tuple[int, ...]:
        """The prompt as the simulation has it."""
        found = None
        for key in self._keys(prompt_ids, salt):
            if (sample := self._samples.get(key)) is None:
                break
            found = sample
        if found is None:
            return prompt_ids
        most = min(len(prompt_ids), len(found.recorded))
        num = next((i for i in range(most) if prompt_ids[i] != found.recorded[i]), most)
        return found.prefix(num) + prompt_ids[num:]

    def add(
        self, prompt_ids: tuple[int, ...], simulated: tuple[int, ...], salt: str, outputs: Sequence[tuple[int, ...]],
        seqs: Sequence[int],
    ) -> None:  # fmt: skip
        """A request has come, whose samples will generate this. `seqs`: their numbers in the
        simulation."""
        for output, seq in zip(outputs, seqs, strict=False):
            sample = _Sample(prompt_ids + output, simulated, token_of(seq))
            for key in self._keys(sample.recorded, salt):
                self._samples.setdefault(key, sample)

    def _keys(self, token_ids: tuple[int, ...], salt: str) -> list[int]:
        size, key, keys = self._page_size, hash(salt), []
        for at in range(0, len(token_ids) // size * size, size):
            key = hash((key, token_ids[at : at + size]))
            keys.append(key)
        return keys
