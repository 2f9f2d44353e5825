"""The summary of a quantization: a table of bytes, perplexity, KL divergence and speed before and
after, and a plot of it."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from tidemill.compress.evaluate import Evaluation, evaluate, text_windows
from tidemill.compress.quantize import Result
from tidemill.compress.walk import Reporter
from tidemill.engine.llm import LLM
from tidemill.engine.load import inspect
from tidemill.errors import ConfigError
from tidemill.weights.locate import locate

_CONTEXT = 1024


def check_plot(path: Path, num_tokens: int) -> None:
    """Before the work begins."""
    if path.suffix not in (".png", ".svg") or not path.expanduser().parent.is_dir():
        raise ConfigError(
            f"--plot is {path}.", fix="Give a .png or .svg in a folder that is there.", param="plot"
        )
    if not num_tokens:
        raise ConfigError(
            "--plot needs a comparison.", fix="Give --evaluate a number of tokens.", param="plot"
        )
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "--plot draws with matplotlib.", fix="Run: pip install 'tidemill[bench]'", param="plot"
        ) from error


def summarize(
    model: str,
    made: Result,
    num_tokens: int,
    text: Path | None,
    plot: Path | None,
    report: Reporter,
) -> Table:
    """Both are served as they are stored, and take turns."""
    before, after = str(locate(model)), str(made.out)
    llms: dict[str, LLM] = {}
    context = min(_CONTEXT, inspect(before)[2].max_context)
    try:
        for name in (before, after):
            llms[name] = LLM(
                name, device="cpu", max_requests=2, max_context=context, progress=False
            )
        found = evaluate(llms, text_windows(llms[before], text, num_tokens), [], report)
    finally:
        for llm in llms.values():
            llm.close()
    if plot is not None:
        draw({"before": found[0], made.layout: found[1]}, plot.expanduser())
    return table(found[0], found[1])


def table(before: Evaluation, after: Evaluation) -> Table:
    made = Table("", "before", "after", "ratio")
    made.add_row("bytes", *_pair(before.num_bytes, after.num_bytes, ",.0f"))
    if before.quality is not None and after.quality is not None:
        made.add_row(
            "perplexity", *_pair(before.quality.perplexity, after.quality.perplexity, ".3f")
        )
        if after.quality.kl is not None and after.quality.top1 is not None:
            made.add_row("mean KL", "0", f"{after.quality.kl:.4f}", "")
            made.add_row("same likeliest token", "100%", f"{after.quality.top1:.1%}", "")
    made.add_row("tokens/s, one request", *_pair(before.tokens_per_s, after.tokens_per_s, ".1f"))
    return made


def _pair(before: float, after: float, how: str) -> tuple[str, str, str]:
    return f"{before:{how}}", f"{after:{how}}", f"{after / before:.3f}" if before else ""


def draw(points: dict[str, Evaluation], path: Path) -> None:
    """Bytes and perplexity, a point a model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for name, one in points.items():
        assert one.quality is not None
        x, y = one.num_bytes / 2**20, one.quality.perplexity
        axes.plot(x, y, "o")
        axes.annotate(
            f"{name}\n{one.tokens_per_s:.0f} tok/s",
            (x, y),
            xytext=(6, 6),
            textcoords="offset points",
            fontsize=8,
        )
    axes.set_xlabel("MiB")
    axes.set_ylabel("perplexity")
    axes.set_xlim(left=0)
    axes.margins(0.25)
    axes.grid(alpha=0.3)
    figure.savefig(path)
