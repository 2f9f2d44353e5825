"""Every GPU kernel on the GPU at hand: held against its torch reference, bit for bit against itself in other company, and timed.

    python -m bench.gpu --json out.json [--search]

--search tries all tiles of the matrix product for the shapes of an 8B and a 0.6B model and prints the fastest beside cuBLAS.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from bench.gpu_workloads import MODELS, VLLM, workloads
from tidemill.kernels.cuda import elementwise
from tidemill.kernels.cuda.attention import SPLIT, Mode, attend
from tidemill.kernels.cuda.gemm import Tile, choose_tile, gemm
from tidemill.kernels.norm import add_rms_norm_reference
from tidemill.kernels.rope import apply_rope, rope_frequencies, rope_tables
from tidemill.kernels.swiglu import swiglu_reference

SHAPES = {
    "llama8b": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336), "head": (128256, 4096)},
    "qwen06b": {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072), "head": (151936, 1024)},
}
ROWS = (1, 16, 32, 64, 128, 256, 512, 2048)
_PLAIN = {
    16: [(16, 256, 4, 4), (32, 128, 6, 4), (32, 256, 4, 4), (64, 128, 5, 4), (64, 256, 3, 4), (32, 512, 3, 4)],
    32: [(32, 128, 6, 4), (32, 256, 4, 4), (64, 128, 5, 4), (128, 64, 5, 4)],
    64: [(32, 128, 5, 4), (32, 256, 3, 4), (64, 64, 8, 4), (64, 128, 4, 4)],
    128: [(64, 128, 4, 8), (128, 128, 3, 8)],
}
_BULK = {
    64: [(32, 128, 5, 4), (64, 64, 6, 4), (64, 128, 4, 4), (128, 64, 5, 4), (128, 128, 3, 4), (256, 64, 4, 8)],
    128: [
        (64, 64, 6, 4), (64, 128, 4, 4), (64, 128, 4, 8), (128, 64, 4, 4),
        (128, 64, 4, 8), (128, 128, 3, 8), (256, 64, 3, 8), (256, 64, 4, 8),
    ],
    256: [(64, 64, 4, 8), (128, 64, 3, 8), (128, 64, 4, 8)],
}  # fmt: skip
TILES = {
    rows: [Tile(rows, *rest) for rest in _PLAIN.get(rows, [])] + [Tile(rows, *rest, bulk=1) for rest in _BULK.get(rows, [])]
    for rows in (16, 32, 64, 128, 256)
}


def time_us(calls: list[Callable[[], Any]], repeats: int = 20) -> float:
    """Of one call, from a graph of all of them: they should touch different memory, more of it than the cache holds."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    best = math.inf
    for _ in range(3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()
        begin.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) * 1000 / repeats / len(calls))
    return best


# ---- right, and the same bits in any company


def check_elementwise() -> None:
    for width in (4096, 1024, 576):
        x, residual = torch.randn(2, 300, width, device="cuda", dtype=torch.bfloat16).unbind()
        weight = torch.randn(width, device="cuda", dtype=torch.bfloat16)
        mine, other = residual.clone(), residual.clone()
        out, expected = elementwise.add_rms_norm(x, mine, weight, 1e-5), add_rms_norm_reference(x, other, weight, 1e-5)
        assert torch.equal(mine, other)
        assert (out - expected).float().abs().max() <= 2**-7 * expected.float().abs().max()
        alone = elementwise.add_rms_norm(x[7:8].clone(), residual[7:8].clone(), weight, 1e-5)
        assert torch.equal(alone, out[7:8])
    gate_up = torch.randn(300, 2 * 3072, device="cuda", dtype=torch.bfloat16)
    out, expected = elementwise.swiglu(gate_up), swiglu_reference(gate_up.float())
    assert (out - expected).abs().max() <= 2**-7 * expected.abs().max()


def check_gemm() -> None:
    torch.manual_seed(0)
    for num_out, num_in in ((4096, 4096), (1024, 3072), (1000, 1024), (512, 14336)):
        weight = torch.randn(num_out, num_in, device="cuda", dtype=torch.bfloat16) / num_in**0.5
        x = torch.randn(2048, num_in, device="cuda", dtype=torch.bfloat16)
        whole = gemm(x, weight)
        assert (whole.float() - x.float() @ weight.float().t()).abs().max() < 0.05
        for rows in (1, 2, 16, 17, 63, 64, 100, 128, 256, 1000, 2048):
            assert torch.equal(gemm(x[:rows].contiguous(), weight), whole[:rows]), (num_out, num_in, rows)
        for tile in itertools.chain.from_iterable(TILES.values()):
            assert torch.equal(gemm(x[:200].contiguous(), weight, tile), whole[:200]), tile


def ints(rows: list[tuple[int, ...]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32, device="cuda")


class Scene:
    """Requests (tokens before, new tokens) over a paged cache."""

    def __init__(self, requests: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, page: int) -> None:
        torch.manual_seed(0)
        self.requests, self.heads, self.group = requests, heads, heads // kv_heads
        width = max(-(-(a + b) // page) for a, b in requests)
        num_pages = sum(-(-(a + b) // page) for a, b in requests) + 1
        self.cache = torch.randn(num_pages, 2, 2, kv_heads, page, dim, device="cuda", dtype=torch.bfloat16)
        order, self.table, used = torch.randperm(num_pages - 1) + 1, torch.zeros(len(requests), width, dtype=torch.int32), 0
        for row, (before, new) in enumerate(requests):
            num = -(-(before + new) // page)
            self.table[row, :num] = order[used : used + num]
            used += num
        self.table = self.table.cuda()
        self.qkv = [torch.randn(new, (heads + 2 * kv_heads) * dim, device="cuda", dtype=torch.bfloat16) for _, new in requests]
        self.dim = dim

    def expected(self, row: int) -> torch.Tensor:
        before, new = self.requests[row]
        pages = self.table[row].long()
        k, v = (self.cache[pages, 1, i].transpose(1, 2).flatten(0, 1)[: before + new].float() for i in (0, 1))
        q = self.qkv[row].view(new, -1, self.dim)[:, : self.heads].float()
        positions = torch.arange(before, before + new, device="cuda")
        num_repeats = self.group
        scores = torch.einsum("tnd,lnd->ntl", q, k.repeat_interleave(num_repeats, 1)) * self.dim**-0.5
        scores.masked_fill_(torch.arange(k.shape[0], device="cuda") > positions[:, None], float("-inf"))
        return torch.einsum("ntl,lnd->tnd", scores.softmax(-1), v.repeat_interleave(num_repeats, 1)).flatten(1)

    def run(self, rows: list[int], mode: Mode, tile_rows: int) -> torch.Tensor:
        tiles, merges, first = [], [], 0
        for row in rows:
            before, new = self.requests[row]
            step = max(1, tile_rows // self.group)
            num_splits = -(-(before + 1) // SPLIT) if mode == Mode.APART else 1
            merges.append((first, len(tiles), num_splits))
            tiles += [
                (first + i, min(step, new - i), before + i, row, split)
                for i in range(0, new, step)
                for split in range(num_splits)
            ]
            first += new
        tiles.append((0, 0, 0, 0, 0))  # padding
        merges.append((0, 0, 0))
        qkv = torch.cat([self.qkv[row] for row in rows])
        out = qkv.new_zeros(first, self.heads * self.dim)
        partials = torch.full((len(tiles), self.heads, self.dim + 2), float("nan"), device="cuda")
        attend(qkv, self.cache, 1, self.table, ints(tiles), out, self.heads, mode, tile_rows, ints(merges), partials)
        return out


def check_attention() -> None:
    for heads, kv_heads, dim, page in ((32, 8, 128, 16), (16, 8, 128, 16), (9, 3, 64, 32)):
        requests = [
            (0, 1),
            (63, 1),
            (64, 1),
            (511, 1),
            (512, 1),
            (1300, 1),
            (5000, 1),
            (0, 100),
            (500, 130),
            (2000, 70),
            (5000, 1),
        ]
        scene = Scene(requests, heads, kv_heads, dim, page)
        every = list(range(len(requests)))
        large = scene.run(every, Mode.IN_TURN, 128).split([new for _, new in requests])
        for row in every:
            assert (large[row].float() - scene.expected(row)).abs().max() < 0.02, (heads, row)
        small = scene.run(every, Mode.IN_TURN, 64)
        assert torch.equal(small, torch.cat(large)), "tiles of 64 and 128 rows differ"
        decoding = [row for row, (_, new) in enumerate(requests) if new == 1]
        apart = scene.run(decoding, Mode.APART, 16)
        for i, row in enumerate(decoding):
            assert torch.equal(apart[i], large[row][0]), ("splits apart and in turn differ", requests[row])
            if requests[row][0] < SPLIT:
                assert torch.equal(scene.run([row], Mode.SINGLE, 16)[0], large[row][0]), requests[row]


def check_heads() -> None:
    heads, kv_heads, dim, page = 16, 8, 128, 16
    qkv = torch.randn(40, (heads + 2 * kv_heads) * dim, device="cuda", dtype=torch.bfloat16)
    cache = torch.zeros(10, 3, 2, kv_heads, page, dim, device="cuda", dtype=torch.bfloat16)
    cos, sin = (t.cuda() for t in rope_tables(*rope_frequencies(dim, 1e6, None), 100))
    positions, slots = torch.arange(40, device="cuda"), torch.randperm(160, device="cuda")[:40]
    q_norm, k_norm = torch.randn(2, dim, device="cuda", dtype=torch.bfloat16).unbind()
    for norm in (None, (q_norm, k_norm, 1e-6)):
        given = qkv.view(40, -1, dim).clone()
        out = qkv.clone()
        elementwise.enter_heads(out, cache, 2, positions, slots, cos, sin, heads, norm)
        q, k, v = given.split([heads, kv_heads, kv_heads], 1)
        if norm:
            q, k = F.rms_norm(q, (dim,), q_norm, 1e-6), F.rms_norm(k, (dim,), k_norm, 1e-6)
        q, k = (apply_rope(x.float(), cos[:40], sin[:40]) for x in (q, k))
        assert (out.view(40, -1, dim)[:, :heads] - q).abs().max() < 0.05
        entered = cache[slots // page, 2, :, :, slots % page]
        assert (entered[:, 0] - k).abs().max() < 0.05
        assert torch.equal(entered[:, 1], v)


def random_llama(folder: Path) -> Any:
    """A small Llama with the head size of the large ones, as Transformers computes it in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2000, hidden_size=512, intermediate_size=1400, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=128, max_position_embeddings=2048, initializer_range=0.05,
    )  # fmt: skip
    model = with_weights(LlamaForCausalLM(config), torch.bfloat16)
    model.save_pretrained(folder)
    return with_weights(model.cuda().eval(), torch.float32)


def with_weights(model: Any, dtype: torch.dtype) -> Any:
    """Not `model.to(dtype)`: that would round the rotation's frequencies, too."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


Answers = dict[str, tuple[list[int], list[Any]]]


def ask(core: Any, requests: dict[str, Any]) -> Answers:
    """Tokens and logprobs of every request, submitted together."""
    from tidemill.wire import Submit

    answers: Answers = {name: ([], []) for name in requests}
    for name, (prompt, params) in requests.items():
        core.submit(Submit(name, prompt, params))
    while core.has_work:
        output, failed = core.step()
        assert not failed
        for delta in output.deltas:
            answers[delta.request_id][0].extend(delta.token_ids)
            answers[delta.request_id][1].extend(delta.logprobs or [])
            answers[delta.request_id][1].extend(delta.prompt_logprobs or [])
    core.scheduler.check_integrity()
    return answers


def check_engine() -> None:
    """Near Transformers; and the same bits alone, among 255 others, in chunks, cached, preempted, with and without graphs."""
    import random
    import tempfile

    from tidemill.config import EngineOptions
    from tidemill.engine.core import EngineCore
    from tidemill.sampling import SamplingParams

    folder = Path(tempfile.mkdtemp())
    reference = random_llama(folder)
    draw = random.Random(0)

    def ids(num: int) -> list[int]:
        return [draw.randrange(2000) for _ in range(num)]

    def core(**options: Any) -> Any:
        return EngineCore.load(EngineOptions(model=str(folder), **({"kv_memory_bytes": 2**28, "max_requests": 256} | options)))

    prompt = ids(700)
    targets = torch.tensor(prompt[1:], device="cuda")[:, None]

    def scores(model: Any) -> torch.Tensor:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt], device="cuda")).logits[0, :-1].float()
        return logits.log_softmax(-1).gather(1, targets).flatten()

    exact = scores(reference)
    theirs = (scores(with_weights(reference, torch.bfloat16)) - exact).pow(2).mean().sqrt().item()
    scored = ask(core(), {"x": (prompt, SamplingParams(max_tokens=1, prompt_logprobs=0))})["x"][1]
    ours = torch.tensor([entry.logprob for entry in scored], device="cuda")
    error = (ours - exact).pow(2).mean().sqrt().item()
    print(f"  error of 699 log probabilities against float32: {error:.4f}; Transformers in bfloat16: {theirs:.4f}")
    assert error < 1.3 * theirs
    for params in (
        SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=0.9, top_p=0.95, max_tokens=40, ignore_eos=True, logprobs=2, seed=3),
    ):
        x = {"x": (prompt, params)}
        whole = core()
        lone = ask(whole, x)["x"]
        assert ask(whole, x)["x"] == lone, "cached"
        others = {
            f"o{i}": (ids(1 + (i * 37) % 900), SamplingParams(temperature=float(i % 2), max_tokens=5 + i % 60, seed=i))
            for i in range(255)
        }
        assert ask(core(), others | x)["x"] == lone, "among 255 others"
        assert ask(core(token_budget=64, max_requests=32), x)["x"] == lone, "in chunks of 64"
        tight = core(kv_memory_bytes=2**23, max_context=1024)
        crowd = dict(list(others.items())[:40])
        assert ask(tight, crowd | x)["x"] == lone, "preempted"
        eager = core()
        eager.runner._decode = lambda items, result, runner=eager.runner: runner._mixed(items, result)[0]
        assert ask(eager, x)["x"] == lone, "without graphs"


def stress_engine(num_steps: int = 3000) -> None:
    """Arrivals and aborts at random while steps are in flight; rows and pages agree all along, and at the end nothing is left."""
    import random
    import tempfile

    from tidemill.config import EngineOptions
    from tidemill.engine.core import EngineCore
    from tidemill.sampling import SamplingParams
    from tidemill.wire import Abort, Submit

    folder = Path(tempfile.mkdtemp())
    random_llama(folder)
    core = EngineCore.load(
        EngineOptions(model=str(folder), kv_memory_bytes=2**23, max_requests=64, max_context=512, token_budget=256)
    )
    draw, live, made = random.Random(1), set[str](), 0
    for step in range(num_steps):
        for _ in range(draw.choice((0, 0, 1, 3))):
            params = SamplingParams(temperature=float(made % 2), max_tokens=draw.randrange(1, 60), seed=made)
            core.submit(Submit(str(made), [draw.randrange(2000) for _ in range(draw.randrange(1, 300))], params))
            live.add(str(made))
            made += 1
        if live and draw.random() < 0.2:
            name = draw.choice(sorted(live))
            core.abort(Abort(name, "left"))
            live.discard(name)
        output, failed = core.step()
        assert not failed
        live -= {delta.request_id for delta in output.deltas if delta.finish_reason}
        if step % 50 == 0:
            core.scheduler.check_integrity()
    while core.has_work:
        core.step()
    core.scheduler.check_integrity()
    print(f"  {made} requests in {num_steps} steps, all pages free")


# ---- timed


def time_gemm(search: bool) -> list[dict[str, Any]]:
    lines = []
    for model, shapes in SHAPES.items():
        for name, (num_out, num_in) in shapes.items():
            copies = max(2, -(-200 * 2**20 // (num_out * num_in * 2)))
            weights = [torch.randn(num_out, num_in, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
            for num_rows in ROWS:
                x = torch.randn(num_rows, num_in, device="cuda", dtype=torch.bfloat16)
                tiles = [choose_tile(num_rows, num_out, num_in)]
                if search:
                    small = max(16, min(256, 1 << (num_rows - 1).bit_length()))
                    tiles = [
                        tile
                        for rows in {small, small // 2, small // 4} | ({128, 256} if num_rows > 256 else set())
                        for tile in TILES.get(rows, [])
                    ]
                seen = {}
                for tile in tiles:
                    try:
                        seen[tile] = time_us([partial(gemm, x, w, tile) for w in weights], 5)
                    except Exception as error:  # too much shared memory for this tile
                        print("  skipped", tile, type(error).__name__)
                best = min(seen, key=lambda tile: seen[tile])
                cublas = time_us([partial(F.linear, x, w) for w in weights], 5)
                line = {
                    "model": model,
                    "name": name,
                    "rows": num_rows,
                    "us": seen[best],
                    "cublas_us": cublas,
                    "tile": list(astuple(best)),
                }
                lines.append(line)
                print(
                    f"{model} {name:8} M={num_rows:5} {seen[best]:8.1f} us  "
                    f"cuBLAS {cublas:8.1f}  ratio {seen[best] / cublas:.2f}  {line['tile']}",
                    flush=True,
                )
            del weights
    return lines


def time_attention() -> list[dict[str, Any]]:
    lines = []
    for label, batch, length, heads, kv_heads in (
        ("llama8b", 1, 384, 32, 8),
        ("llama8b", 256, 384, 32, 8),
        ("llama8b", 256, 1024, 32, 8),
        ("llama8b", 8, 16384, 32, 8),
        ("qwen06b", 256, 384, 16, 8),
    ):
        scene = Scene([(length - 1, 1)] * batch, heads, kv_heads, 128, 16)
        num_splits = -(-length // SPLIT)
        tiles = ints([(i, 1, length - 1, i, split) for i in range(batch) for split in range(num_splits)])
        merges = ints([(i, i * num_splits, num_splits) for i in range(batch)])
        qkv, out = torch.cat(scene.qkv), torch.empty(batch, heads * 128, device="cuda", dtype=torch.bfloat16)
        mode = Mode.SINGLE if length <= SPLIT else Mode.APART
        partials = torch.empty(tiles.shape[0], heads, 130, device="cuda")
        rest = (scene.table, tiles, out, heads, mode, 16, merges, partials)
        us = time_us([partial(attend, qkv, scene.cache, layer, *rest) for layer in (0, 1)])
        rate = batch * length * kv_heads * 128 * 2 * 2 / us / 1e6
        lines.append({"model": label, "batch": batch, "length": length, "us": us, "TB/s": rate})
        print(f"decode attention {label} B={batch} L={length}: {us:.1f} us, {rate:.2f} TB/s", flush=True)
    for label, batch, length, rows in (("llama8b", 4, 4096, 128), ("llama8b", 4, 4096, 64), ("llama8b", 1, 16384, 128)):
        scene = Scene([(0, length)] * batch, 32, 8, 128, 16)
        step = rows // 4
        tiles = [(r * length + i, step, i, r, 0) for r in range(batch) for i in range(0, length, step)]
        tile_tensor = ints(sorted(tiles, key=lambda t: -t[2]))
        qkv, out = torch.cat(scene.qkv), torch.empty(batch * length, 4096, device="cuda", dtype=torch.bfloat16)
        call = partial(attend, qkv, scene.cache, 0, scene.table, tile_tensor, out, 32, Mode.IN_TURN, rows)
        us = time_us([call], 3)
        rate = batch * length * length / 2 * 32 * 128 * 4 / us / 1e6
        lines.append({"model": label, "prefill": length, "batch": batch, "rows": rows, "us": us, "TFLOP/s": rate})
        print(f"prefill attention {label} {batch}x{length} rows {rows}: {us:.0f} us, {rate:.0f} TFLOP/s", flush=True)
    return lines


# ---- whole workloads, beside vLLM's figures


def run_workload(core: Any, requests: list[Any]) -> tuple[float, float, float]:
    """Seconds in all, to the first token, and between the first and the last."""
    from tidemill.sampling import SamplingParams
    from tidemill.wire import Submit

    core.scheduler.kv.clear_prefixes()
    begin = time.perf_counter()
    for i, (prompt, length) in enumerate(requests):
        core.submit(Submit(str(i), prompt, SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)))
    first, counts = 0.0, [0] * len(requests)
    while core.has_work:
        output, failed = core.step()
        assert not failed
        for delta in output.deltas:
            first = first or time.perf_counter() - begin
            counts[int(delta.request_id)] += len(delta.token_ids)
    elapsed = time.perf_counter() - begin
    assert counts == [length for _, length in requests]
    return elapsed, first, elapsed - first


def time_workloads(model: str, only: str | None) -> list[dict[str, Any]]:
    import tempfile

    from tidemill.config import EngineOptions
    from tidemill.engine.core import EngineCore

    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    begin = time.perf_counter()
    core = EngineCore.load(EngineOptions(model=str(folder), load_format="dummy", max_context=20480, max_waiting=10**6))
    started = time.perf_counter() - begin
    print(
        f"{model}: ready in {started:.1f} s; {core.config.num_kv_tokens:,} KV tokens, {len(core.runner._graphs)} graphs",
        flush=True,
    )
    run_workload(core, [([5] * 600, 8)] * 4)
    lines = [{"model": model, "workload": "start", "s": started}]
    for name, requests in workloads(min(MODELS[model]["vocab_size"], 120_000)).items():
        if only and name not in only.split(","):
            continue
        elapsed, first, rest = run_workload(core, requests)
        num_out, num_in = sum(length for _, length in requests), sum(len(prompt) for prompt, _ in requests)
        theirs = VLLM[model][name]
        mine = rest / (requests[0][1] - 1) * 1000 if name == "latency_b1" else elapsed
        line = {"model": model, "workload": name, "s": elapsed, "first_s": first, "ratio": theirs / mine}
        lines.append(line)
        what = (
            f"TPOT {mine:.2f} ms" if name == "latency_b1" else f"{num_out / elapsed:,.0f} out tok/s, {num_in / elapsed:,.0f} in"
        )
        print(f"{model} {name:14} {elapsed:7.2f} s  {what}  first {first * 1000:.1f} ms  {line['ratio']:.2f} x vLLM", flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--models", default="llama8b,qwen06b", help="whose workloads to run")
    parser.add_argument("--workloads", help="only these, separated by commas")
    parser.add_argument("--skip-kernels", action="store_true")
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    for check in (
        ()
        if arguments.skip_kernels
        else (check_elementwise, check_heads, check_attention, check_gemm, check_engine, stress_engine)
    ):
        begin = time.perf_counter()
        try:
            check()
            print(f"{check.__name__}: right ({time.perf_counter() - begin:.1f} s)", flush=True)
        except AssertionError as error:
            print(f"{check.__name__}: WRONG {error}", flush=True)
    result: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "workloads": []}
    if not arguments.skip_kernels:
        result |= {"attention": time_attention(), "gemm": time_gemm(arguments.search)}
    for model in filter(None, arguments.models.split(",")):
        result["workloads"] += time_workloads(model, arguments.workloads)
        torch.cuda.empty_cache()
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
