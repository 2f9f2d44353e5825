"""Model: what a runner needs of a model, and how any is loaded from a checkpoint. CausalLM: one
that generates text."""

from __future__ import annotations

import copy
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import ClassVar, Self

import numpy as np
import torch
from torch import nn

from tidemill.distributed.cuts import part_config
from tidemill.distributed.world import Stage
from tidemill.errors import CheckpointError, ConfigError
from tidemill.kernels.kv_cache import Angles
from tidemill.kernels.linear import Weight
from tidemill.kernels.moe import ExpertWeights, read_counts
from tidemill.layers.attention import Attention, AttentionStep, EnteringStep
from tidemill.layers.base import Layer, read_values
from tidemill.layers.contextual import ContextualSparsity
from tidemill.layers.embedding import Embedding, Head
from tidemill.layers.linear import Linear
from tidemill.layers.lora import LoraPlace
from tidemill.layers.mlp import GatedMLP
from tidemill.layers.moe import Experts, MoE, Router
from tidemill.layers.norm import RMSNorm
from tidemill.layers.rope import Rope
from tidemill.layers.streamed import Reads, Streaming
from tidemill.models.heads import Labels
from tidemill.models.settings import required
from tidemill.quant import WeightPlan
from tidemill.types.model_config import ModelConfig, Rotation
from tidemill.weights.checkpoint import Checkpoint, RandomTensor, WeightTensor
from tidemill.weights.views import View, cut, joined

_INTEGERS = frozenset({"I64", "BOOL"})  # stored types of what is no weight, like position ids
# computed from the configuration; older files have them
_BUFFERS = (r"(.*\.)?rotary_emb\.inv_freq",)
_TOWER = re.compile(r"(^|\.)(vision|visual|audio|image|multi_modal|mm_projector|language_model)")
_TOWER_FIX = "It is of a model that sees or hears, too: take a checkpoint of its text model, with its text_config as config.json."
ProgressFn = Callable[[str, int, int], None]  # tensor name, bytes done, bytes in all


class Model(nn.Module, ABC):
    """Built on the meta device, then loaded tensor by tensor."""

    # One line per part of a layer: our layer, its part, and the stored tensor's name in each
    # format. {} is the layer's number; in a part, and a second time in names, an expert's.
    # ".weight" or ".bias" is added to names unless they begin with "=". A tensor that several lines
    # name is cut by rows, in their order; or each takes the rows of its `row_order`.
    NAMES: ClassVar[list[tuple[str, str, str, str]]] = []  # (layer, part, Hugging Face, GGUF)
    # how names begin in files of Hugging Face: here like the first
    PREFIXES: ClassVar[tuple[str, ...]] = ("",)
    # stored tensors that are derived and need not be read (patterns)
    IGNORED: ClassVar[tuple[str, ...]] = ()

    blocks: nn.ModuleList

    def __init__(self, config: ModelConfig, weights: WeightPlan) -> None:
        """`weights`: how linears store theirs."""
        super().__init__()
        self.whole, self.weight_plan = config, weights
        # of the part that is here
        self.config = part_config(config, weights.part, weights.expert_parallel)
        self._rotations = [
            rotation
            for rotation in dict.fromkeys(spec.rotation for spec in config.layers)
            if rotation is not None
        ]
        self.ropes = nn.ModuleList(Rope(rotation) for rotation in self._rotations)
        self.labels: Labels | None = None
        self.names = self.NAMES  # a model may add to them, depending on its configuration
        self.ignored = self.IGNORED
        self.streaming: Streaming | None = None  # if not all weights are in memory
        # by layer: the experts' tokens when they were last asked for
        self._taken: dict[int, np.ndarray] = {}

    @classmethod
    @abstractmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig: ...

    @abstractmethod
    def embed_at(
        self, ids_T: torch.Tensor, positions_T: torch.Tensor, types_T: torch.Tensor | None
    ) -> torch.Tensor:
        """The hidden states that the first layer starts from, [T, H]. `types_T`: of the texts of
        pairs; None: all 0."""

    @abstractmethod
    def forward(self, residual_TH: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """From the tokens' embeddings, which are consumed, to hidden states [T, H] after the last
        norm."""

    @property
    def can_enter(self) -> bool:
        """Tells if `enter` and `finish` are there. What they have in common with `forward` has the
        same bits."""
        return False

    def enter(self, residual_TH: torch.Tensor, step: EnteringStep) -> torch.Tensor:
        """`forward` without what only hidden states need: all layers but the last, and of that keys
        and values. Returns what it starts from, [T, H]."""
        raise NotImplementedError

    def finish(self, residual_TH: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """The last layer, for tokens of which `enter` returned these rows: hidden states after the
        last norm."""
        raise NotImplementedError

    def one_layer_of_each_kind(self) -> Self:
        """A part of the model whose forward pass uses every kernel of the whole, at a fraction of
        its time; also if the last layer is not computed."""
        own = [
            layer
            for layer in range(len(self.blocks))
            if not isinstance(self.blocks[layer], nn.Identity)
        ]
        kinds = {
            (self.config.layers[layer], self.config.moe(layer)): layer for layer in reversed(own)
        }
        firsts = sorted(kinds.values())
        return self.only(dict.fromkeys([*firsts, own[-1]] if self.can_enter else firsts))

    def only(self, numbers: Iterable[int]) -> Self:
        """The model with these layers alone, and the last norm. It shares their weights."""
        part, blocks = copy.copy(self), nn.ModuleList(self.blocks[number] for number in numbers)
        part.__dict__["_modules"] = self._modules | {"blocks": blocks}
        return part

    def angles(
        self, num_positions: int, device: torch.device | None = None, longest: int = 0
    ) -> list[Angles | None]:
        """Each layer's cosines and sines; None where nothing is rotated. `longest`: a sequence
        whose cache holds fewer tokens, if that is more than the context."""
        tables: dict[Rotation | None, Angles | None] = {None: None}
        for rotation, rope in zip(self._rotations, self.ropes, strict=True):
            assert isinstance(rope, Rope)
            tables[rotation] = rope.build(num_positions, device, longest)
        return [tables[spec.rotation] for spec in self.config.layers]

    def distance_biases(self, num_positions: int) -> list[torch.Tensor | None]:
        """Each layer's numbers [N, 2 * num_positions - 1] that are added to scores, by the key's
        position less the query's, from 1 - num_positions on."""
        return [None] * len(self.config.token_layers)

    def pool(self, hidden_TH: torch.Tensor, kind: str) -> torch.Tensor:
        """The pooling of some tokens of a sequence, in float64: the sum for a mean, scores, the
        last's or the first's hidden state, or (none) each token's, one after the other."""
        if kind == "score":
            one_SH = hidden_TH[-1:] if self.config.pooler is None else hidden_TH[:1]
            return self.scores(one_SH.contiguous())[0]
        if kind == "none":
            return hidden_TH.double().flatten()
        states = (
            hidden_TH if kind == "mean" else hidden_TH[-1:] if kind == "last" else hidden_TH[:1]
        )
        return states.double().sum(0)

    def scores(self, one_SH: torch.Tensor) -> torch.Tensor:
        """Scores of labels, [S, labels] in float64, from one hidden state of each text or pair."""
        assert self.labels is not None
        return self.labels.scores(one_SH)

    def compile(self, nums_rows: Collection[int]) -> None:
        """Start compiling what `prepare` will run."""
        for weight in self._weights():
            weight.compile(nums_rows)

    def prepare(self, nums_rows: Collection[int]) -> None:
        """Before the first step: matmuls will have these numbers of rows. A head's, an embedding's
        or a router's are not among them."""
        for weight in self._weights():
            weight.prepare(nums_rows)

    def _weights(self) -> Iterator[Weight | ExpertWeights]:
        for module in self.modules():
            if isinstance(module, Experts):
                yield module.weights
            elif isinstance(module, Linear) and not isinstance(
                module, Embedding | Head | Router | Labels
            ):
                yield module.weight

    def lora_places(self) -> dict[str, LoraPlace]:
        """The places that an adapter may change: the stored matrices of linear layers, by their
        Hugging Face names."""
        made = {}
        for name, places in self._targets("hf").items():
            linears = [
                (layer, part)
                for layer, part in places
                if isinstance(layer, Linear)
                and not isinstance(layer, Embedding | Head | Router | Labels)
                and part in layer.outs
            ]
            if linears:
                made[name.removesuffix(".weight")] = self._lora_place(name, linears)
        return made

    def _lora_place(self, name: str, linears: list[tuple[Linear, str]]) -> LoraPlace:
        """The rows of each part are those that loading gives it."""
        stored, begin, parts = self.stored_rows(name), 0, []
        for linear, part in linears:
            num, order = linear.shape_of(part)[0], self.row_order("hf", part)
            if order is None:
                order = torch.arange(begin, begin + num, device="cpu")
            parts.append((linear, part, order if stored is None else stored[order]))
            begin += num
        linear, part = linears[0]
        # each has rows of the whole
        takes_some = len(linears) > 1 and self.row_order("hf", part) is not None
        return LoraPlace(
            (linear.parts[part][0] if takes_some else begin, linear.shape_of(part)[1]), parts
        )

    def stored_rows(self, name: str) -> torch.Tensor | None:
        """The order of the rows of a matrix in Hugging Face's files, by `as_named`; None: as they
        are."""
        return None

    def row_order(self, checkpoint_format: str, part: str) -> torch.Tensor | None:
        """The order that the rows of a stored matrix must have; None: as they are."""
        return None

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        config: ModelConfig,
        weights: WeightPlan,
        progress: ProgressFn | None = None,
        random: bool = False,
        stage: Stage | None = None,
        streaming: Streaming | None = None,
        sparsity: ContextualSparsity | None = None,
    ) -> Self:
        """Stream the checkpoint into a model on the meta device; peak memory stays near the final
        size. `random`: random weights of the right shapes instead of the checkpoint's. `stage`:
        only these layers, and only their tensors are read. `streaming`: for weights that do not fit
        in memory. `sparsity`: which neurons and heads are computed."""
        num_stored = sum(config.stored.values())
        # before layers are made for them
        if not random and config.stored and config.num_parameters > 2 * num_stored + 2**16:
            raise CheckpointError(
                f"{checkpoint.path}: the configuration describes {config.num_parameters} values, the tensors hold {num_stored}."
            )
        with torch.device("meta"):
            model = cls(config, weights)
        if streaming is not None:
            streaming.attach(model.blocks)
        if sparsity is not None:
            sparsity.attach(model.blocks)
        targets, others = model._targets(checkpoint.format), set[str]()
        if stage is not None:
            others = set(targets)
            model.keep(stage)
            targets = model._targets(checkpoint.format)
        if not random:
            targets |= model.stand_ins(targets, {tensor.name for tensor in checkpoint.tensors()})
            model._check_layout(checkpoint, targets, others)
        num_ranks = weights.part.tables.size
        done, total = 0, 0 if random else checkpoint.num_bytes // num_ranks
        with torch.inference_mode():
            stored: Iterable[WeightTensor] = (
                model._random_tensors(targets) if random else checkpoint.tensors()
            )
            for tensor in (
                stored
                if random
                else (model.as_named(tensor, checkpoint.format) for tensor in stored)
            ):
                places = targets.get(tensor.name)
                if places is None:
                    continue
                pieces = cut(tensor, [layer.parts[part] for layer, part in places])
                for (layer, part), piece in zip(places, pieces, strict=True):
                    layer.load(part, piece, model.row_order(checkpoint.format, part))
                done += tensor.num_bytes // num_ranks
                if progress:
                    progress(tensor.name, done, total)
        if weights.device != "cpu":
            with torch.inference_mode():
                model.to(weights.device)  # linears are there already
        model._check_missing(checkpoint, targets, set())
        if sparsity is not None:
            sparsity.finish()
        if streaming is not None:
            streaming.finish(model, model.blocks)
            model.streaming = streaming
        with torch.inference_mode():
            model.loaded(checkpoint.format)
        model._let_norms_quantize()
        return model.eval()

    def _check_layout(
        self, checkpoint: Checkpoint, targets: dict[str, list[tuple[Layer, str]]], others: set[str]
    ) -> None:
        """That all tensors are there and fit, before any is read. `others`: names that belong to
        other stages."""
        ignored, found = (
            [re.compile(pattern) for pattern in (*self.ignored, *_BUFFERS)],
            set[tuple[Layer, str]](),
        )
        for tensor in (self.as_named(tensor, checkpoint.format) for tensor in checkpoint.tensors()):
            places = targets.get(tensor.name)
            if places is None:
                if tensor.name not in others and not any(
                    pattern.fullmatch(tensor.name) for pattern in ignored
                ):
                    self._check_unused(checkpoint, tensor, targets.keys() | others)
                continue
            pieces = cut(tensor, [layer.parts[part] for layer, part in places])
            for (layer, part), piece in zip(places, pieces, strict=True):
                layer.check_shape(part, piece)
                found.add((layer, part))
        self._check_missing(checkpoint, targets, found)

    def _check_unused(
        self, checkpoint: Checkpoint, tensor: WeightTensor, targets: Collection[str]
    ) -> None:
        """A stored tensor without use may be a bias of zeros, which some quantizers write, and
        nothing else."""
        what = f"{checkpoint.path}: tensor {tensor.name} has no place in {checkpoint.architecture}"
        layer = tensor.name.removesuffix(".bias")
        if layer == tensor.name or f"{layer}.weight" not in targets:
            fix = _TOWER_FIX if _TOWER.search(tensor.name) else ""
            raise CheckpointError(f"{what} with {self.whole.num_layers} layers.", fix=fix)
        if read_values(tensor).any():
            keys = [key for key in self.bias_keys if ("mlp" in key) == ("mlp" in layer)]
            key = keys[0] if keys else ""
            fix = f"Set {key} to true in config.json if the model was trained with these biases."
            fix = fix if key else "The family has none there."
            raise CheckpointError(f"{what}: its configuration gives this layer no bias.", fix=fix)

    @property
    def bias_keys(self) -> list[str]:
        """Keys of a configuration that give layers biases."""
        return []

    def _check_missing(
        self,
        checkpoint: Checkpoint,
        targets: dict[str, list[tuple[Layer, str]]],
        found: set[tuple[Layer, str]],
    ) -> None:
        """`found`: parts that are there, but not loaded. Experts may be stored in several ways,
        which only loading settles."""
        stored_as: dict[tuple[Layer, str], str] = {}
        for name, places in targets.items():
            for place in places:
                stored_as.setdefault(place, name)
        for module in self.modules():
            if not isinstance(module, Layer) or (found and isinstance(module, Experts)):
                continue
            missing = sorted(part for part in module.missing if (module, part) not in found)
            if missing:
                name = next(
                    (stored_as[module, part] for part in missing if (module, part) in stored_as),
                    missing[0],
                )
                raise CheckpointError(
                    f"{checkpoint.path}: tensor {name} is missing.",
                    fix="Is it the whole checkpoint?",
                )

    def _let_norms_quantize(self) -> None:
        """A norm writes its result as the one linear behind it takes it."""
        for block in self.blocks:
            for path, reader, behind in (
                ("attn_norm", "attn", "qkv"),
                ("mlp_norm", "mlp", "gate_up"),
            ):
                modules = dict(block.named_modules())
                norm, linear = modules.get(path), modules.get(f"{reader}.{behind}")
                if isinstance(norm, RMSNorm) and isinstance(linear, Linear):
                    norm.handover, owner = linear.weight.handover, modules[reader]
                    if isinstance(owner, Attention | GatedMLP):
                        norm.is_alone = partial(getattr, owner, "reads_input_once")

    def keep(self, stage: Stage) -> None:
        """Drop the layers of other stages. What is computed with those that are left starts from
        hidden states and ends with them."""
        raise ConfigError(
            f"{type(self).__name__} cannot be divided into stages.",
            fix="Leave --pipeline-parallel out.",
        )

    def stand_ins(
        self, targets: dict[str, list[tuple[Layer, str]]], stored: Collection[str]
    ) -> dict[str, list[tuple[Layer, str]]]:
        """Further targets, where a stored tensor stands in for one that is not stored."""
        return {}

    def trial_input(self, positions_T: torch.Tensor) -> torch.Tensor:
        """Something to compute a trial step with."""
        return self.embed_at(positions_T % self.config.vocab_size, positions_T, None)

    @property
    def num_bytes_read(self) -> int:
        """The number of bytes of the checkpoint that this rank has read."""
        return sum(module.num_bytes for module in self.modules() if isinstance(module, Layer))

    def loaded(self, checkpoint_format: str) -> None:
        """All tensors are there: what a format stores differently is settled here."""
        return

    def as_named(self, tensor: WeightTensor, checkpoint_format: str) -> WeightTensor:
        """A stored tensor under the name and in the shape that `NAMES` expects."""
        rows = self.stored_rows(tensor.name)
        return tensor if rows is None else View(tensor, tensor.name, rows=rows)

    def _random_tensors(
        self, targets: dict[str, list[tuple[Layer, str]]]
    ) -> Iterator[RandomTensor]:
        """Stacks of matrices before single ones, which are the same matrices."""
        generated = set()
        for name, places in sorted(
            targets.items(), key=lambda target: -len(target[1][0][0].parts[target[1][0][1]])
        ):
            layer, part = places[0]
            if layer.lacks(part) and places[0] not in generated:
                generated.add(places[0])
                yield RandomTensor(name, joined([layer.parts[part] for layer, part in places]))

    def _targets(self, checkpoint_format: str) -> dict[str, list[tuple[Layer, str]]]:
        """Stored name to the layers and parts it fills."""
        targets: dict[str, list[tuple[Layer, str]]] = {}
        modules = dict(self.named_modules())
        for path, part, hf_name, gguf_name in self.names:
            stored = hf_name if checkpoint_format == "hf" else gguf_name
            if not stored:
                continue
            usual, *others = self.PREFIXES if checkpoint_format == "hf" else ("",)
            for i, layer in _layers_at(path, modules, self.config.num_layers):
                for number in range(getattr(layer, "num_experts", 1)) if "{}" in part else (0,):
                    for suffix, our_part in _stored_parts(stored, part.format(number)):
                        if our_part in layer.parts:
                            name = stored.removeprefix("=").format(i, number) + suffix
                            targets.setdefault(name, []).append((layer, our_part))
                            for prefix in others if name.startswith(usual) else ():
                                targets.setdefault(prefix + name.removeprefix(usual), []).append(
                                    (layer, our_part)
                                )
        return targets

    def take_expert_counts(self) -> dict[int, list[int]]:
        """By layer: how many tokens each expert got since the last call. Empty where that is not
        counted."""
        counted = {
            layer: weights.counts
            for layer, weights in self._experts().items()
            if weights.counts is not None
        }
        now = dict(zip(counted, read_counts(list(counted.values())), strict=True))
        taken = {
            layer: (total - self._taken[layer] if layer in self._taken else total).tolist()
            for layer, total in now.items()
        }
        self._taken = now
        return taken

    def take_weight_reads(self) -> Reads | None:
        """Takes the reads of weights; same as `Streaming.take_reads`. None: all weights are in
        memory."""
        return (
            None
            if self.streaming is None or not self.streaming.streamed_bytes
            else self.streaming.take_reads()
        )

    def see_live(self, live: torch.Tensor) -> None:
        """On a GPU: of a step's tokens the first `live` do not only fill it up. What experts get of
        them is counted."""
        if self.streaming is not None:
            self.streaming.see_live(live)
        for weights in self._experts().values():
            weights.count(live)

    def _experts(self) -> dict[int, ExpertWeights]:
        """The experts of the layers that have them."""
        modules = (
            (layer, module)
            for layer in range(len(self.blocks))
            for module in self.blocks[layer].modules()
        )
        return {
            layer: module.experts.weights for layer, module in modules if isinstance(module, MoE)
        }


def _layers_at(
    path: str, modules: dict[str, nn.Module], num_layers: int
) -> Iterator[tuple[int, Layer]]:
    """The layers that a path means, with their numbers. Not every block has every layer: some are
    dense, some have experts."""
    for i in range(num_layers) if "{}" in path else range(1):
        layer = modules.get(path.format(i), nn.Identity())
        if not isinstance(layer, nn.Identity):  # which is in the place of what another stage has
            assert isinstance(layer, Layer)
            yield i, layer


def _stored_parts(stored: str, part: str) -> tuple[tuple[str, str], ...]:
    """Endings of a stored name, and the part that each is."""
    return (
        (("", part),) if stored.startswith("=") else ((".weight", part), (".bias", f"{part}.bias"))
    )


class CausalLM(Model):
    """A decoder: it has logits of the next token."""

    @abstractmethod
    def embed_tokens(self, ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """The hidden states that the first layer starts from, [T, H]."""

    def embed_at(
        self, ids_T: torch.Tensor, positions_T: torch.Tensor, types_T: torch.Tensor | None
    ) -> torch.Tensor:
        return self.embed_tokens(ids_T, positions_T)

    @abstractmethod
    def logits(self, hidden_TH: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor: ...


def stored_values(checkpoint: Checkpoint) -> dict[str, int]:
    """The number of values of each type in the checkpoint."""
    counts: dict[str, int] = {}
    if not checkpoint.has_weights:
        return counts
    for tensor in checkpoint.tensors():
        if tensor.type_name in _INTEGERS:
            continue
        counts[tensor.type_name] = counts.get(tensor.type_name, 0) + math.prod(tensor.shape)
    return counts


def stored_kv_bits(checkpoint: Checkpoint) -> int:
    """The bits of keys and values, if the folder's quantization was made for so many
    (`kv_cache_scheme`)."""
    settings = checkpoint.metadata.get("quantization_config")
    scheme = settings.get("kv_cache_scheme") if isinstance(settings, dict) else None
    if scheme is None:
        return 0
    source = checkpoint.path / "config.json"
    if not isinstance(scheme, dict):
        raise CheckpointError(f"{source}: kv_cache_scheme is {str(scheme)[:50]!r}, not a table.")
    bits: int = required(scheme, "num_bits", int, source)
    return bits
