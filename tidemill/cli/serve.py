"""`tidemill serve`: the server, with its budget and the reasons for it on the screen."""

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

from tidemill.cli import options as opt
from tidemill.config import EngineOptions, fmt_bytes
from tidemill.weights.locate import locate
from tidemill.wire import Loading, Ready

console = Console(stderr=True, highlight=False)


def serve(
    model: opt.Model = "smollm2",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    served_name: Annotated[str | None, typer.Option(help="The model's name in the API. Default: as given.")] = None,
    device: opt.Device = "auto",
    dtype: opt.DType = "auto",
    page_size: opt.PageSize = None,
    max_context: opt.MaxContext = None,
    max_requests: opt.MaxRequests = None,
    token_budget: opt.TokenBudget = None,
    kv_memory: opt.KVMemory = None,
    policy: opt.PolicyName = "continuous",
    prefix_caching: opt.PrefixCaching = True,
    threads: opt.Threads = None,
    fast_math: opt.FastMath = False,
    structured_backend: opt.StructuredBackend = "llguidance",
    load_format: opt.LoadFormat = "auto",
    api_key: Annotated[list[str] | None, typer.Option(help="A key that clients must send; may be given several times.")] = None,
    api_key_file: Annotated[str | None, typer.Option(help="A file of keys, or of sha256:HEX of them, one a line.")] = None,
    admin_key: Annotated[list[str] | None, typer.Option(help="A key for metrics and for other people's requests.")] = None,
    allowed_host: Annotated[list[str] | None, typer.Option(help="A name under which this server may be asked.")] = None,
    allowed_origin: Annotated[list[str] | None, typer.Option(help="A web page's origin that may ask, like https://a.b")] = None,
    drain_seconds: Annotated[float, typer.Option(help="How long answers under way may take to end when told to stop.")] = 30.0,
    data_dir: Annotated[
        str | None, typer.Option(help="Where files and batches are kept. Default: ~/.local/share/tidemill")
    ] = None,
    request_log: Annotated[bool, typer.Option(help="A line for each request that has ended.")] = True,
    log_format: Annotated[str, typer.Option(help="text or json.")] = "text",
    log_file: Annotated[str | None, typer.Option(help="Where they go; may be moved away at any time. Default: stderr.")] = None,
    data_quota: Annotated[str, typer.Option(help="What they may take, like 10GB.")] = "10GB",
) -> None:
    """Serve a model over the OpenAI API."""
    from tidemill.server.call import RequestLog
    from tidemill.server.guard import Access
    from tidemill.server.run import data_folder
    from tidemill.server.run import serve as run_server
    from tidemill.server.storage import Storage

    access = Access.of(api_key or [], api_key_file, admin_key or [], allowed_host or [], allowed_origin or [])
    access.check_host_is_safe(host)
    data = Storage(Path(data_dir).expanduser() if data_dir else data_folder(), opt.memory_bytes(data_quota) or 0)
    log = RequestLog(Path(log_file).expanduser() if log_file else None, log_format) if request_log else None
    locate(model, fetch=True)
    options = EngineOptions(
        model=model,
        served_name=served_name,
        device=device,
        dtype=dtype,
        page_size=page_size,
        max_context=max_context,
        max_requests=max_requests,
        token_budget=token_budget,
        kv_memory_bytes=opt.memory_bytes(kv_memory),
        policy=policy,
        prefix_caching=prefix_caching,
        threads=threads,
        fast_math=fast_math,
        structured_backend=structured_backend,
        load_format=load_format,
    )
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task("Loading weights", total=None)

    def on_loading(message: Loading) -> None:
        bar.update(task, completed=message.done_bytes, total=message.total_bytes)

    def on_ready(ready: Ready, port: int) -> None:
        bar.stop()
        name = served_name or model
        console.print(budget_table(name, ready))
        shown = f"[{host}]" if ":" in host else host
        console.print(f"Tidemill serves {name} on http://{shown}:{port}   (Ctrl-C stops it)\n", style="bold", markup=False)
        console.print("Open that address in a browser, or try, in another terminal:", style="dim")
        body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "What is a tide mill?"}}]}}'
        console.print(
            f"  curl http://{shown}:{port}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n",
            markup=False, soft_wrap=True,
        )  # fmt: skip

    opt.heed_interrupts()
    bar.start()
    try:
        with contextlib.suppress(asyncio.CancelledError, KeyboardInterrupt):
            run_loop(run_server(options, host, port, on_loading, on_ready, drain_seconds, access, data, log))
    finally:
        bar.stop()


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
    table.add_row("requests", f"{config.max_requests} at once", why["max_requests"])
    table.add_row(
        "at full context",
        f"{config.full_context_requests:.1f} requests",
        f"{config.num_kv_tokens:,} KV tokens / {config.max_context:,}",
    )
    table.add_row("step", f"{config.token_budget} tokens", why["token_budget"])
    table.add_row("policy", config.policy, "prefix caching on" if config.prefix_caching else "prefix caching off")
    for note in (*model.notes, *([f"slower than it could be: {why['kernels']}"] if "kernels" in why else ())):
        table.add_row("note", "", note)
    return table
