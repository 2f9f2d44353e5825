"""From the logits of the draft vocabulary to drafts: as the target chooses, with the same noise, so
that both agree as often as their distributions let them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tidemill.kernels.noise import exponential_noise, gumbel_argmax_among, noise_keys
from tidemill.runner.sampler import penalize, restrict_min_p, restrict_top_k, restrict_top_p
from tidemill.sched.tree import Tree
from tidemill.types.sampling import SamplingParams


@dataclass(slots=True)
class Chain:
    """A row's tokens so far, and the drafts that follow them."""

    row: int
    params: SamplingParams
    tokens: Sequence[int]
    num_prompt: int
    most: int  # drafts
    drafts: list[int]
    prob: float = 1.0  # that all drafts so far are right, by the head's own account
    tree: Tree | None = None  # drafts that are no chain, instead

    @property
    def position(self) -> int:
        """The position of the next draft."""
        return len(self.tokens) + len(self.drafts)


@dataclass(frozen=True, slots=True)
class Seen:
    """The outcome of a row in a step that was computed: which of the step's tokens are right, from
    position `start` of the row on, and what was drawn after the last of them."""

    row: int
    start: int
    at: Sequence[int]  # numbers of those tokens in the step
    drawn: Sequence[int]  # after each of the last so many; none where a prompt goes on

    @property
    def end(self) -> int:
        """Past the last position."""
        return self.start + len(self.at)

    @property
    def first_drawn(self) -> int:
        """The position of the first token drawn."""
        return self.end - len(self.drawn) + 1


class Chooser:
    def __init__(self, ids_D: torch.Tensor, vocab_size: int, least: float) -> None:
        """`least`: the probability of a chain of drafts under which it ends."""
        self._ids_D, self._least, self._device = ids_D, least, ids_D.device
        self._columns = torch.full((vocab_size,), -1, device=self._device)
        self._columns[ids_D] = torch.arange(len(ids_D), device=self._device)

    def extend(self, logits_RD: torch.Tensor, chains: Sequence[Chain]) -> list[int]:
        """Add a draft to each of these chains that is worth one; which of them go on. The logits
        are consumed."""
        for i, chain in enumerate(chains):
            if chain.params.has_penalties:
                self._penalize(logits_RD[i], chain)
        drawn = [i for i, chain in enumerate(chains) if not chain.params.greedy]
        chosen_R = logits_RD.argmax(-1)
        if drawn:
            some = self._restricted(logits_RD[drawn], [chains[i].params for i in drawn])
            seeds, positions = self._ints(
                [chains[i].params.seed or 0 for i in drawn], [chains[i].position for i in drawn]
            )
            chosen_R[drawn] = gumbel_argmax_among(some, self._ids_D, seeds, positions)
            logits_RD[drawn] = some
        probs = logits_RD.softmax(-1).gather(1, chosen_R.unsqueeze(1)).flatten().tolist()
        going = []
        for i, (chain, token) in enumerate(
            zip(chains, self._ids_D[chosen_R].tolist(), strict=True)
        ):
            chain.prob *= probs[i]
            if chain.prob >= self._least:
                chain.drafts.append(token)
                if len(chain.drafts) < chain.most:
                    going.append(i)
        return going

    def candidates(
        self, logits_RD: torch.Tensor, chains: Sequence[Chain], number: int, num: int
    ) -> list[list[int]]:
        """The `num` tokens of each that are likeliest to be drawn `number` places after its known
        ones. Logits are consumed."""
        drawn = [i for i, chain in enumerate(chains) if not chain.params.greedy]
        if drawn:
            some = self._restricted(logits_RD[drawn], [chains[i].params for i in drawn])
            seeds, positions = self._ints(
                [chains[i].params.seed or 0 for i in drawn],
                [len(chains[i].tokens) + number for i in drawn],
            )
            logits_RD[drawn] = (
                some
                - exponential_noise(
                    noise_keys(seeds, positions), len(self._ids_D), self._ids_D
                ).log_()
            )
        best = logits_RD.topk(min(num, logits_RD.shape[1]), dim=-1).indices
        return [(row + [row[-1]] * (num - len(row))) for row in self._ids_D[best].tolist()]

    def _restricted(self, logits_SD: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
        logits_SD /= torch.tensor(
            [[p.temperature] for p in params], dtype=torch.float32, device=self._device
        )
        restrict_top_k(logits_SD, [p.top_k for p in params])
        restrict_top_p(logits_SD, [p.top_p for p in params])
        restrict_min_p(logits_SD, [p.min_p for p in params])
        return logits_SD

    def _penalize(self, logits_D: torch.Tensor, chain: Chain) -> None:
        columns = self._columns[self._ints([*chain.tokens, *chain.drafts])]
        prompt, output = columns[: chain.num_prompt], columns[chain.num_prompt :]
        penalize(logits_D, prompt[prompt >= 0], output[output >= 0], chain.params)

    def _ints(self, *values: list[int]) -> torch.Tensor:
        return torch.tensor(values[0] if len(values) == 1 else values, device=self._device)
