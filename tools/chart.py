"""The chart of speed beside other engines, from the tables of the documentation: docs/lab/cpu.md
(CPU) and docs/lab/gpu.md (GPU).

    python -m tools.chart [--out docs/images/speed.png]

It measures nothing: `bench/peers.py` and `bench/gpu.py` make the figures, and the tables record
them.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.bench.plots import _pyplot, _save

DOCS = Path(__file__).parents[1] / "docs"
COLOURS = {
    "Tidemill": "#0e6468",
    "llama.cpp": "#b9a88b",
    "vLLM": "#8fa5ab",
    "Transformers": "#d8b48c",
}


@dataclass(frozen=True)
class Group:
    """One workload: how fast each engine is, relative to the fastest other one."""

    name: str
    speeds: dict[str, float]


def tables(text: str) -> list[list[dict[str, str]]]:
    """The tables of a Markdown text: a list of rows each, by the names of the columns."""
    found = []
    for block in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        head, _, *body = [
            [cell.strip(" *") for cell in line.strip("|").split("|")] for line in block.splitlines()
        ]
        found.append([dict(zip(head, cells, strict=False)) for cells in body])
    return found


def number(cell: str) -> float:
    match = re.match(r"[\d.,]+", cell)
    return float(match[0].replace(",", "")) if match else 0.0


def relative(name: str, values: dict[str, float], is_time: bool) -> Group:
    speeds = {engine: 1 / value if is_time else value for engine, value in values.items() if value}
    best = max(speed for engine, speed in speeds.items() if engine != "Tidemill")
    return Group(name, {engine: speed / best for engine, speed in speeds.items()})


CPU_NAMES = {
    "prefill, 512 tokens (tok/s)": "prefill\n512 tokens",
    "decode, batch 1 (tok/s)": "decode\nbatch 1",
    "decode, batch 16 (tok/s)": "decode\nbatch 16",
    "32 requests of 16–256 + 8–128 tokens, to completion (s)": "32 mixed\nrequests",
}
GPU_NAMES = {
    "latency_b1: time per output token": "decode\nbatch 1",
    "prefill_4k": "prefill\n4k tokens",
    "decode_b256": "decode\nbatch 256",
    "mixed_256": "256 mixed\nrequests",
    "shared_prefix": "shared\nprefix",
    "long_ctx_b8": "8 long\nprompts",
}


def cpu_groups(text: str) -> list[Group]:
    rows = {
        row[""]: row
        for table in tables(text)
        for row in table
        if {"Tidemill", "llama.cpp", "vLLM"} <= row.keys()
    }
    engines = ("Tidemill", "llama.cpp", "vLLM", "Transformers")
    return [
        relative(
            shown, {engine: number(rows[name][engine]) for engine in engines}, name.endswith("(s)")
        )
        for name, shown in CPU_NAMES.items()
    ]


def gpu_groups(text: str, model: str, machine: str) -> list[Group]:
    rows = {
        row[model]: row
        for table in tables(text)
        for row in table
        if {model, "vLLM", machine} <= row.keys()
    }
    return [
        relative(
            shown,
            {"Tidemill": number(rows[name][machine]), "vLLM": number(rows[name]["vLLM"])},
            is_time=True,
        )
        for name, shown in GPU_NAMES.items()
    ]


def draw(axes: Any, groups: list[Group], title: str) -> None:
    engines = list(groups[0].speeds)
    width = 0.8 / len(engines)
    for i, engine in enumerate(engines):
        places = [at + (i - (len(engines) - 1) / 2) * width for at in range(len(groups))]
        speeds = [group.speeds[engine] for group in groups]
        axes.bar(places, speeds, width * 0.92, label=engine, color=COLOURS[engine])
        if engine == "Tidemill":
            for x, y in zip(places, speeds, strict=True):
                axes.text(x, y + 0.03, f"{y:.2f}×", ha="center", fontsize=8, color=COLOURS[engine])
    axes.axhline(1, color="#5a686a", linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(groups)), [group.name for group in groups], fontsize=8)
    axes.set_title(title, fontsize=10, loc="left")
    axes.tick_params(axis="y", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        frameon=False,
        fontsize=8,
        loc="upper left",
        ncols=len(engines),
        columnspacing=1.0,
        handlelength=1.2,
    )
    axes.set_ylim(0, max(max(group.speeds.values()) for group in groups) * 1.22)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=DOCS / "images" / "speed.png")
    given = parser.parse_args()
    cpu = cpu_groups((DOCS / "lab/cpu.md").read_text(encoding="utf-8"))
    gpu = gpu_groups((DOCS / "lab/gpu.md").read_text(encoding="utf-8"), "llama8b", "D")
    figure, (left, right) = _pyplot().subplots(1, 2, figsize=(10.5, 3.6), width_ratios=(4, 6))
    draw(left, cpu, "2 CPU cores, 135M model in 4 bits")
    draw(right, gpu, "H200, 8B model in bf16")
    left.set_ylabel("speed, fastest other engine = 1", fontsize=8)
    print(_save(figure, given.out))


if __name__ == "__main__":
    main()
