"""The inputs that a step on a GPU gives to the model's layers, and the pool of pages that it reads."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch

from tidemill.config import EngineConfig
from tidemill.config.cache import bytes_of_page
from tidemill.kernels.cuda.attention import attend
from tidemill.kernels.cuda.attention_lists import Lists
from tidemill.kernels.cuda.kv_write import enter_heads
from tidemill.kernels.cuda.lanes import change_over, in_order
from tidemill.kernels.cuda.scan import CudaStates, CudaStateStep
from tidemill.kernels.kv_cache import PLAIN, HeadWeights, PagedKV
from tidemill.kernels.pending import PendingLora, with_added
from tidemill.kernels.state import PagedStates, ScanInputs, StateWeights
from tidemill.types.coverage import uncovered
from tidemill.types.kv_format import FORMATS, num_copied_pages
from tidemill.types.model_config import ModelConfig


@dataclass(slots=True)
class CudaStep:
    """The data of a step that a layer's attention, or its state, needs."""

    adds: ClassVar = True
    kv: PagedKV
    biases: list[torch.Tensor | None]  # of each layer, by distance
    lists: Lists
    positions_T: torch.Tensor
    slots_GT: torch.Tensor
    # of each layer, among those with attention; None: they all have it
    numbers: list[int] | None = None
    states: CudaStateStep | None = None

    def enter(
        self, layer: int, qkv_TC: torch.Tensor | PendingLora, learned: HeadWeights = PLAIN
    ) -> None:
        self._enter(layer, *with_added(qkv_TC), learned)

    def _enter(
        self, layer: int, qkv_TC: torch.Tensor, added_TC: torch.Tensor | None, learned: HeadWeights
    ) -> None:
        layer = layer if self.numbers is None else self.numbers[layer]
        kv, at = self.kv, self.kv.places[layer]
        where = at.index, self.positions_T, self.slots_GT[at.group], kv.angles[layer]
        enter_heads(qkv_TC, kv.cache, *where, kv.num_heads, learned, kv.scales, added_TC)

    def attend(
        self, layer: int, qkv_TC: torch.Tensor | PendingLora, learned: HeadWeights = PLAIN
    ) -> torch.Tensor:
        qkv_TC, added_TC = with_added(qkv_TC)
        self._enter(layer, qkv_TC, added_TC, learned)
        layer = layer if self.numbers is None else self.numbers[layer]
        kv, at = self.kv, self.kv.places[layer]
        table = kv.tables[at.group]
        out = qkv_TC.new_empty(qkv_TC.shape[0], kv.num_heads * kv.head_dim)
        spec, bias = kv.specs[layer], self.biases[layer]
        with in_order("attention"):
            attend(
                qkv_TC,
                kv.cache,
                at.index,
                table,
                self.lists,
                out,
                spec,
                self.positions_T,
                learned.sinks,
                bias,
                kv.scales,
            )
        change_over()
        return out

    def convolve(
        self, layer: int, projected_TC: torch.Tensor, learned: StateWeights
    ) -> torch.Tensor:
        assert self.states is not None
        return self.states.convolve(layer, projected_TC, learned)

    def scan(self, layer: int, inputs: ScanInputs, learned: StateWeights) -> torch.Tensor:
        assert self.states is not None
        return self.states.scan(layer, inputs, learned)


def find_missing(shape: ModelConfig) -> str:
    """The features of the model's attention that our kernels do not compute, and torch's
    FlexAttention does; empty if there is nothing."""
    return uncovered("Triton", shape.token_layers)


def new_pool(config: EngineConfig, shape: ModelConfig, device: torch.device) -> torch.Tensor:
    """Pages of keys and values, or of states where a model has no others; and the null page."""
    layout, num = config.layout, config.num_pages + 1
    if not shape.token_layers or not shape.has_equal_parts:
        page_bytes = bytes_of_page(shape, config.kv_dtype, config.page_size, layout)
        return torch.zeros(num, page_bytes, dtype=torch.uint8, device=device)
    page, kind = (
        (layout.layers_per_page, 2, shape.num_kv_heads, config.page_size, shape.head_dim),
        FORMATS[config.kv_dtype],
    )
    if kind.has_scales:
        return torch.zeros(
            num, prod(page[:-1]) * kind.head_bytes(shape.head_dim), dtype=torch.uint8, device=device
        )
    return torch.zeros(num, *page, dtype=torch.bfloat16, device=device)


def new_states(
    config: EngineConfig, shape: ModelConfig, pool: torch.Tensor, tables: list[torch.Tensor]
) -> CudaStates | None:
    """The states of a model that has them. `tables`: of all groups."""
    layout = config.layout
    if layout.states is None:
        return None
    of_states = tables[layout.num_kv_groups :]
    return CudaStates(
        PagedStates(
            pool.flatten(1).view(torch.uint8),
            of_states,
            layout.states,
            shape.layers,
            layout.interval,
        )
    )


def new_copies(
    config: EngineConfig, shape: ModelConfig, device: torch.device, by_roles: bool
) -> tuple[torch.Tensor | None, int]:
    """Room for copies of the pages that a step's prompts read, if the kernel by roles reads them,
    and for how many."""
    page = shape.num_kv_heads, config.page_size, shape.head_dim
    num = num_copied_pages(config.kv_dtype, config.max_context, *page) if by_roles else 0
    return torch.zeros(num, 2, *page, dtype=torch.bfloat16, device=device) if num else None, num
