"""`tidemill prune`: weights, neurons, heads or layers of a model go; what is left is a Hugging Face
folder that serves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tidemill.compress.calibration import Calibration, calibration_ids
from tidemill.compress.decoder import Decoder, matrix_of, set_matrix
from tidemill.compress.folder import FolderWriter, names_outside, output_dtype
from tidemill.compress.layouts import layout_class
from tidemill.compress.lowrank import ENERGY, A, B, choose_ranks, factorize, low_rank_config
from tidemill.compress.methods.inputs import Inputs, collect
from tidemill.compress.prune_methods import (
    METHODS,
    Pattern,
    best_groups,
    fit_columns,
    inverse_factor,
    magnitude,
    sparse_integers,
    sparsegpt,
    wanda,
)
from tidemill.compress.source import Source
from tidemill.compress.stored import from_state
from tidemill.compress.walk import Change, LayerJob, Quiet, Reporter, walk
from tidemill.compress.work import Work
from tidemill.errors import ConfigError

LOW_RANK_METHODS = ("svd", "asvd")
STRUCTURES = ("weights", "neurons", "heads", "layers")
_MLP, _ATTENTION = ("gate_proj", "up_proj", "down_proj"), ("q_proj", "k_proj", "v_proj", "o_proj")
_SCORE = "score"
_OF_LAYERS = ("layer_types", "no_rope_layers")  # lists in configurations, an entry a layer


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneOptions:
    model: str
    out: Path
    method: str = "sparsegpt"
    structure: str = "weights"
    pattern: str = "unstructured"
    sparsity: float = 0.5
    bits: int = 0  # of what is left, quantized jointly; 0: it is not
    merged: bool = False
    damping: float = 0.01
    out_dtype: str | None = None
    device: str = "cpu"
    calibration: Calibration = field(default_factory=Calibration)

    def check(self) -> None:
        for name, value, known in (
            ("method", self.method, (*METHODS, *LOW_RANK_METHODS)),
            ("structure", self.structure, STRUCTURES),
        ):
            if value not in known:
                raise ConfigError(
                    f"--{name} {value} is not known.",
                    fix=f"Give one of {', '.join(known)}.",
                    param=name,
                )
        pattern = Pattern.read(self.pattern)
        if pattern != Pattern() and self.structure != "weights":
            raise ConfigError(
                f"--pattern {self.pattern} is of weights, not of {self.structure}.", param="pattern"
            )
        if self.is_low_rank and (self.structure != "weights" or pattern != Pattern()):
            raise ConfigError(
                f"--method {self.method} has no --structure and no --pattern.", param="method"
            )
        if self.merged and not self.is_low_rank:
            raise ConfigError("--merged is of svd and asvd.", param="merged")
        if self.bits not in (0, 4, 8):
            raise ConfigError(f"--bits is {self.bits}.", fix="It must be 8, 4 or 0.", param="bits")
        if self.bits and (self.method != "sparsegpt" or self.structure != "weights"):
            raise ConfigError(
                "--bits is of sparsegpt's weights.",
                fix="Use tidemill quantize on what is left.",
                param="bits",
            )
        if not 0 < self.sparsity < 1:
            raise ConfigError(
                f"--sparsity is {self.sparsity}.",
                fix="It must be between 0 and 1.",
                param="sparsity",
            )
        if not 0 < self.damping <= 10:
            raise ConfigError(
                f"--damping is {self.damping}.",
                fix="It must be above 0 and at most 10.",
                param="damping",
            )
        self.calibration.check()

    @property
    def needs_text(self) -> bool:
        return self.method not in ("magnitude", "svd")

    @property
    def is_low_rank(self) -> bool:
        return self.method in LOW_RANK_METHODS

    def settings(self) -> dict[str, Any]:
        """The settings that the result depends on."""
        own = {
            name: value
            for name, value in asdict(self).items()
            if name not in ("out", "calibration", "device")
        }
        return own | (self.calibration.settings() if self.needs_text else {})


def prune(options: PruneOptions, report: Reporter | None = None) -> dict[str, Any]:
    """Writes the folder. What was done, in numbers."""
    options.check()
    report = report or Quiet()
    source = Source.open(options.model)
    output_dtype(source, options.out_dtype)  # checked before the work
    decoder = Decoder(source, options.device)
    change = _change(options, decoder)
    work = Work(options.out, options.settings())
    with work.begins():
        ids = (
            calibration_tokens(source, decoder, options.calibration, work, report)
            if options.needs_text
            else None
        )
    walk(decoder, work, change, ids, seed=options.calibration.seed, report=report)
    result = (
        _low_rank(options, decoder, work)
        if options.is_low_rank
        else _result(options, decoder, work)
    )
    counts = _write(decoder, work, result, output_dtype(source, options.out_dtype))
    work.publish()
    return counts


@dataclass(slots=True)
class _Result:
    """The layers that are left, what they store, and the configuration."""

    layers: list[int]
    config: dict[str, Any]
    # of a layer: those that differ from the source's
    tensors: Callable[[int], dict[str, torch.Tensor]]
    gone: frozenset[str] = frozenset()  # stored tensors that others take the place of


def _write(decoder: Decoder, work: Work, result: _Result, dtype: str) -> dict[str, Any]:
    writer, layout = FolderWriter(work.result, dtype), layout_class("compressed-tensors")()
    num_zero = num_values = 0
    for name, tensor in decoder.read(names_outside(decoder)).items():
        writer.add(name, tensor)
    for place, number in enumerate(result.layers):
        old, new = (decoder.name_of(decoder.layers[i]) for i in (number, place))
        stored, changed = from_state(result.tensors(number))
        gone = {*changed, *result.gone, *(f"{name}.weight" for name in stored)}
        tensors = changed | decoder.read(
            [name for name in decoder.tensor_names(number) if name not in gone]
        )
        for name, tensor in sorted(tensors.items()):
            writer.add(new + name.removeprefix(old), tensor)
        for name, weight in stored.items():
            for part, tensor in layout.tensors(name, weight).items():
                writer.add(part, tensor, as_is=True)
        matrices = [
            *(tensor for tensor in tensors.values() if tensor.dim() == 2),
            *(tensor.dequantize() for tensor in stored.values()),
        ]
        num_zero += sum(int((matrix == 0).sum()) for matrix in matrices)
        num_values += sum(matrix.numel() for matrix in matrices)
        is_quantized = bool(stored)
    writer.close(
        decoder.source,
        result.config | ({"quantization_config": layout.config()} if is_quantized else {}),
    )
    return {
        "layers": len(result.layers),
        "zeros": num_zero,
        "values": num_values,
        "bytes": writer.total_bytes,
    }


def _change(options: PruneOptions, decoder: Decoder) -> Change:
    return (
        factorize(options.method, options.damping)
        if options.is_low_rank
        else _CHANGES[options.structure](options, decoder)
    )


def _low_rank(options: PruneOptions, decoder: Decoder, work: Work) -> _Result:
    layers = list(range(decoder.num_layers))
    shapes = {
        name: (matrix_of(module).shape[0], matrix_of(module).shape[1])
        for number in layers
        for name, module in decoder.linears(number).items()
    }
    energies: dict[str, torch.Tensor] = {}
    for number in layers:
        kept = work.tensors(number)
        energies |= {name: kept[f"{name}.{ENERGY}"] for name in decoder.linears(number)}
    ranks = choose_ranks(energies, shapes, 1 - options.sparsity)

    def tensors(number: int) -> dict[str, torch.Tensor]:
        kept = work.tensors(number)
        factors: dict[str, torch.Tensor] = {}
        for name, module in decoder.linears(number).items():
            if not ranks[name]:
                continue
            b, a = kept[f"{name}.{B}"][:, : ranks[name]], kept[f"{name}.{A}"][: ranks[name]]
            if not options.merged:
                factors |= {f"{name}.{B}": b, f"{name}.{A}": a}
            else:
                factors[f"{name}.weight"] = b @ a if isinstance(module, nn.Linear) else (b @ a).t()
        return factors

    if options.merged:
        return _Result(layers, decoder.source.config, tensors)
    gone = frozenset(f"{name}.weight" for name, rank in ranks.items() if rank)
    return _Result(layers, decoder.source.config | low_rank_config(ranks), tensors, gone)


def calibration_tokens(
    source: Source, decoder: Decoder, calibration: Calibration, work: Work, report: Reporter
) -> torch.Tensor:
    """The text's tokens, kept so that a run that goes on has the same."""
    kept = work.saved("text")
    if kept is None:
        ids = calibration_ids(
            source.path, decoder.model.config.vocab_size, calibration, work.folder, report
        )
        kept = {"ids": ids}
        work.save("text", kept)
    return kept["ids"]


def _weights(options: PruneOptions, decoder: Decoder) -> Change:
    pattern = Pattern.read(options.pattern)
    for name, module in decoder.linears(0).items():
        num_out, num_in = matrix_of(module).shape
        pattern.check(name, (num_out, num_in))

    def change(job: LayerJob) -> dict[str, torch.Tensor]:
        found = collect(job, moments=options.method == "sparsegpt") if options.needs_text else {}
        inverses: dict[int, Any] = {}  # several matrices have the same inputs
        kept: dict[str, torch.Tensor] = {}
        for name, module in job.linears.items():
            weight = matrix_of(module)
            if options.method == "magnitude":
                pruned = magnitude(weight, pattern, options.sparsity)
            elif options.method == "wanda":
                pruned = wanda(weight, found[name].squares_K, pattern, options.sparsity)
            else:
                moments = found[name].moments_KK
                assert moments is not None
                if id(moments) not in inverses:
                    inverses[id(moments)] = inverse_factor(moments, options.damping)
                if options.bits:
                    stored = sparse_integers(
                        weight, inverses[id(moments)], pattern, options.sparsity, options.bits
                    )
                    set_matrix(module, stored.dequantize())
                    kept |= stored.to_state(name)
                    continue
                pruned = sparsegpt(weight, inverses[id(moments)], pattern, options.sparsity)
            set_matrix(module, pruned)
            kept[f"{name}.weight"] = module.weight.detach()  # type: ignore[union-attr, operator]
        return kept

    return change


# ---- structured


def _find(job: LayerJob, wanted: tuple[str, ...], structure: str) -> list[tuple[str, nn.Linear]]:
    """The layer's matrices that end in these names."""
    found = []
    for suffix in wanted:
        some = [
            (name, module)
            for name, module in job.linears.items()
            if name.rpartition(".")[2] == suffix
        ]
        if len(some) != 1 or not isinstance(some[0][1], nn.Linear):
            raise ConfigError(
                f"Layer {job.number} has {len(some)} matrices {suffix}; --structure {structure} needs one.",
                fix="Prune weights or layers of this model.",
                param="structure",
            )
        found.append((some[0][0], some[0][1]))
    return found


def _cut_rows(
    name: str, module: nn.Linear, rows: torch.Tensor, kept: dict[str, torch.Tensor]
) -> None:
    _replace(name, module, module.weight.detach()[rows], kept)
    if module.bias is not None:
        module.bias = nn.Parameter(module.bias.detach()[rows], requires_grad=False)
        kept[f"{name}.bias"] = module.bias


def _replace(
    name: str, module: nn.Linear, matrix: torch.Tensor, kept: dict[str, torch.Tensor]
) -> None:
    module.weight = nn.Parameter(matrix.contiguous(), requires_grad=False)
    module.out_features, module.in_features = matrix.shape
    kept[f"{name}.weight"] = module.weight


def _inputs(options: PruneOptions, job: LayerJob, name: str) -> Inputs | None:
    return collect(job, moments=options.method == "sparsegpt")[name] if options.needs_text else None


def _num_kept(num: int, sparsity: float) -> int:
    return max(1, num - round(num * sparsity))


def _scores(weight_NK: torch.Tensor, inputs: Inputs | None) -> torch.Tensor:
    """The score of each input of a matrix."""
    lengths = weight_NK.square().sum(0)
    return lengths if inputs is None else lengths * inputs.squares_K


def _keep_inputs(
    options: PruneOptions, module: nn.Linear, kept_K: torch.Tensor, inputs: Inputs | None
) -> torch.Tensor:
    if inputs is not None and inputs.moments_KK is not None:
        return fit_columns(matrix_of(module), inputs.moments_KK, kept_K, options.damping)
    return matrix_of(module)[:, kept_K]


def _neurons(options: PruneOptions, decoder: Decoder) -> Change:
    del decoder

    def change(job: LayerJob) -> dict[str, torch.Tensor]:
        (gate_name, gate), (up_name, up), (down_name, down) = _find(job, _MLP, "neurons")
        inputs = _inputs(options, job, down_name)
        scores = _scores(matrix_of(down), inputs)
        if inputs is None:
            scores = scores * gate.weight.square().sum(1) * up.weight.square().sum(1)
        rows = best_groups(scores, 1, _num_kept(len(scores), options.sparsity))
        kept: dict[str, torch.Tensor] = {}
        _replace(down_name, down, _keep_inputs(options, down, rows, inputs), kept)
        _cut_rows(gate_name, gate, rows, kept)
        _cut_rows(up_name, up, rows, kept)
        return kept

    return change


def _heads(options: PruneOptions, decoder: Decoder) -> Change:
    config = decoder.model.config
    num_heads, num_kv = (
        config.num_attention_heads,
        getattr(config, "num_key_value_heads", config.num_attention_heads),
    )
    per_group = num_heads // num_kv
    num_kept = _num_kept(num_kv, options.sparsity)

    def change(job: LayerJob) -> dict[str, torch.Tensor]:
        (q_name, q), (k_name, k), (v_name, v), (o_name, o) = _find(job, _ATTENTION, "heads")
        dim = q.out_features // num_heads
        norms = [
            norm
            for name, norm in job.layer.named_parameters()
            if name.endswith(("q_norm.weight", "k_norm.weight"))
        ]
        if any(norm.numel() != dim for norm in norms):
            raise ConfigError(
                "The norms of this model go over all heads, so that none can go.", param="structure"
            )
        inputs = _inputs(options, job, o_name)
        columns = best_groups(_scores(matrix_of(o), inputs), per_group * dim, num_kept)
        groups = columns.view(num_kept, -1)[:, 0] // (per_group * dim)
        rows = (groups.unsqueeze(1) * dim + torch.arange(dim, device=groups.device)).flatten()
        kept: dict[str, torch.Tensor] = {}
        _replace(o_name, o, _keep_inputs(options, o, columns, inputs), kept)
        _cut_rows(q_name, q, columns, kept)
        _cut_rows(k_name, k, rows, kept)
        _cut_rows(v_name, v, rows, kept)
        return kept

    return change


def _layers(options: PruneOptions, decoder: Decoder) -> Change:
    """The change that each layer makes to hidden states: 1 - the cosine of what comes and what
    goes. By magnitude: its weights."""
    if decoder.num_layers < 2:
        raise ConfigError("A model of one layer has none that can go.", param="structure")

    @torch.no_grad()
    def change(job: LayerJob) -> dict[str, torch.Tensor]:
        if not options.needs_text:
            return {
                _SCORE: sum(
                    (matrix_of(linear).square().sum() for linear in job.linears.values()),
                    torch.zeros(()),
                )
            }
        total, count = 0.0, 0
        for batch in job.batches():
            cosines = nn.functional.cosine_similarity(batch, job.run(batch), dim=-1)
            total, count = total + (1 - cosines).double().sum().item(), count + cosines.numel()
        return {_SCORE: torch.tensor(total / count)}

    return change


_CHANGES: dict[str, Callable[[PruneOptions, Decoder], Change]] = {
    "weights": _weights,
    "neurons": _neurons,
    "heads": _heads,
    "layers": _layers,
}


def _result(options: PruneOptions, decoder: Decoder, work: Work) -> _Result:
    source, everything = decoder.source, list(range(decoder.num_layers))
    if options.structure == "weights":
        return _Result(everything, source.config, work.tensors)
    if options.structure == "layers":
        scores = torch.stack([work.tensors(number)[_SCORE] for number in everything])
        num = _num_kept(len(everything), options.sparsity)
        chosen = scores.argsort(descending=True, stable=True)[:num].sort().values.tolist()
        return _Result(chosen, with_layers(source.config, chosen), lambda _: {})
    matrices = {name: tensor for name, tensor in work.tensors(0).items() if tensor.dim() == 2}
    shapes = {name.split(".")[-2]: tensor.shape for name, tensor in matrices.items()}
    if options.structure == "neurons":
        return _Result(
            everything, source.config | {"intermediate_size": shapes["down_proj"][1]}, work.tensors
        )
    config = decoder.model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = {
        "num_attention_heads": shapes["q_proj"][0] // dim,
        "num_key_value_heads": shapes["k_proj"][0] // dim,
    }
    return _Result(everything, source.config | heads | {"head_dim": dim}, work.tensors)


def with_layers(config: dict[str, Any], chosen: list[int]) -> dict[str, Any]:
    """A configuration with these layers of it."""
    lists = {
        name: [config[name][i] for i in chosen]
        for name in _OF_LAYERS
        if isinstance(config.get(name), list)
    }
    return config | lists | {"num_hidden_layers": len(chosen)}
