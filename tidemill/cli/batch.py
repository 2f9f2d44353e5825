"""`tidemill batch`: requests from a file, results to a file."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tidemill.cli.generate import MaxTokens, RepetitionPenalty, Seed, Temperature, TopK, TopP
from tidemill.cli.options import ENGINE_NAMES
from tidemill.cli.settings import Settings, takes
from tidemill.engine.bars import LoadingBar
from tidemill.errors import ConfigError
from tidemill.types.wire import Loading
from tidemill.weights.locate import locate

if TYPE_CHECKING:
    from tidemill.batch.run import Backend, Batch
    from tidemill.batch.run import Progress as Done

_RAY = ("ray", "replicas", "ray-address", "ray-wait")
_OPTIONS = (
    *ENGINE_NAMES,
    *_RAY,
    "lora",
    "max-loras",
    "max-lora-rank",
    "served-name",
    "structured-backend",
    "stall-seconds",
    "start-seconds",
)


@takes(*_OPTIONS, model="option")
def batch(
    source: Annotated[
        Path, typer.Argument(metavar="INPUT", help="A file of requests, one JSON object a line.")
    ],
    target: Annotated[
        Path,
        typer.Argument(
            metavar="OUTPUT", help="The file of results. One that is there is continued."
        ),
    ],
    settings: Settings,
    errors: Annotated[
        Path | None,
        typer.Option(help="A file for the lines that failed. Default: they are in OUTPUT."),
    ] = None,
    ordered: Annotated[
        bool, typer.Option(help="Results in the order of the input; else as they are finished.")
    ] = False,
    at_once: Annotated[
        int | None,
        typer.Option(
            min=1, help="Lines executed at once. Default: twice --max-requests; with --url, 64."
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="Send the lines to a server, http://HOST:PORT or unix:PATH, and load no model."
        ),
    ] = None,
    api_key: Annotated[
        str,
        typer.Option(help="With --url: the server's key. Default: the first of TIDEMILL_API_KEY."),
    ] = "",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Seed = None,
) -> None:
    """Execute a file of requests. Run again, it continues where it ended.

    A line is a request in OpenAI's batch format, or an object with prompt, messages or input and
    parameters of the request.
    """
    from tidemill.batch.run import Batch

    options = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
    }
    defaults = {name: value for name, value in options.items() if value is not None}
    make = _backend(settings, url, api_key, at_once)
    console = Console(stderr=True, highlight=False)
    files = Batch(source, target, errors, ordered, defaults)
    try:
        if files.progress.num_kept:
            console.print(
                f"{target} has {files.progress.num_kept:,} of {files.progress.total:,} results.",
                markup=False,
            )
        stopped = False if files.is_done else asyncio.run(_run(files, make, console))
    finally:
        files.close()
    done = files.progress
    console.print(_summary(done), markup=False)
    if stopped:
        console.print("Interrupted. The same command continues.", markup=False)
        raise typer.Exit(130)
    if done.num_failed:
        where = errors or target
        console.print(f"{done.num_failed:,} lines failed: {where} says why.", markup=False)
        raise typer.Exit(1)


class _Closing(Protocol):
    async def close(self) -> None: ...


if TYPE_CHECKING:

    class _Started(Backend, _Closing, Protocol): ...


_Make = Callable[[Callable[[str, Loading], None]], "Awaitable[_Started]"]


def _backend(settings: Settings, url: str | None, api_key: str, at_once: int | None) -> _Make:
    """The function that starts the backend."""
    if url is not None:
        _check_no_model(settings)
        from tidemill.batch.remote import AT_ONCE, Remote

        async def reach(_: Callable[[str, Loading], None]) -> Remote:
            return Remote(url, api_key, at_once or AT_ONCE)

        return reach
    if api_key:
        raise ConfigError("--api-key is of a server.", fix="Give its address with --url.")
    from tidemill.batch.local import Local
    from tidemill.server.generation.models import Served

    if settings["ray"]:
        return _ray_backend(settings, at_once)
    for name in _RAY:
        if settings.source(name) == f"--{name}":
            raise ConfigError(f"--{name} is of a Ray cluster.", fix="Add --ray.")
    locate(settings["model"], fetch=True)

    async def load(on_loading: Callable[[str, Loading], None]) -> Local:
        local = Local(
            Served(settings.engine_options()),
            at_once,
            settings["stall-seconds"],
            settings["start-seconds"],
        )
        try:
            await local.start(on_loading)
        except BaseException:
            await local.close()
            raise
        return local

    return load


def _ray_backend(settings: Settings, at_once: int | None) -> _Make:
    from tidemill.cluster.ray.batch import RayWorkers, WorkerOptions
    from tidemill.cluster.ray.cluster import Cluster, import_ray

    import_ray()
    engine, num = settings.engine_options(), settings["replicas"]

    async def start(_: Callable[[str, Loading], None]) -> RayWorkers:
        cluster = await asyncio.to_thread(Cluster, settings["ray-address"], settings["ray-wait"])
        try:
            needs = cluster.needs_of(engine, num)
            options = WorkerOptions(
                engine=needs.limit(engine),
                num_workers=num,
                needs=needs,
                num_at_once=at_once,
                stall_s=settings["stall-seconds"],
                start_s=settings["start-seconds"],
            )
            workers = RayWorkers(cluster, options)
            await workers.start()
        except BaseException:
            cluster.close()
            raise
        return workers

    return start


def _check_no_model(settings: Settings) -> None:
    for name in _OPTIONS:
        if settings.source(name) == f"--{name}":
            raise ConfigError(
                f"--{name} is of a model in this process.",
                fix="With --url, the server has its own options.",
            )


async def _run(files: Batch, make: _Make, console: Console) -> bool:
    """Runs the batches; returns whether the run was interrupted. In that case everything finished
    is written."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(True),
    )
    bar = Progress(*columns, console=console, disable=not console.is_terminal)
    task = bar.add_task("Lines", total=None, rate="")
    loading = LoadingBar(enabled=console.is_terminal, console=console)

    def on_loading(_: str, message: Loading) -> None:
        loading.show(message.done_bytes, message.total_bytes)

    def on_progress(done: Done) -> None:
        failed = f", {done.num_failed:,} failed" if done.num_failed else ""
        bar.update(
            task,
            description="Lines",
            completed=done.num_done,
            total=done.total,
            rate=f"{done.rate:.1f}/s{failed}",
        )

    async def main() -> None:
        with loading:
            backend = await make(on_loading)
        try:
            bar.reset(task, total=files.progress.total, completed=files.progress.num_done, rate="")
            with bar:
                await files.run(backend, on_progress)
        finally:
            await backend.close()

    running = asyncio.create_task(main())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, running.cancel)
    await asyncio.wait([running])
    if running.cancelled():
        return True
    running.result()
    return False


def _summary(done: Any) -> str:
    words = [f"{done.num_done:,} of {done.total:,} lines"]
    if done.num_done > done.num_kept:
        words.append(f"{done.rate:.1f} lines/s")
    if done.num_output:
        words.append(f"{done.num_prompt:,} prompt and {done.num_output:,} output tokens")
    return ", ".join(words) + "."
