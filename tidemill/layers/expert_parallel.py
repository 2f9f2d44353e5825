"""Expert parallelism: each rank has some experts, and tokens go where theirs are.

Every rank has every token's hidden state and computes the same routing, so each knows, without
asking, which tokens its experts get and how many rows it will receive from whom. Tokens are shared
out: a rank gets the outputs of all experts of its tokens by an all-to-all of as many rows as there
are, adds them up in the order of a token's choice, as one process does, and the sums are gathered.
A token's bits depend neither on other tokens nor on the number of ranks.
"""

from __future__ import annotations

import numpy as np
import torch

from tidemill.distributed.group import Group
from tidemill.distributed.shard import Shard
from tidemill.kernels.linear import Weight
from tidemill.kernels.moe import ExpertWeights, combine, route_reference
from tidemill.types.model_config import MoESpec


class ParallelExperts(ExpertWeights):
    """`own`: this rank's experts, of which it computes one for each row it gets. `shared`: some
    columns of the shared expert."""

    def __init__(
        self, spec: MoESpec, own: ExpertWeights, group: Group, shared: tuple[Weight, Weight] | None
    ) -> None:
        self._spec, self._own, self._group, self._shared = spec, own, group, shared
        self.counts: np.ndarray = np.zeros(spec.num_experts, np.int64)
        shards = [Shard(rank, group.size) for rank in range(group.size)]
        self._shards, self._experts = shards, [shard.range(spec.num_experts) for shard in shards]
        owners = [rank for rank, experts in enumerate(self._experts) for _ in experts]
        self._owners = torch.tensor(owners, device="cpu")

    def __call__(self, x_TH: torch.Tensor, logits_TL: torch.Tensor) -> torch.Tensor:
        spec, num = self._spec, x_TH.shape[0]
        logits_TE = logits_TL[:, : spec.num_experts].contiguous()
        weights_TK, chosen_TK = route_reference(
            logits_TE, spec.top_k, spec.renormalise, spec.scoring
        )
        self.counts += np.bincount(chosen_TK.flatten().numpy(), minlength=spec.num_experts)
        out_TH = self._combine(self._exchange(x_TH, chosen_TK), weights_TK, num)
        if self._shared is not None:
            gate_up, down = self._shared
            part_TH = down(gate_up(x_TH)) / torch.exp(-logits_TL[:, spec.num_experts :]).add_(1.0)
            out_TH += self._group.all_reduce(part_TH)
        return out_TH

    def _exchange(self, x_TH: torch.Tensor, chosen_TK: torch.Tensor) -> torch.Tensor:
        """The outputs of the experts of this rank's tokens, [own tokens, K, H]."""
        num, num_chosen = chosen_TK.shape
        owners_TK, rank = self._owners[chosen_TK], self._group.rank
        pairs = (owners_TK == rank).nonzero()  # by token: token, rank of choice
        outs = self._compute(x_TH[pairs[:, 0]], chosen_TK[pairs[:, 0], pairs[:, 1]])
        tokens = [shard.range(num) for shard in self._shards]
        ends = torch.searchsorted(
            pairs[:, 0].contiguous(), torch.tensor([own.stop for own in tokens])
        ).tolist()
        sent = [outs[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
        own = owners_TK[tokens[rank].start : tokens[rank].stop]
        came = torch.cat(
            self._group.all_to_all(
                sent, [int((own == source).sum()) for source in range(self._group.size)]
            )
        )
        where = [(own == source).nonzero() for source in range(self._group.size)]
        place = torch.cat([at[:, 0] * num_chosen + at[:, 1] for at in where])
        out_TKH = x_TH.new_empty(own.shape[0] * num_chosen, x_TH.shape[1])
        out_TKH[place] = came
        return out_TKH.view(-1, num_chosen, x_TH.shape[1])

    def _compute(self, rows_PH: torch.Tensor, experts_P: torch.Tensor) -> torch.Tensor:
        """The output of each row's expert: the kernel that routes is given no choice."""
        own = self._experts[self._group.rank]
        if not rows_PH.shape[0]:
            return rows_PH
        logits_PE = rows_PH.new_zeros(rows_PH.shape[0], len(own), dtype=torch.float32)
        logits_PE.scatter_(1, experts_P[:, None] - own.start, 1.0)
        return self._own(rows_PH.contiguous(), logits_PE)

    def _combine(self, out_TKH: torch.Tensor, weights_TK: torch.Tensor, num: int) -> torch.Tensor:
        own = self._shards[self._group.rank].range(num)
        sums_TH = combine(out_TKH, weights_TK[own.start : own.stop])
        return self._group.all_gather(sums_TH, 0, [len(shard.range(num)) for shard in self._shards])
