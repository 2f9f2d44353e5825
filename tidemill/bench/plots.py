"""Plots of a run. matplotlib is imported when one is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tidemill.bench.record import Record
from tidemill.errors import ConfigError
from tidemill.planning.plans import Case, Result
from tidemill.planning.search import Found

_QUEUE, _PREFILL, _DECODE = "#c9ccd1", "#e08a2e", "#3b76af"


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ConfigError(
            "Plots need matplotlib.", fix="Run: pip install 'tidemill[bench]'"
        ) from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    return pyplot


def _save(figure: Any, path: Path) -> Path:
    figure.tight_layout()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise ConfigError(
            f"The picture {path} cannot be written: {error.strerror}.", fix="Choose another place."
        ) from error
    finally:
        _pyplot().close(figure)
    return path


def plot_latencies(records: Sequence[Record], path: Path) -> Path:
    """Cumulative distributions of time to first token, time per output token, inter-token gap and
    end to end."""
    good = [record for record in records if record.error is None]
    series = {
        "time to first token": [r.ttft_s for r in good],
        "time per output token": [t for r in good if (t := r.tpot_s) is not None],
        "inter-token gap": [gap for r in good for gap in r.gaps_s],
        "end to end": [r.e2e_s for r in good],
    }
    figure, axes = _pyplot().subplots(1, 4, figsize=(15, 3.4))
    for axis, (name, values) in zip(axes, series.items(), strict=True):
        ordered = sorted(values)
        axis.step(
            [v * 1000 for v in ordered],
            [(i + 1) / len(ordered) for i in range(len(ordered))],
            where="post",
            color=_DECODE,
        )
        axis.set(title=name, xlabel="ms", ylim=(0, 1.02))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("fraction of requests")
    return _save(figure, path)


def plot_timelines(runs: Mapping[str, Sequence[Record]], path: Path) -> Path:
    """One panel a run, one line a request: queued, prefill, decode."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(
        len(runs), 1, figsize=(11, 0.8 + 2.1 * len(runs)), sharex=True, squeeze=False
    )
    for (name, records), (axis,) in zip(runs.items(), axes, strict=True):
        good = [record for record in records if record.error is None]
        for line, record in enumerate(good):
            started = record.started_s if record.started_s is not None else record.sent_s
            first, last = record.token_times_s[0], record.end_s
            axis.broken_barh([(record.sent_s, started - record.sent_s)], (line, 0.8), color=_QUEUE)
            axis.broken_barh([(started, first - started)], (line, 0.8), color=_PREFILL)
            axis.broken_barh([(first, last - first)], (line, 0.8), color=_DECODE)
        end = max((record.end_s for record in good), default=0.0)
        axis.set_title(f"{name}: {end:.1f} s", loc="left", fontsize=10)
        axis.set_yticks([])
        axis.set_ylabel("requests")
    axes[-1][0].set_xlabel("seconds")
    patches = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in (_QUEUE, _PREFILL, _DECODE)]
    figure.legend(patches, ["queued", "prefill", "decode"], loc="upper right", ncol=3, fontsize=9)
    return _save(figure, path)


def plot_rates(points: Sequence[tuple[float, dict[str, Any]]], path: Path) -> Path:
    """Throughput and median time to first token against the offered rate."""
    figure, (left, right) = _pyplot().subplots(1, 2, figsize=(9, 3.4))
    rates = [rate for rate, _ in points]
    left.plot(
        rates, [summary["output_tokens_per_s"] for _, summary in points], marker="o", color=_DECODE
    )
    left.set(xlabel="requests offered per second", ylabel="output tokens per second")
    for percent in ("p50", "p99"):
        right.plot(
            rates, [summary["ttft_s"][percent] for _, summary in points], marker="o", label=percent
        )
    right.set(xlabel="requests offered per second", ylabel="time to first token, s")
    right.legend()
    for axis in (left, right):
        axis.grid(alpha=0.3)
    return _save(figure, path)


_KINDS = {"colocated": "#0e6468", "prefill and decode": "#e08a2e", "shared by models": "#7a5ca8"}


def plot_plans(case: Case, found: Found, path: Path) -> Path:
    """All simulated plans: how far from the SLOs by devices, and the two times at the 99th
    percentile."""
    figure, (left, right) = _pyplot().subplots(1, 2, figsize=(10, 3.8))
    for kind, color in _KINDS.items():
        some = [result for result in found.results if _kind(result) == kind and result.strain < 1e6]
        if some:
            left.scatter(
                [result.plan.num_devices for result in some],
                [result.strain for result in some],
                s=14,
                color=color,
                label=kind,
                alpha=0.7,
            )
            times = (
                [1000 * result.ttft_s[1] for result in some],
                [1000 * result.tpot_s[1] for result in some],
            )
            right.scatter(*times, s=14, color=color, alpha=0.7)
    left.axhline(1, color="#5a686a", linewidth=0.8, linestyle=":")
    left.set(
        xlabel=f"{case.hardware.name} devices", ylabel="strain (up to 1: SLOs kept)", yscale="log"
    )
    right.axvline(1000 * case.slo.ttft_s, color="#5a686a", linewidth=0.8, linestyle=":")
    right.axhline(1000 * case.slo.tpot_s, color="#5a686a", linewidth=0.8, linestyle=":")
    right.set(
        xlabel="time to first token, p99 (ms)",
        ylabel="time per output token, p99 (ms)",
        xscale="log",
        yscale="log",
    )
    for result, mark in ((found.winner, "*"), (found.runner_up, "D")):
        if result is not None and result.strain < 1e6:
            name = f"{'winner' if mark == '*' else 'runner-up'}: {result.plan.name}"
            left.scatter(
                [result.plan.num_devices],
                [result.strain],
                s=110 if mark == "*" else 45,
                marker=mark,
                color="#b3261e",
                label=name,
            )
            right.scatter(
                [1000 * result.ttft_s[1]],
                [1000 * result.tpot_s[1]],
                s=110 if mark == "*" else 45,
                marker=mark,
                color="#b3261e",
            )
    most = max(result.plan.num_devices for result in [found.winner, *found.results])
    left.set_xlim(0, most + 1)
    if most <= 16:
        left.set_xticks(range(1, most + 1))
    for axis in (left.yaxis, right.xaxis, right.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("{x:g}")
        axis.set_tick_params(which="both", labelsize=7)
    left.legend(frameon=False, fontsize=7)
    figure.suptitle("simulated", fontsize=9, x=0.01, ha="left")
    return _save(figure, path)


def _kind(result: Result) -> str:
    if result.plan.is_disaggregated:
        return "prefill and decode"
    return (
        "shared by models"
        if any(len(pool.models) > 1 for pool in result.plan.pools)
        else "colocated"
    )
