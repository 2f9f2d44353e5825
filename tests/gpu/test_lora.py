"""LoRA on the GPU at hand: kernels against float64, answers alone and among others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu_lora import SHAPES, Lists
from bench.gpu_workloads import MODELS
from bench.lora import make_adapter
from tidemill.config import EngineOptions
from tidemill.engine.core import EngineCore
from tidemill.engine.load import load_core
from tidemill.engine.parts.adapters import AdapterStore
from tidemill.kernels.cuda import lora
from tidemill.kernels.cuda.lora import CudaLora
from tidemill.kernels.pending import with_added
from tidemill.quant.cuda import CudaWeight
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit
from tidemill.weights.lora import LoraPair


def test_kernels() -> None:
    """Against float64, in bfloat16; a token alone has the bits that it has among others, whoever
    adds."""
    torch.manual_seed(0)
    device, num_slots, num = torch.device("cuda"), 9, 300
    for num_in, outs, act in (*SHAPES, (576, {"q": 576, "k": 192, "v": 192}, "")):
        lists = Lists(num_slots, 512)
        made = CudaLora(num_in, outs, lists, num_slots, 256, act, device, torch.bfloat16)
        adapters = list[dict[str, LoraPair]]()
        for rank in (16, 8, 1, 64, 256, 33, 16, 16):
            pairs = {
                name: LoraPair(
                    (torch.randn(rank, num_in) / num_in**0.5).bfloat16(),
                    (torch.randn(size, rank) / rank**0.5).bfloat16(),
                    0.7,
                )
                for name, size in outs.items()
                if rank != 8 or name != "k"
            }
            made.put(len(adapters), pairs)
            adapters.append(pairs)
        slots = np.random.default_rng(0).integers(-1, len(adapters), num)
        x = torch.randn(num, num_in, device=device, dtype=torch.bfloat16)
        values = (torch.randn(sum(outs.values()), num_in, device=device) / num_in**0.5).bfloat16()
        weight = CudaWeight(values, None, False, act)
        plain = torch.from_numpy(slots < 0).to(device)
        lists.write(slots, num)
        together = made.adapted(x, weight)
        right = _expected(x, values, slots, adapters, outs, act)
        error = (together.double() - right).abs().max() / right.abs().max()
        assert error < (2**-6 if act else 2**-7), error  # gate and up are rounded twice each
        assert torch.equal(together[plain], weight(x)[plain])
        assert torch.equal(_added(made.pending(x, weight)), together), "left to the kernel behind"
        few, lora.SMALL_TILES_UP_TO = lora.SMALL_TILES_UP_TO, 512
        made.lists = small = Lists(num_slots, 512)
        small.write(slots, num)
        assert torch.equal(made.adapted(x, weight), together), "small tiles"
        made.lists, lora.SMALL_TILES_UP_TO = lists, few
        for row in range(0, num, 7):
            lists.write(slots[row : row + 1], 1)
            alone = x[row : row + 1].contiguous()
            assert torch.equal(made.adapted(alone, weight)[0], together[row]), row
            assert torch.equal(_added(made.pending(alone, weight))[0], together[row]), row


def test_down_behind_gate_and_up() -> None:
    """The kernel behind gate and up also multiplies for `down`: against the kernel that does it
    otherwise, and a token alone."""
    device, num_slots, num = torch.device("cuda"), 9, 300
    slots = np.random.default_rng(0).integers(-1, num_slots, num)
    (gates, downs), lists = (SHAPES[2], SHAPES[3]), Lists(num_slots, 512)
    made = [
        CudaLora(num_in, outs, lists, num_slots, 64, act, device, torch.bfloat16)
        for num_in, outs, act in (gates, downs)
    ]
    weights = []
    for one, (num_in, outs, act) in zip(made, (gates, downs), strict=True):
        for slot, rank in enumerate((16, 8, 1, 64, 33, 16, 16, 16, 16)):
            pairs = {
                name: LoraPair(
                    (torch.randn(rank, num_in) / num_in**0.5).bfloat16(),
                    (torch.randn(size, rank) / rank**0.5).bfloat16(),
                    0.7,
                )
                for name, size in outs.items()
            }
            one.put(slot, pairs)
        values = (torch.randn(sum(outs.values()), num_in, device=device) / num_in**0.5).bfloat16()
        weights.append(CudaWeight(values, None, False, act))
    x = torch.randn(num, gates[0], device=device, dtype=torch.bfloat16)

    def both(x: torch.Tensor) -> torch.Tensor:
        return _added(made[1].pending(made[0].adapted(x, weights[0]), weights[1]))

    lists.write(slots, num)
    apart = both(x)
    made[0].behind = made[1]
    together = both(x)
    error = (together.float() - apart.float()).abs().max() / apart.float().abs().max()
    assert 0 < error < 2**-7, error  # sums end at other places
    few, lora.SMALL_TILES_UP_TO = lora.SMALL_TILES_UP_TO, 512
    made[0].lists = made[1].lists = small = Lists(num_slots, 512)
    small.write(slots, num)
    assert torch.equal(both(x), together), "small tiles"
    made[0].lists, made[1].lists, lora.SMALL_TILES_UP_TO = lists, lists, few
    for row in range(0, num, 7):
        lists.write(slots[row : row + 1], 1)
        assert torch.equal(both(x[row : row + 1].contiguous())[0], together[row]), row


def _added(y: torch.Tensor) -> torch.Tensor:
    """As the kernel behind adds."""
    y, added = with_added(y)
    return y if added is None else y + added


def _expected(
    x: torch.Tensor, weight: torch.Tensor, slots: np.ndarray, adapters: list[dict[str, LoraPair]], outs: dict[str, int], act: str
) -> torch.Tensor:  # fmt: skip
    """In float64."""
    made, first = x.double() @ weight.double().t(), 0
    for part, (name, size) in enumerate(outs.items()):
        columns = slice(part, None, 2) if act else slice(first, first + size)
        for slot, pairs in enumerate(adapters):
            rows = torch.from_numpy(np.flatnonzero(slots == slot)).to(x.device)
            if name in pairs:
                low = x[rows].double() @ pairs[name].down_RK.to(x.device).double().t()
                made[rows, columns] += (
                    pairs[name].scale * low @ pairs[name].up_NR.to(x.device).double().t()
                )
        first += size
    if act:
        gate, up = made[:, 0::2], made[:, 1::2]
        made = gate / (1 + (-gate).exp()) * up
    return made


def answers(core: EngineCore, requests: list[tuple[list[int], int, int]]) -> list[list[Any]]:
    """Tokens and logprobs of each: (prompt, tokens to generate, adapter)."""
    made: list[list[Any]] = [[] for _ in requests]
    for i, (prompt, length, adapter) in enumerate(requests):
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, logprobs=1)
        core.submit(Submit(str(i), prompt, params, adapter=adapter))
    while core.has_work:
        output, failed = core.step()
        assert not failed, failed
        for delta in output.deltas:
            made[int(delta.request_id)] += [
                (entry.token_id, entry.logprob) for entry in delta.logprobs or []
            ]
    return made


def test_answers(tmp_path: Path) -> None:
    """Alone and among others, bit for bit; other adapters give other answers."""
    num_adapters = 4
    shape = MODELS["llama8b"] | {"num_hidden_layers": 4, "vocab_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    options = EngineOptions(
        model=str(tmp_path), load_format="dummy", max_context=2048, max_loras=num_adapters, max_lora_rank=16,
        kv_memory_bytes=2**29,
    )  # fmt: skip
    core = load_core(options)
    for i in range(num_adapters):
        core.part(AdapterStore).load_now(
            1 + i, f"a{i}", str(make_adapter(core, tmp_path / f"lora{i}", 16, i))
        )
    prompts = [[(31 * i * i + 7 * k) % 1000 + 10 for k in range(20 + 37 * i)] for i in range(24)]
    requests = [(prompt, 24, i % (num_adapters + 1)) for i, prompt in enumerate(prompts)]
    core.scheduler.kv.clear_prefixes()
    together = answers(core, requests)
    for i in range(len(requests)):
        core.scheduler.kv.clear_prefixes()
        assert answers(core, requests[i : i + 1])[0] == together[i], i
    same = answers(core, [(prompts[5], 24, adapter) for adapter in range(num_adapters + 1)])
    assert len(set(map(tuple, same))) == num_adapters + 1, "tokens or log probabilities differ"
