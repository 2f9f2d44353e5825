"""Contextual sparsity: what predictors of neurons and heads cost in quality and save in time,
against the same weights without.

    python -m bench.contextual                                 the default model
    python -m bench.small relu --act relu --steps 600          a small model of bytes with ReLUs
    python -m bench.contextual --model relu
    python -m bench.contextual --kernel                        the feed-forward alone, by the share that is computed

Predictors learn from the begin of Python's documentation; quality is measured on its end by the
engine's own logits. Weights are float32. Speed: one thread, decoding one request, time of the
process, models in turn.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import torch

from bench.pruning import HELD_OUT_SHARE
from tidemill import LLM, SamplingParams
from tidemill.compress.calibration import Calibration
from tidemill.compress.evaluate import default_text, measure_quality, text_windows
from tidemill.compress.predictors import PredictorOptions, train_predictors
from tidemill.kernels import native
from tidemill.kernels.linear import pack_linear
from tidemill.kernels.neurons import ChosenNeurons
from tidemill.quant.base import Gated
from tidemill.weights.predictors import read_settings


def load(model: str, predictors: Path | None, context: int) -> LLM:
    path = None if predictors is None else str(predictors)
    sizes: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "max_requests": 2,
        "max_context": context,
        "threads": 1,
    }
    return LLM(model, progress=False, contextual_sparsity=path, **sizes)


def decode_s(llm: LLM, num: int) -> float:
    """Seconds of the process for a token."""
    request_id, output = llm.submit(
        [2, 3, 4, 5], SamplingParams(max_tokens=num, temperature=0.0, ignore_eos=True)
    )
    try:
        llm.step()
        begin = time.process_time()
        while not output.finished:
            llm.step()
        return (time.process_time() - begin) / (num - 1)
    finally:
        llm.abandon(request_id)


def chosen_share(llm: LLM, windows: list[list[int]]) -> float:
    """Of neurons, on the text that quality is measured on."""
    layers: list[Any] = [block.mlp.neurons for block in cast(Any, llm.core.runner).model.blocks]
    if not isinstance(layers[0], ChosenNeurons):
        return 1.0
    before = [int(one.num_chosen) for one in layers]
    llm.generate(windows, SamplingParams(max_tokens=1), progress=False)
    num = sum(map(len, windows))
    return statistics.mean(
        (int(one.num_chosen) - was) / num / one.num_inner
        for one, was in zip(layers, before, strict=True)
    )


def run(given: argparse.Namespace, folder: Path) -> None:
    whole = default_text()
    cut = int(len(whole) * (1 - HELD_OUT_SHARE))
    (folder / "text.txt").write_text(whole[:cut])
    (folder / "held-out.txt").write_text(whole[cut:])
    original = load(given.model, None, given.context)
    windows = text_windows(original, folder / "held-out.txt", given.tokens)
    calibration = Calibration(
        data=folder / "text.txt", num_tokens=given.calibration_tokens, length=given.length
    )
    models, heads = {"all neurons": original}, {"all neurons": 1.0}
    for asked in given.rows.split(","):
        units, _, keep = asked.partition(":")
        begin, name = time.perf_counter(), f"{units}, keeping {float(keep):.1%}"
        out = folder / name
        options = PredictorOptions(
            model=given.model, out=out, units=units, keep=float(keep), rank=given.rank, steps=given.steps,
            calibration=calibration,
        )  # fmt: skip
        made = read_settings(out) if out.exists() else train_predictors(options)
        print(f"{name}: trained in {time.perf_counter() - begin:.0f} s", flush=True)
        models[name] = load(given.model, out, given.context)
        heads[name] = statistics.mean(made["heads"]["share"]) if "heads" in made else 1.0
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(given.rounds):
        for name, llm in models.items():
            times[name].append(decode_s(llm, given.decoded))
    print(
        "| | PPL | mean KL | top-1 | neurons computed | heads computed | tok/s, of the first row |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, llm in models.items():
        quality = measure_quality(llm, original, windows, lambda _: None)
        ratio = statistics.median(times["all neurons"]) / statistics.median(times[name])
        print(
            f"| {name} | {quality.perplexity:.3f} | {quality.kl:.4f} | {quality.top1:.1%} | {chosen_share(llm, windows):.1%} | "
            f"{heads[name]:.1%} | {ratio:.2f} |",
            flush=True,
        )


def kernel(num_in: int, num_inner: int, dtype: torch.dtype, rounds: int) -> None:
    """One row by a feed-forward, against all of it by panels."""
    assert native.lib is not None
    native.lib.set_threads(1)
    gate, up, down = (
        torch.randn(*shape).to(dtype)
        for shape in ((num_inner, num_in), (num_inner, num_in), (num_in, num_inner))
    )
    some, all_up, all_down = (
        ChosenNeurons(gate, up, down, "silu"), Gated(pack_linear(torch.cat([gate, up])), "silu"), pack_linear(down),
    )  # fmt: skip
    for share in (1.0, 0.5, 0.25, 0.1):
        times: tuple[list[float], list[float]] = [], []
        for _ in range(rounds):
            x, scores = torch.randn(1, num_in), torch.rand(1, num_inner) - (1 - share)
            begin = time.process_time()
            some(x, scores)
            middle = time.process_time()
            all_down(all_up(x))
            times[0].append(middle - begin)
            times[1].append(time.process_time() - middle)
        few, whole = (statistics.median(one) * 1e6 for one in times)
        print(
            f"| {num_in} x {num_inner}, {dtype} | {share:.0%} | {few:.0f} | {whole:.0f} | {whole / few:.2f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--rows",
        default="neurons:0.9,neurons:0.98,both:0.98",
        help="what is chosen, and the part that stays",
    )
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--tokens", type=int, default=2044, help="held out")
    parser.add_argument("--calibration-tokens", type=int, default=4096)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--decoded", type=int, default=32)
    parser.add_argument(
        "--folder", type=Path, help="where predictors stay, and are taken from if they are there"
    )
    parser.add_argument("--kernel", action="store_true")
    given = parser.parse_args()
    if given.kernel:
        print(
            "| shape | neurons computed | µs | all of them by panels, µs | ratio |\n|---|---|---|---|---|"
        )
        for dtype in (torch.float32, torch.bfloat16):
            for shape in ((576, 1536), (2048, 5632)):
                kernel(*shape, dtype, given.rounds * 4)
        return
    if given.folder is not None:
        given.folder.mkdir(exist_ok=True)
        run(given, given.folder)
        return
    with tempfile.TemporaryDirectory(prefix="contextual-") as folder:
        run(given, Path(folder))


if __name__ == "__main__":
    main()
