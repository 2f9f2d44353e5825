"""`tidemill serve`: the server. Prints its memory budget and the reasons for it."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tidemill.cli.options import BY_NAME
from tidemill.cli.settings import Settings, raise_on_interrupt, takes
from tidemill.config import fmt_bytes
from tidemill.engine.bars import LoadingBar
from tidemill.errors import ConfigError
from tidemill.types.wire import Loading, Ready
from tidemill.weights.locate import locate

if TYPE_CHECKING:
    from tidemill.cluster.ray.cluster import Cluster
    from tidemill.cluster.ray.serving import RayFleet
    from tidemill.record.writer import RecordingWriter
    from tidemill.server.generation.models import Models, Served
    from tidemill.server.http.listen import Listen

console = Console(stderr=True, highlight=False)


@takes(*BY_NAME, model="several")
def serve(
    settings: Settings,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print each option's value and source, and exit.")
    ] = False,
) -> None:
    """Serve models: the APIs of OpenAI and others, and a page."""
    if show_config:
        print_settings(settings)
        return
    from tidemill.server.generation.service import ResponseDefaults
    from tidemill.server.http.access import SHORT_KEY, Access
    from tidemill.server.http.context import RequestLog
    from tidemill.server.observe.tracing import make_tracing
    from tidemill.server.run import STOPPED_BY_SIGTERM, Sharing, data_folder
    from tidemill.server.run import serve as run_server
    from tidemill.server.store.storage import Storage

    access = Access.of(
        list(settings["api-key"]),
        settings["api-key-file"],
        list(settings["admin-key"]),
        list(settings["allowed-host"]),
        list(settings["allowed-origin"]),
        settings["trust-request-chat-template"],
    )
    listen = listen_of(settings, settings["root-path"] or "")
    if listen.unix_socket is None:
        access.check_host_is_safe(listen.host)
    if access.has_short_key:
        console.print(SHORT_KEY, style="yellow")
    data = Storage(_path(settings["data-dir"]) or data_folder(), settings["data-quota"])
    log = (
        RequestLog(_path(settings["log-file"]), settings["log-format"])
        if settings["request-log"]
        else None
    )
    tracing = make_tracing(settings["otlp-endpoint"])
    served = _served(settings)
    for model in served:
        locate(model.engine.model, fetch=True)
    recording = _recording(settings, bool(access.private_tenants))
    sharing = Sharing(
        budget_bytes=settings["memory-budget"],
        max_loaded=settings["max-loaded"],
        idle_s=settings["idle-unload"],
    )
    bar, is_ready = LoadingBar(console=console), False

    def on_loading(name: str, message: Loading) -> None:
        bar.show(message.done_bytes, message.total_bytes, "weights" if len(served) == 1 else name)

    def on_ready(models: Models, port: int) -> None:
        nonlocal is_ready
        is_ready = True
        bar.stop()
        print_ready(models, listen, port, bool(access.keys or access.admin_keys), settings["ui"])
        if recording is not None:
            console.print(f"Requests and steps are recorded: {recording}.", style="dim")
        if settings["disaggregate"] == "auto" and not served[0].engine.has_roles:
            layout = "no load is measured yet, so engines do both; advice follows here, in /metrics and in the live view"
            console.print(f"Disaggregation: {layout}.", style="dim")

    raise_on_interrupt()
    cluster, fleet = _on_ray(settings, served)
    if fleet is not None:
        served = [dataclasses.replace(served[0], engine=fleet.engine)]
    ended_by = ""
    try:
        with bar:
            run_loop(
                run_server(
                    served,
                    listen,
                    on_loading,
                    on_ready,
                    drain_s=settings["drain-seconds"],
                    stall_seconds=settings["stall-seconds"],
                    start_seconds=settings["start-seconds"],
                    tool_parser=settings["tool-parser"],
                    reasoning_parser=settings["reasoning-parser"],
                    thinking_budget=settings["thinking-token-budget"],
                    response_defaults=ResponseDefaults(
                        settings["force-include-usage"],
                        settings["return-tokens-as-token-ids"],
                        settings["slots"],
                        settings["ui"],
                        None if settings["pooling"] == "auto" else settings["pooling"],
                    ),
                    access=access,
                    data=data,
                    log=log,
                    tracing=tracing,
                    sharing=sharing,
                    fleet=fleet,
                    advises=settings["disaggregate"] == "auto",
                    recording=recording,
                )
            )
    except (asyncio.CancelledError, KeyboardInterrupt) as error:
        ended_by = "SIGTERM" if error.args == (STOPPED_BY_SIGTERM,) else "Ctrl-C"
    finally:
        if cluster is not None:
            cluster.close()
    if ended_by and not is_ready:
        console.print(f"Stopped by {ended_by} before the model was loaded.", style="yellow")
        if ended_by == "Ctrl-C":
            raise typer.Exit(130)


def _on_ray(settings: Settings, served: list[Served]) -> tuple[Cluster | None, RayFleet | None]:
    """The cluster that the engines run on, and what makes them there; nothing without --ray."""
    if not settings["ray"]:
        for name in ("replicas", "autoscale", "ray-address", "ray-wait"):
            if settings.source(name) == f"--{name}":
                raise ConfigError(
                    f"--{name} is of a Ray cluster.", fix="Add --ray.", param=name.replace("-", "_")
                )
        return None, None
    from tidemill.cluster.ray.cluster import Cluster
    from tidemill.cluster.ray.scale import ScalePolicy
    from tidemill.cluster.ray.serving import RayFleet, RayOptions

    if len(served) > 1 or served[0].engine.data_parallel > 1:
        fix = "Serve one model, with --replicas instead of --data-parallel."
        raise ConfigError("--ray is for a single model.", fix=fix, param="ray")
    policy = ScalePolicy.parse(settings["autoscale"]) if settings["autoscale"] else None
    cluster = Cluster(settings["ray-address"], settings["ray-wait"])
    try:
        return cluster, RayFleet(
            cluster, RayOptions(settings["replicas"], policy), served[0].engine
        )
    except BaseException:
        cluster.close()
        raise


def _recording(settings: Settings, has_private: bool) -> RecordingWriter | None:
    """The recording that --record asks for. `has_private`: there are tenants whose requests are
    sealed."""
    if not settings["record"]:
        return None
    from tidemill.record.writer import RecordingWriter, folder_and_size, read_key

    folder, most = folder_and_size(settings["record"])
    seals_all = settings["record-text"] == "off"
    if not seals_all and not has_private:
        return RecordingWriter(folder, most)
    return RecordingWriter(
        folder, most, read_key(_path(settings["record-key"]) or data_key(), creates=True), seals_all
    )


def data_key() -> Path:
    from tidemill.server.run import data_folder

    return data_folder() / "record.key"


def _path(text: str | None) -> Path | None:
    return Path(text).expanduser() if text else None


def print_settings(settings: Settings) -> None:
    table = Table("option", "value", "source")
    for row in settings.shown():
        table.add_row(*row)
    for model in settings.tables:
        table.add_row(
            "[[models]]", model.engine.get("served_name") or model.engine["model"], model.source
        )
    Console(highlight=False).print(table, markup=False)


def listen_of(settings: Settings, root_path: str = "") -> Listen:
    from tidemill.server.http.listen import Listen

    mode = settings["unix-socket-mode"]
    if not re.fullmatch("(0o?)?[0-7]{3}", mode):
        raise ConfigError(
            f"unix-socket-mode is {mode!r}.",
            fix="Give three octal digits, like 660.",
            param="unix_socket_mode",
        )
    return Listen(
        host=settings["host"],
        port=settings["port"],
        unix_socket=_path(settings["unix-socket"]),
        unix_socket_mode=int(mode[-3:], 8),
        tls_cert=_path(settings["tls-cert"]),
        tls_key=_path(settings["tls-key"]),
        tls_client_ca=_path(settings["tls-client-ca"]),
        root_path=root_path.rstrip("/"),
    )


def _served(settings: Settings) -> list[Served]:
    """The models, from the command line, or else from [[models]] of the config file, or else the
    one of the options."""
    from tidemill.server.generation.models import Served

    if settings.models and settings.tables:
        raise ConfigError(
            "There are models on the command line and in the config file.",
            fix="Give them in one place.",
        )
    models = [
        _named(text) for text in settings.models or ([] if settings.tables else [settings["model"]])
    ]
    if len(models) + len(settings.tables) > 1 and settings["served-name"]:
        fix = "Name each model: NAME=MODEL on the command line, or name in its [[models]] table."
        raise ConfigError("--served-name is for a single model.", fix=fix, param="served_name")
    if len(models) + len(settings.tables) > 1 and settings["lora"]:
        fix = "Give each model its own in its [[models]] table: lora = ['NAME=PATH']."
        raise ConfigError("--lora is for a single model.", fix=fix, param="loras")
    served, own_names = (
        [],
        [name.strip() for name in (settings["served-name"] or "").split(",") if name.strip()],
    )
    if settings["served-name"] and not own_names:
        raise ConfigError(
            "--served-name has no name.",
            fix="Give one, or several with commas.",
            param="served_name",
        )
    for names, model in models:
        names = names or own_names
        own = {"model": model} | ({"served_name": names[0]} if names else {})
        served.append(Served(settings.engine_options(**own), tuple(names[1:])))
    served += [
        Served(settings.engine_options(**table.engine), table.aliases) for table in settings.tables
    ]
    Served.check_names(served)
    return served


def _named(text: str) -> tuple[list[str], str]:
    """NAME,ALIAS=MODEL: the names, if there are any, and the model."""
    names, is_named, model = text.partition("=")
    if not is_named or os.path.exists(Path(text).expanduser()):
        return [], text
    found = [name.strip() for name in names.split(",")]
    if not model or not all(found):
        raise ConfigError(
            f"The model is {text!r}.", fix="Write NAME=MODEL, or NAME,ALIAS=MODEL.", param="model"
        )
    return found, model


def print_ready(models: Models, listen: Listen, port: int, needs_key: bool, has_page: bool) -> None:
    from tidemill.engine.replicas import Replicas

    for service in models:
        console.print(budget_table(service.model_name, service.ready))
        if isinstance(service.client, Replicas):
            kinds = Counter(engine.get("role", "alike") for engine in service.client.described())
            console.print(
                f"Engines, each as above: {', '.join(f'{num} {kind}' for kind, num in kinds.items())}"
            )
    if len(models.names) > 1:
        states = ", ".join(f"{name} ({state})" for name, state in models.states().items())
        console.print(f"Models: {states}", markup=False)
    name, url = models.default.model_name, listen.url(port)
    where = f"{url} through {listen.unix_socket}" if listen.unix_socket else url
    console.print(
        f"Tidemill serves {', '.join(models.names)} on {where}   (Ctrl-C stops it)\n",
        style="bold",
        markup=False,
    )
    in_browser = has_page and listen.unix_socket is None  # a browser has no Unix sockets
    console.print(
        f"{'Open that address in a browser, or try' if in_browser else 'Try'}, in another terminal:",
        style="dim",
    )
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "What is a tide mill?"}}]}}'
    headers = "-H 'Content-Type: application/json'" + (
        " -H 'Authorization: Bearer YOUR_KEY'" if needs_key else ""
    )
    through = f"--unix-socket {listen.unix_socket} " if listen.unix_socket else ""
    curl = f"  curl {through}{url}/v1/chat/completions {headers} -d '{body}'\n"
    console.print(curl, markup=False, soft_wrap=True)


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


def budget_table(name: str, ready: Ready) -> Table:
    """The table of the memory budget: where the memory goes, what fits, and why each value was
    chosen."""
    config, model = ready.config, ready.model
    why = config.reasons
    table = Table(
        title=f"{name}: {model.architecture}, {model.num_parameters / 1e6:.0f} M parameters",
        title_justify="left",
    )
    for column in ("setting", "value", "because"):
        table.add_column(column, style="dim" if column == "because" else None, overflow="fold")
    where = "GPU" if config.device == "cuda" else f"{config.threads} threads"
    table.add_row(
        "compute",
        f"{config.dtype}, {where}",
        f"{why['dtype']}; {why['device' if where == 'GPU' else 'threads']}",
    )
    if config.num_ranks > 1:
        parts = f"{config.tensor_parallel} share each layer, {config.pipeline_parallel} stages"
        table.add_row(
            "ranks",
            str(config.num_ranks),
            f"{parts}; weights and KV cache below are of each that shares layers",
        )
    if config.tensor_layout == "phased":
        begin = (
            f"1D; from {config.gather_tokens} tokens on gathered" if config.gather_tokens else "1D"
        )
        table.add_row("layout of a step", begin, f"{why['gather_tokens']}; the bits are the same")
    if config.pipeline_parallel > 1:
        table.add_row(
            "stages",
            " + ".join(map(str, config.pipeline_layers)) + " layers",
            why["pipeline_layers"],
        )
    streamed = f"; {why['weight_memory']}" if config.weight_memory else ""
    table.add_row(
        "weights",
        fmt_bytes(config.weight_bytes),
        f"{model.num_parameters:,} parameters, {config.dtype}{streamed}",
    )
    table.add_row(
        "KV cache",
        f"{fmt_bytes(config.kv_bytes)}: {config.num_pages:,} pages of {config.page_size}",
        f"{why['kv_bytes']}; {fmt_bytes(model.kv_bytes_per_token(config.kv_dtype))} a token in {config.kv_dtype}",
    )
    if config.max_loras:
        most = f"{config.max_loras} adapters of rank {config.max_lora_rank}"
        table.add_row("adapters", f"{fmt_bytes(config.lora_bytes)}: {most}", why["max_loras"])
    if config.policy_bytes:
        beside = f"{fmt_bytes(config.policy_bytes)} and {fmt_bytes(config.summary_bytes)} beside the KV cache"
        table.add_row(
            "KV policies",
            beside,
            f"{why['policy_bytes']}; the lowest and highest keys of its pages",
        )
    if config.draft is not None:
        held = f"{config.draft.num_kv_tokens:,} KV tokens"
        table.add_row(
            "draft model",
            f"{fmt_bytes(config.draft_bytes)}: weights, activations, {held}",
            why["speculate"],
        )
    table.add_row("activations", fmt_bytes(config.activation_bytes), "peak of one step")
    table.add_row("context", f"{config.max_context:,} tokens", why["max_context"])
    table.add_row("slots", f"{config.max_requests} sequences", why["max_requests"])
    table.add_row(
        "queue",
        f"{config.max_waiting:,} requests",
        "queued while all slots are taken; further ones get status 429",
    )
    table.add_row(
        "at full context",
        f"{config.full_context_requests:.1f} requests",
        f"{config.num_kv_tokens:,} KV tokens / {config.max_context:,}",
    )
    table.add_row("step", f"{config.token_budget} tokens", why["token_budget"])
    table.add_row(
        "policy",
        config.policy,
        "prefix caching on" if config.prefix_caching else "prefix caching off",
    )
    if kinds := model.unpacked_types(config.dtype):
        table.add_row(
            "note", "", f"{', '.join(kinds)} is unpacked to 8 bits: more memory than the file"
        )
    for note in (
        *config.notes,
        *model.notes,
        *([f"slower than it could be: {why['kernels']}"] if "kernels" in why else ()),
    ):
        table.add_row("note", "", note)
    return table
