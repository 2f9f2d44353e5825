"""WeightPlan: how a model's weights are held, where, and which part of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tidemill.distributed.shard import WHOLE, Shard
from tidemill.distributed.world import Part
from tidemill.quant.base import LinearMethod
from tidemill.quant.cuda import CudaDense
from tidemill.quant.cuda_packed import CudaInt4, CudaQuantized
from tidemill.quant.cuda_scaled import CudaFP8, CudaInt8
from tidemill.quant.cuda_sparse import CudaSparse
from tidemill.quant.dense import Dense
from tidemill.quant.quantized import Quantized

# By (scheme, device). A new one is a file and a line here.
METHODS: dict[tuple[str, str], type[LinearMethod[Any]]] = {
    ("dense", "cpu"): Dense,
    ("quantized", "cpu"): Quantized,
    ("dense", "cuda"): CudaDense,
    ("quantized", "cuda"): CudaQuantized,
    ("fp8", "cuda"): CudaFP8,
    ("int8", "cuda"): CudaInt8,
    ("int4", "cuda"): CudaInt4,
    ("sparse24", "cuda"): CudaSparse,
}
_ONLINE = ("fp8", "int8", "int4", "sparse24")  # made of plain weights
# by the name of a dtype
SCHEMES = {"float32": "dense", "bfloat16": "dense", "quantized": "quantized"}


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """`fast`: sums may run in an order that depends on the number of rows. `shard`, `hidden`,
    `rows`: of a `Part` of ranks. `expert_parallel`: a rank has some experts, not some of each."""

    scheme: str = "dense"
    device: str = "cpu"
    fast: bool = False
    shard: Shard = WHOLE
    expert_parallel: bool = False
    hidden: Shard = WHOLE
    rows: Shard = WHOLE

    @property
    def method(self) -> LinearMethod[Any]:
        return METHODS[self.scheme, self.device](self.fast)

    @property
    def of_tables(self) -> WeightPlan:
        """The plan for embeddings, heads and routers, which stay as they are where plain weights
        are quantized. Their rows are cut, if anything is."""
        scheme = "dense" if self.scheme in _ONLINE else self.scheme
        return replace(self, scheme=scheme, shard=self.part.tables, hidden=WHOLE, rows=WHOLE)

    @property
    def part(self) -> Part:
        return Part(self.shard, self.hidden, self.rows)


PLAIN = WeightPlan()
