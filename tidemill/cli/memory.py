"""`tidemill memory`: the memory a model needs, and how many requests fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tidemill.capabilities import Setup, check_setup, in_use, why_not
from tidemill.cli.settings import Settings, takes
from tidemill.config import decide_disk, fmt_bytes, parse_bytes, sequence_bytes
from tidemill.config.neurons import decide_hot_neurons
from tidemill.config.resolve import set_up
from tidemill.config.streaming import decide_weight_memory
from tidemill.errors import ConfigError
from tidemill.types.kv_format import FORMATS, ON_DEVICE
from tidemill.types.model_config import ModelConfig
from tidemill.weights.locate import locate

console = Console(highlight=False)


@takes(
    "model",
    "device",
    "dtype",
    "kv-dtype",
    "kv-host-memory",
    "kv-disk",
    "weight-memory",
    "hot-neurons",
)
def memory(
    settings: Settings,
    context: Annotated[
        int | None,
        typer.Option(
            help="Prompt plus output of each request, in tokens. Default: the model's own context."
        ),
    ] = None,
    requests: Annotated[int, typer.Option(help="How many requests at the same time.")] = 1,
    available: Annotated[
        str | None, typer.Option(help="Memory to plan for, like 16G. Default: what is free here.")
    ] = None,
) -> None:
    """Estimate a model's memory, and how many requests fit. Exits with 1 if those asked for do not."""
    from tidemill.kernels.machine import detect
    from tidemill.models.registry import model_class
    from tidemill.weights.checkpoint import open_checkpoint

    options = settings.engine_options()
    checkpoint = open_checkpoint(locate(options.model))
    config = model_class(checkpoint).read_config(checkpoint)
    machine, why = detect(), dict[str, str]()
    setup = set_up(options, config, machine, why)
    check_setup(setup)
    device, dtype, kv_dtype = setup.device, setup.dtype, setup.kv_dtype
    tokens = context if context is not None else config.max_context
    if tokens < 1 or requests < 1:
        raise ConfigError("context and requests must be at least 1.")
    if tokens > config.max_context:
        what = f"--context is {tokens:,}, but the model was made for {config.max_context:,}."
        raise ConfigError(what, fix=f"Give {config.max_context} or less.", param="context")
    weights = config.weight_bytes(dtype, bool(machine.kernels))
    held, why_held = decide_weight_memory(options, device, weights, config, machine)
    hot, why_hot = decide_hot_neurons(options, weights, held, config)
    kind, per_token = FORMATS[kv_dtype], config.kv_bytes_per_token(kv_dtype)
    per_request, why_layout = sequence_bytes(options, config, device, kv_dtype, tokens)
    kv = per_request * requests
    activations = config.activation_bytes(256, max(64, requests))
    have = (
        parse_bytes(available)
        if available
        else machine.gpu_free_bytes
        if device == "cuda"
        else machine.available_bytes
    )
    host = options.kv_host_memory_bytes or 0
    room = have - (held or weights) - activations - (host if device == "cpu" else 0)
    table = Table(
        "part",
        "bytes",
        "how",
        title=f"{options.model}: {requests} × {tokens:,} tokens, {dtype}",
        title_justify="left",
    )
    table.add_row(
        "weights",
        fmt_bytes(held or weights),
        f"{config.num_parameters:,} parameters; {why['dtype']}" + (f"; {why_held}" if held else ""),
    )
    if hot is not None:
        table.add_row("in host memory", fmt_bytes(weights - held), why_hot)
    table.add_row(
        "KV cache",
        fmt_bytes(kv),
        f"2 · {config.num_kv_heads} heads · {config.head_dim} · {config.num_kv_layers} layers · {kind.bits / 8:g} bytes"
        f"{' and scales' if kind.has_scales else ''} = {per_token:,} a token; {why_layout}",
    )
    table.add_row("activations", fmt_bytes(activations), "one step of 256 tokens, and logits")
    table.add_row("total", fmt_bytes((held or weights) + kv + activations), "", style="bold")
    console.print(table)
    if config.token_layers and config.pooler is None:
        console.print(_formats(setup, tokens, room))
    for note in _notes(config, dtype):
        console.print(note, markup=False)
    fits = max(0, room) // per_request
    console.print(
        f"With {fmt_bytes(have)} of memory, {fits:,} requests of {tokens:,} tokens fit"
        + ("." if fits >= requests else f", fewer than the {requests} requested.")
    )
    for name, num_bytes in (("host memory", host), ("disk", decide_disk(options)[0][1])):
        if num_bytes:
            more = num_bytes // per_request
            console.print(
                f"Behind them, {fmt_bytes(num_bytes)} of {name} keep the prefixes of {more:,} such requests."
            )
    if fits < requests:
        raise typer.Exit(1)


def _formats(setup: Setup, tokens: int, room: int) -> Table:
    """A table of the formats of the KV cache: the bytes that each takes, and how much fits beside
    weights and activations."""
    table = Table("--kv-dtype", "bytes a token", f"requests of {tokens:,}", "tokens")
    config, device = setup.model, setup.device
    for name in ON_DEVICE[device]:
        refusal = why_not(f"kv-dtype {name}", in_use(replace(setup, kv_dtype=name)))
        if refusal is not None and not refusal.needed:
            continue  # not for this model
        fits = max(0, room) // sequence_bytes(setup.options, config, device, name, tokens)[0]
        mark = " (chosen)" if name == setup.kv_dtype else ""
        table.add_row(
            name + mark, f"{config.kv_bytes_per_token(name):,}", f"{fits:,}", f"{fits * tokens:,}"
        )
    return table


def _notes(config: ModelConfig, dtype: str) -> list[str]:
    kinds = config.unpacked_types(dtype)
    return (
        [f"{', '.join(kinds)} is unpacked to 8 bits when it is loaded: more memory than the file."]
        if kinds
        else []
    )
