"""`tidemill quantize`: from a model to a folder or a GGUF file of its quantized weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tidemill.compress.calibration import Calibration, calibration_ids
from tidemill.compress.decoder import Decoder, matrix_of
from tidemill.compress.folder import FolderWriter, names_outside, output_dtype
from tidemill.compress.kv_scales import SCHEME, kv_scales
from tidemill.compress.layouts import GGUF, WITH_KV_SCALES, layout_class
from tidemill.compress.layouts.gguf import GGUFLayout
from tidemill.compress.layouts.gguf_blocks import block_type, grid_of
from tidemill.compress.methods import method_class
from tidemill.compress.methods.base import Method
from tidemill.compress.mixed import Budget, choose_bits
from tidemill.compress.source import Source
from tidemill.compress.stored import IntWeight, from_state
from tidemill.compress.walk import Change, LayerJob, Quiet, Reporter, walk
from tidemill.compress.work import Work
from tidemill.errors import ConfigError
from tidemill.weights.locate import weight_files

_IDS, _KV = "text", "kv-{:05}"
_SMALLER_GROUPS = (64, 32)
# that are advised where the one that was asked for does not fit
_GROUPS = (128, 96, 64, 48, 32, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeOptions:
    """`options`: of the method, those that are given. `budget`: bits of matrices differ, by how
    much each matters."""

    model: str
    out: Path
    method: str = "gptq"
    options: dict[str, Any] = field(default_factory=dict)
    layout: str | None = None  # None: the method's first
    kind: str | None = None  # a type of GGUF, which decides bits and groups
    dtype: str | None = None  # of what stays floats; None: the model's own, 16 bits
    budget: Budget | None = None
    kv_scales: bool = False  # also of keys and values
    calibration: Calibration = field(default_factory=Calibration)
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Result:
    out: Path
    layout: str
    bytes_before: int
    bytes_after: int
    num_values: int  # of quantized matrices
    num_matrix_bytes: int
    bits_of: dict[str, int]  # of matrices, where they differ
    # columns that share a scale, if the method's default did not fit
    smaller_group: int | None = None

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.num_matrix_bytes / max(self.num_values, 1)


def quantize(options: QuantizeOptions, report: Reporter | None = None) -> Result:
    """Quantizes a model; the finished part of an interrupted run is not done again."""
    report = report or Quiet()
    method = method_class(options.method)(options.options)
    layout = _layout(options, method)
    if options.budget is not None:
        options.budget.check(method)
    source = Source.open(options.model)
    dtype = output_dtype(source, options.dtype or _half(source))
    decoder = Decoder(source, options.device)
    file = GGUFLayout(decoder, dtype) if layout == GGUF else None
    method.has_offsets = file is not None
    if options.kind is not None:
        _take_type(decoder, method, options)
    calibration = options.calibration
    calibration.check()
    needs_text = method.needs_text or options.budget is not None or options.kv_scales
    if calibration.data is not None and not needs_text:
        raise ConfigError(
            f"{method.name} as it is asked for needs no --calibration.",
            fix="Leave it out.",
            param="calibration",
        )
    smaller_group = _fit_group(decoder, method, layout, "group" in options.options)
    work = Work(options.out, _settings(options, method, layout, dtype, source, needs_text))
    with work.begins():
        ids = _text(source, calibration, work, report) if needs_text else None
        if options.budget is not None:
            assert ids is not None
            method.bits_of = choose_bits(decoder, method, ids, options.budget, work, report)
            _check_matrices(decoder, method, layout)
    walked = ids if method.needs_text or options.kv_scales else None
    change = _with_kv_scales(method, work) if options.kv_scales else method
    walk(
        decoder,
        work,
        change,
        walked,
        needs_truth=method.needs_truth,
        seed=calibration.seed,
        report=report,
    )
    if file is not None:
        num_values, num_bytes = file.write(work, report)
    else:
        num_values, num_bytes = _write_folder(decoder, work, layout, dtype, report)
    work.publish()
    return Result(
        options.out,
        layout,
        source.num_bytes,
        size_of(options.out),
        num_values,
        num_bytes,
        method.bits_of,
        smaller_group,
    )


def _with_kv_scales(method: Method, work: Work) -> Change:
    def change(job: LayerJob) -> dict[str, torch.Tensor]:
        kept = method(job)
        work.save(_KV.format(job.number), kv_scales(job))
        return kept

    return change


def _layout(options: QuantizeOptions, method: Method) -> str:
    wants_file = options.kind is not None or (
        options.out.suffix == ".gguf" and GGUF in method.formats
    )
    first = (
        WITH_KV_SCALES
        if options.kv_scales and WITH_KV_SCALES in method.formats
        else method.formats[0]
    )
    layout = options.layout or (GGUF if wants_file else first)
    if options.kv_scales and layout != WITH_KV_SCALES:
        why = f"--format {layout} does not hold scales of keys and values."
        raise ConfigError(
            why,
            fix=f"Choose --format {WITH_KV_SCALES}, or leave --kv-scales out.",
            param="kv-scales",
        )
    if options.kind is not None and layout != GGUF:
        raise ConfigError(
            "--type is a type of GGUF files.",
            fix="Choose --format gguf, or leave it out.",
            param="type",
        )
    if layout not in method.formats:
        fix = f"Choose {', '.join(method.formats)}."
        raise ConfigError(
            f"--format {layout} cannot hold what {method.name} makes.", fix=fix, param="format"
        )
    if (layout == GGUF) != (options.out.suffix == ".gguf"):
        raise ConfigError(
            f"--out is {options.out}, and the format {layout}.",
            fix="A GGUF file's name ends in .gguf.",
            param="out",
        )
    return layout


def _take_type(decoder: Decoder, method: Method, options: QuantizeOptions) -> None:
    """Settles the type of each matrix, by its columns."""
    assert options.kind is not None
    taken = [name for name in ("bits", "group", "weights", "symmetric") if name in options.options]
    if taken or options.budget is not None:
        other = taken[0] if taken else "budget"
        raise ConfigError(
            f"--type {options.kind} decides --{other}.", fix="Give one of them.", param=other
        )
    for number in range(decoder.num_layers):
        for name, module in decoder.linears(number).items():
            method.grids[name] = grid_of(options.kind.upper(), matrix_of(module).shape[1])


def _fit_group(decoder: Decoder, method: Method, layout: str, is_given: bool) -> int | None:
    """Refuses what the layout cannot hold. Groups that were not asked for become smaller, where
    that helps: their size."""
    size = method.options.get("group")
    try:
        _check_matrices(decoder, method, layout)
        return None
    except ConfigError as error:
        for smaller in (
            ()
            if is_given or size is None
            else [size_below for size_below in _SMALLER_GROUPS if size_below < size]
        ):
            method.options["group"] = smaller
            with suppress(ConfigError):
                _check_matrices(decoder, method, layout)
                return smaller
        if size is not None:
            method.options["group"] = size
        raise _with_what_fits(error, decoder, method, layout) from error


def _with_what_fits(
    error: ConfigError, decoder: Decoder, method: Method, layout: str
) -> ConfigError:
    """The same error; where it advises another format, only one that does hold what was asked for,
    or what else fits."""
    advised = re.findall(r"--format ([\w-]+\w)", error.fix)
    if not advised or all(_fits(decoder, method, each) for each in advised):
        return error
    fits = [f"--format {other}" + (" and a file of --out that ends in .gguf" if other == GGUF else "") for other in method.formats
            if other != layout and _fits(decoder, method, other)]  # fmt: skip
    size = method.options.get("group")
    for group in _GROUPS if size is not None and not fits else ():
        method.options["group"] = group
        fits += [f"--group {group}" + ("" if other == layout else f" --format {other}") for other in method.formats
                 if other != GGUF and _fits(decoder, method, other)][:1]  # fmt: skip
    if size is not None:
        method.options["group"] = size
    fix = (
        f"Choose {' or '.join(fits)}."
        if fits
        else "No format holds it: choose other --bits, or another --method."
    )
    return ConfigError(error.message, fix=fix, param=error.param)


def _fits(decoder: Decoder, method: Method, layout: str) -> bool:
    try:
        _check_matrices(decoder, method, layout)
    except ConfigError:
        return False
    return True


def _check_matrices(decoder: Decoder, method: Method, layout: str) -> None:
    """By their shapes, bits and groups."""
    holds: Callable[[str, IntWeight], object] = (
        block_type if layout == GGUF else layout_class(layout)().check
    )
    for number in range(decoder.num_layers):
        for name, module in decoder.linears(number).items():
            num_out, num_in = matrix_of(module).shape
            planned = method.planned(name, (num_out, num_in))
            if planned is not None:
                holds(name, planned)


def _half(source: Source) -> str | None:
    """Floats of a quantized model have 16 bits."""
    stored = source.config.get("dtype") or source.config.get("torch_dtype")
    return None if stored in ("bfloat16", "float16") else "float16"


def _settings(
    options: QuantizeOptions,
    method: Method,
    layout: str,
    dtype: str,
    source: Source,
    needs_text: bool,
) -> dict[str, Any]:
    return {
        "model": str(source.path.resolve()),
        "model_bytes": source.num_bytes,
        "method": method.name,
        "options": method.options,
        "layout": layout,
        "type": options.kind,
        "dtype": dtype,
        "kv_scales": options.kv_scales,
        "budget": None if options.budget is None else options.budget.settings(),
        "text": options.calibration.settings() if needs_text else None,
        "seed": options.calibration.seed,
    }


def _text(source: Source, calibration: Calibration, work: Work, report: Reporter) -> torch.Tensor:
    saved = work.saved(_IDS)
    if saved is None:
        saved = {
            "ids": calibration_ids(
                source.path, source.config["vocab_size"], calibration, work.folder, report
            )
        }
        work.save(_IDS, saved)
    return saved["ids"]


def _write_folder(
    decoder: Decoder, work: Work, name: str, dtype: str, report: Reporter
) -> tuple[int, int]:
    """Writes the folder; returns the number of quantized values, and the bytes they take."""
    layout = layout_class(name)()
    writer = FolderWriter(work.result, dtype)
    num_values = num_bytes = 0
    of_kv: dict[str, torch.Tensor] = {}
    report.stage("Writing", decoder.num_layers)
    for tensor_name, tensor in decoder.read(names_outside(decoder)).items():
        writer.add(tensor_name, tensor)
    for number in range(decoder.num_layers):
        stored, changed = from_state(work.tensors(number))
        for matrix, weight in stored.items():
            for tensor_name, tensor in layout.tensors(matrix, weight).items():
                writer.add(tensor_name, tensor, as_is=True)
            num_values += weight.dequantize().numel()
            num_bytes += weight.num_bytes
        others = {
            name
            for name in decoder.tensor_names(number)
            if name.removesuffix(".weight") not in stored
        } - changed.keys()
        for tensor_name, tensor in sorted({**changed, **decoder.read(others)}.items()):
            writer.add(tensor_name, tensor)
        of_kv = work.saved(_KV.format(number)) or {}
        for tensor_name, tensor in sorted(of_kv.items()):
            writer.add(tensor_name, tensor, as_is=True)
        report.at(number + 1)
    config = layout.config() | ({"kv_cache_scheme": SCHEME} if of_kv else {})
    writer.close(decoder.source, decoder.source.config | {"quantization_config": config})
    return num_values, num_bytes


def size_of(path: Path) -> int:
    """Bytes of a checkpoint's weights."""
    return (
        path.stat().st_size
        if path.is_file()
        else sum(file.stat().st_size for file in weight_files(path))
    )
