"""Keys before rotation and values of a text, layer by layer, as a model computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tidemill.compress.draft.states import batch_of
from tidemill.compress.kvquant.fit import Samples, sensitivity
from tidemill.errors import CalibrationError
from tidemill.kernels.kv_cache import HeadWeights
from tidemill.kernels.mixers import MixedStep
from tidemill.runner.batch import Batch
from tidemill.runner.cpu_runner import CpuRunner

MAX_BYTES = 2**30  # of samples
_MAX_FIRST = 256  # tokens at position 0
# attention layer, queries, keys, values: [T, heads, D]
Seen = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]
Tick = Callable[[int], None]  # tokens done


class Observed:
    """A step that shows each layer's queries and keys, before rotation, and values. `change`, if
    there is one, replaces the fused q, k, v."""

    def __init__(
        self,
        runner: CpuRunner,
        step: MixedStep,
        seen: Seen,
        change: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        self.step, self._seen, self._change = step, seen, change
        assert runner.mixers.kv is not None
        self._num_heads, self._dim = runner.mixers.kv.num_heads, runner.mixers.kv.head_dim

    def attend(self, layer: int, qkv_TC: torch.Tensor, learned: HeadWeights) -> torch.Tensor:
        number = int(self.step.numbers[layer])
        heads = qkv_TC.view(qkv_TC.shape[0], -1, self._dim)
        num_kv = (heads.shape[1] - self._num_heads) // 2
        q, k, v = heads.split([self._num_heads, num_kv, num_kv], 1)
        if learned.q_norm is not None and learned.k_norm is not None:
            q, k = (
                F.rms_norm(x, (self._dim,), w, learned.eps)
                for x, w in ((q, learned.q_norm), (k, learned.k_norm))
            )
        self._seen(number, q, k, v)
        if self._change is not None:
            assert learned.q_norm is None, "what is changed would be normed again"
            qkv_TC = self._change(number, heads).reshape(qkv_TC.shape).contiguous()
        return self.step.attend(layer, qkv_TC, learned)

    def convolve(self, *arguments: Any) -> torch.Tensor:
        return self.step.convolve(*arguments)

    def scan(self, *arguments: Any) -> torch.Tensor:
        return self.step.scan(*arguments)


@torch.inference_mode()
def forward(
    runner: CpuRunner, batch: Batch, seen: Seen, change: Callable[..., torch.Tensor] | None = None
) -> torch.Tensor:
    """Hidden states [T, H]. The runner's cache is overwritten."""
    step = runner.mixers.plan(
        batch.rows, batch.starts, batch.counts, batch.positions_T, batch.slots_GT
    )
    embedded = runner.model.embed_at(batch.ids_T, batch.positions_T, None)
    return runner.model(embedded, Observed(runner, step, seen, change))


class Collector:
    """Samples of every layer, in bounded memory: of a long text, every n-th token. What all errors
    count is computed from all tokens of a sequence."""

    def __init__(
        self, runner: CpuRunner, sequences: list[list[int]], max_bytes: int = MAX_BYTES
    ) -> None:
        assert runner.mixers.kv is not None
        self._runner, self._kv, self._sequences = runner, runner.mixers.kv, sequences
        self.num_tokens = sum(map(len, sequences))
        sizes = len(self._kv.specs) * self._kv.num_kv_heads * self._kv.head_dim
        self.stride = max(1, -(-self.num_tokens * 3 * 4 * sizes // max_bytes))
        self._made: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in self._kv.specs]
        self._first: list[list[torch.Tensor]] = [[] for _ in self._kv.specs]

    def collect(self, tick: Tick) -> list[Samples]:
        done = 0
        for ids in self._sequences:
            self._clear(len(ids))
            forward(self._runner, batch_of(self._runner, ids), self._see)
            done += len(ids)
            tick(done)
        distinct = list(dict.fromkeys(token for ids in self._sequences for token in ids))[
            :_MAX_FIRST
        ]
        tables = self._runner.mixers.tables
        at_once = min(tables[0][0].shape[0], (self._runner.cache.shape[0] - 1) // len(tables))
        for start in range(0, len(distinct), at_once):
            self._see_first(distinct[start : start + at_once])
        samples = []
        for collected, first in zip(self._made, self._first, strict=True):
            keys, key_weights, values, value_weights = (
                torch.cat(parts) for parts in zip(*collected, strict=True)
            )
            samples.append(Samples(keys, key_weights, values, value_weights, torch.cat(first)))
        return samples

    def _clear(self, num_tokens: int) -> None:
        self._runner.cache[
            : 1 + sum(-(-num_tokens // size) for _, size in self._runner.mixers.tables)
        ] = 0

    def _see(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        _check_finite(layer, k, v)
        weights = sensitivity(q, k, v, self._kv.specs[layer], self._kv.angles[layer])
        self._made[layer].append(
            tuple(each[1 :: self.stride].clone() for each in (k, weights[0], v, weights[1]))
        )

    def _see_first(self, ids: list[int]) -> None:
        """Each the only token of a sequence, in a row and a page of its own."""
        num, zeros = len(ids), torch.zeros(len(ids), dtype=torch.int64)
        pages = torch.arange(1, num + 1)
        self._clear(0)
        slots, first = [], 1
        for table, size in self._runner.mixers.tables:
            self._runner.cache[first : first + num] = 0
            table[:num, 0] = pages + (first - 1)
            slots.append((pages + (first - 1)) * size)
            first += num
        ones = np.ones(num, np.int64)
        batch = Batch(
            np.arange(num),
            0 * ones,
            ones,
            np.arange(num),
            torch.tensor(ids),
            zeros,
            torch.stack(slots),
        )

        def see(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
            _check_finite(layer, k, v)
            self._first[layer].append(k.clone())

        forward(self._runner, batch, see)
        for table, _ in self._runner.mixers.tables:
            table[:num] = 0


def _check_finite(layer: int, *tensors: torch.Tensor) -> None:
    if not all(bool(tensor.isfinite().all()) for tensor in tensors):
        raise CalibrationError(
            f"Keys or values of attention layer {layer} are not finite.",
            fix="Is the checkpoint whole? Try it with generate.",
        )
