"""What adapters cost on a CPU: decode steps without them, with memory for them, and with one for
every request; in turns.

python -m bench.lora --requests 8 --adapters 8 --rank 16
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from tidemill.config import EngineOptions
from tidemill.engine.core import EngineCore
from tidemill.engine.load import load_core
from tidemill.engine.parts.adapters import AdapterStore
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit

NUM_STEPS, NUM_TURNS = 20, 3


def make_adapter(
    core: EngineCore, folder: Path, rank: int, seed: int, dtype: torch.dtype = torch.bfloat16
) -> Path:
    """Random, of all linear layers, as PEFT stores it."""
    assert core.runner.loras is not None
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (num_out, num_in) in core.runner.loras.shapes.items():
        for half, shape in (("A", (rank, num_in)), ("B", (num_out, rank))):
            values = torch.randn(shape, generator=generator, device="cpu") * 0.1 / num_in**0.5
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = values.to(dtype)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank})
    )
    return folder


def step_ms(core: EngineCore, num_requests: int, num_adapters: int) -> float:
    """Of a step in which every request decodes."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_STEPS + 10, ignore_eos=True)
    for i in range(num_requests):
        prompt = [100 + (7919 * i + 31 * k) % 10_000 for k in range(32)]
        core.submit(
            Submit(str(i), prompt, params, adapter=1 + i % num_adapters if num_adapters else 0)
        )
    decoding: set[str] = set()
    while len(decoding) < num_requests:
        decoding |= {delta.request_id for delta in core.step()[0].deltas}
    took = []
    for _ in range(NUM_STEPS):
        began = time.perf_counter()
        core.step()
        took.append(time.perf_counter() - began)
    while core.has_work:
        core.step()
    return 1000 * statistics.median(took)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    common = {
        "model": given.model,
        "device": "cpu",
        "threads": given.threads,
        "prefix_caching": False,
        "kv_memory_bytes": 2**28,
    }
    without = load_core(EngineOptions(**common))
    core = load_core(EngineOptions(**common, max_loras=given.adapters, max_lora_rank=given.rank))
    with tempfile.TemporaryDirectory() as folder:
        for i in range(given.adapters):
            path = make_adapter(core, Path(folder) / str(i), given.rank, i)
            core.part(AdapterStore).load_now(1 + i, f"a{i}", str(path))
    cases = {
        "no adapters": lambda: step_ms(without, given.requests, 0),
        "adapters loaded, none used": lambda: step_ms(core, given.requests, 0),
        "one adapter": lambda: step_ms(core, given.requests, 1),
        f"{given.adapters} adapters": lambda: step_ms(core, given.requests, given.adapters),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(NUM_TURNS):
        for name, measure in cases.items():
            times[name].append(measure())
    base = min(times["no adapters"])
    print(
        f"{given.model}, {core.config.dtype}, {given.requests} requests, rank {given.rank}, {core.config.threads} threads"
    )
    for name, each in times.items():
        print(f"  {name:28} {min(each):8.2f} ms a step  {base / min(each):5.2f} of the speed")


if __name__ == "__main__":
    main()
