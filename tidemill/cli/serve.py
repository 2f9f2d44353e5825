"""`tidemill serve`: the server. Prints its memory budget and the reasons for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tidemill.cli.options import BY_NAME
from tidemill.cli.settings import Settings, raise_on_interrupt, takes
from tidemill.config import fmt_bytes
from tidemill.weights.locate import locate
from tidemill.wire import Loading, Ready

console = Console(stderr=True, highlight=False)
_COLUMNS = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())


@takes(*BY_NAME)
def serve(
    settings: Settings,
    show_config: Annotated[bool, typer.Option("--show-config", help="Print each option's value and source, and exit.")] = False,
) -> None:
    """Serve a model: OpenAI and Anthropic APIs, and a page to chat."""
    if show_config:
        print_settings(settings)
        return
    from tidemill.server.call import RequestLog
    from tidemill.server.guard import Access
    from tidemill.server.run import data_folder
    from tidemill.server.run import serve as run_server
    from tidemill.server.storage import Storage

    access = Access.of(
        list(settings["api-key"]),
        settings["api-key-file"],
        list(settings["admin-key"]),
        list(settings["allowed-host"]),
        list(settings["allowed-origin"]),
    )
    access.check_host_is_safe(settings["host"])
    data = Storage(_path(settings["data-dir"]) or data_folder(), settings["data-quota"])
    log = RequestLog(_path(settings["log-file"]), settings["log-format"]) if settings["request-log"] else None
    options = settings.engine_options()
    locate(options.model, fetch=True)
    bar = Progress(*_COLUMNS, console=console, transient=True)
    task = bar.add_task("Loading weights", total=None)

    def on_loading(message: Loading) -> None:
        bar.update(task, completed=message.done_bytes, total=message.total_bytes)

    def on_ready(ready: Ready, port: int) -> None:
        bar.stop()
        print_ready(options.served_name or options.model, settings["host"], port, ready, bool(access.keys or access.admin_keys))

    raise_on_interrupt()
    bar.start()
    try:
        with contextlib.suppress(asyncio.CancelledError, KeyboardInterrupt):
            run_loop(
                run_server(
                    options,
                    settings["host"],
                    settings["port"],
                    on_loading,
                    on_ready,
                    drain_s=settings["drain-seconds"],
                    stall_seconds=settings["stall-seconds"],
                    start_seconds=settings["start-seconds"],
                    access=access,
                    data=data,
                    log=log,
                )
            )
    finally:
        bar.stop()


def _path(text: str | None) -> Path | None:
    return Path(text).expanduser() if text else None


def print_settings(settings: Settings) -> None:
    table = Table("option", "value", "source")
    for row in settings.shown():
        table.add_row(*row)
    Console(highlight=False).print(table, markup=False)


def print_ready(name: str, host: str, port: int, ready: Ready, needs_key: bool) -> None:
    console.print(budget_table(name, ready))
    shown = f"[{host}]" if ":" in host else host
    console.print(f"Tidemill serves {name} on http://{shown}:{port}   (Ctrl-C stops it)\n", style="bold", markup=False)
    console.print("Open that address in a browser, or try, in another terminal:", style="dim")
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "What is a tide mill?"}}]}}'
    headers = "-H 'Content-Type: application/json'" + (" -H 'Authorization: Bearer YOUR_KEY'" if needs_key else "")
    curl = f"  curl http://{shown}:{port}/v1/chat/completions {headers} -d '{body}'\n"
    console.print(curl, markup=False, soft_wrap=True)


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


def budget_table(name: str, ready: Ready) -> Table:
    """Where the memory goes, what fits, and why each value was chosen."""
    config, model = ready.config, ready.model
    why = config.reasons
    table = Table(title=f"{name}: {model.architecture}, {model.num_parameters / 1e6:.0f} M parameters", title_justify="left")
    for column in ("setting", "value", "because"):
        table.add_column(column, style="dim" if column == "because" else None, overflow="fold")
    where = "GPU" if config.device == "cuda" else f"{config.threads} threads"
    table.add_row("compute", f"{config.dtype}, {where}", f"{why['dtype']}; {why['device' if where == 'GPU' else 'threads']}")
    table.add_row("weights", fmt_bytes(config.weight_bytes), f"{model.num_parameters:,} parameters, {config.dtype}")
    table.add_row(
        "KV cache",
        f"{fmt_bytes(config.kv_bytes)}: {config.num_pages:,} pages of {config.page_size}",
        f"{why['kv_bytes']}; {fmt_bytes(model.kv_bytes_per_token(config.kv_dtype))} a token in {config.kv_dtype}",
    )
    table.add_row("activations", fmt_bytes(config.activation_bytes), "peak of one step")
    table.add_row("context", f"{config.max_context:,} tokens", why["max_context"])
    table.add_row("slots", f"{config.max_requests} sequences", why["max_requests"])
    table.add_row("queue", f"{config.max_waiting:,} requests", "queued while all slots are taken; further ones get status 429")
    table.add_row(
        "at full context",
        f"{config.full_context_requests:.1f} requests",
        f"{config.num_kv_tokens:,} KV tokens / {config.max_context:,}",
    )
    table.add_row("step", f"{config.token_budget} tokens", why["token_budget"])
    table.add_row("policy", config.policy, "prefix caching on" if config.prefix_caching else "prefix caching off")
    if kinds := model.unpacked_types(config.dtype):
        table.add_row("note", "", f"{', '.join(kinds)} is unpacked to 8 bits: more memory than the file")
    for note in (*model.notes, *([f"slower than it could be: {why['kernels']}"] if "kernels" in why else ())):
        table.add_row("note", "", note)
    return table
