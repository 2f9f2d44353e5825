"""A Transformers model walked one decoder layer at a time: only the layer at hand, the embeddings
and the head have weights."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tidemill.compress.source import Source
from tidemill.errors import CheckpointError, ConfigError

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
LAYERS = ("layers", "h", "blocks")  # what families call their list of decoder layers


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of a decoder layer besides hidden states: masks and rotations of a sequence of
    one length."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Decoder:
    """`layer(i)` fills layer i; `embed`, `calls` and `logits` are the model's own code around the
    layers."""

    def __init__(self, source: Source, device: str = "cpu") -> None:
        _refuse_experts(source.config)
        self.source, self.device = source, compute_device(device)
        self.model = without_weights(source.config)
        self.layers = _decoder_layers(self.model)
        self._names = {module: name for name, module in self.model.named_modules()}
        self._calls: dict[int, list[Call]] = {}
        inside = {module for layer in self.layers for module in layer.modules()}
        for module in list(self.model.modules()):
            if module not in inside and not any(child in inside for child in module.modules()):
                self._fill(module, recurse=False)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def takes_batches(self) -> bool:
        """Tells if `calls` hold for several sequences: Bloom's biases of positions are made for
        each."""
        return bool(self.model.config.model_type != "bloom")

    def name_of(self, module: nn.Module) -> str:
        """The name of a module in the form of stored names."""
        return self._names[module]

    def linears(self, layer: int) -> dict[str, nn.Module]:
        """The matrices of a layer by name: those that quantization, pruning and the like change."""
        return {
            self._names[module]: module
            for module in self.layers[layer].modules()
            if is_linear(module)
        }

    def tensor_names(self, layer: int) -> list[str]:
        """The names of the layer's stored tensors."""
        prefix = self._names[self.layers[layer]]
        return [f"{prefix}.{name}" for name in self.layers[layer].state_dict()]

    def read(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Tensors by the model's own names, whatever the checkpoint calls them."""
        stored = {name: self.stored_name(name) for name in names}
        found = self.source.read(set(stored.values())) if stored else {}
        return {name: found[own] for name, own in stored.items()}

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self.source.shapes[self.stored_name(name)]

    @contextmanager
    def layer(
        self, number: int, changed: dict[str, torch.Tensor] | None = None
    ) -> Iterator[nn.Module]:
        """The layer with its weights, which are forgotten afterwards. `changed`: tensors to take
        instead of stored ones."""
        module = self.layers[number]
        self._fill(module, changed=changed or {})
        try:
            yield module
        finally:
            module.to("meta")

    def run(self, number: int, hidden_BLH: torch.Tensor) -> torch.Tensor:
        """Layer `number`, which is filled, on hidden states."""
        call = self.calls(hidden_BLH.shape[1])[number]
        out = self.layers[number](hidden_BLH.to(self.device), *call.args, **call.kwargs)
        return out[0] if isinstance(out, tuple) else out

    @torch.no_grad()
    def embed(self, ids_BL: torch.Tensor) -> torch.Tensor:
        """The hidden states that the first layer starts from."""
        found: list[torch.Tensor] = []

        def see(number: int, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if number == 0:
                found.append(hidden)
            return hidden

        with self._instead_of_layers(see):
            self.model.base_model(input_ids=ids_BL.to(self.device), use_cache=False)
        return found[0]

    @torch.no_grad()
    def calls(self, length: int) -> list[Call]:
        """The arguments of sequences of this length, by layer."""
        if length not in self._calls:
            calls: list[Call] = []

            def see(number: int, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
                calls.append(Call(args, kwargs))
                return hidden

            with self._instead_of_layers(see):
                self.model.base_model(
                    input_ids=torch.zeros(1, length, dtype=torch.int64, device=self.device),
                    use_cache=False,
                )
            self._calls = {length: calls}  # one length at a time: masks are large
        return self._calls[length]

    def logits(self, hidden_BLH: torch.Tensor) -> torch.Tensor:
        """From what the last layer gave. Differentiable."""
        hidden = hidden_BLH.to(self.device)
        with self._instead_of_layers(lambda number, *_, **__: hidden):
            ids = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=self.device)
            return self.model(input_ids=ids, use_cache=False).logits

    @contextmanager
    def _instead_of_layers(self, see: Callable[..., torch.Tensor]) -> Iterator[None]:
        """Meanwhile the model's layers are this function of their number and arguments."""

        def forward(number: int) -> Callable[..., Any]:
            # its layers give attention weights, too
            is_pair = self.model.config.model_type == "bloom"
            return lambda *args, **kwargs: (
                (see(number, *args, **kwargs), None) if is_pair else see(number, *args, **kwargs)
            )

        for number, layer in enumerate(self.layers):
            layer.forward = forward(number)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for layer in self.layers:
                del layer.forward

    def _fill(
        self,
        module: nn.Module,
        recurse: bool = True,
        changed: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Give the module its parameters and buffers, from the source."""
        prefix = self._names[module]
        own = module.state_dict() if recurse else dict(module.named_parameters(recurse=False))
        wanted = {name: f"{prefix}.{name}" if prefix else name for name in own}
        changed = changed or {}
        read = self.read([full for full in wanted.values() if full not in changed])
        filled = {}
        for name, full in wanted.items():
            value = changed[full] if full in changed else read[full]
            if value.shape != own[name].shape:
                raise CheckpointError(
                    f"Tensor {full} has shape {list(value.shape)}, not {list(own[name].shape)}."
                )
            filled[name] = value.to(self.device, torch.float32)
        module.load_state_dict(filled, strict=recurse, assign=True)
        module.to(self.device)  # buffers that are not stored
        module.requires_grad_(False)

    def stored_name(self, name: str) -> str:
        """The name in the checkpoint: some files leave out the name of the base model, and a tied
        head is the embedding."""
        prefix = self.model.base_model_prefix + "."
        for candidate in (name, name.removeprefix(prefix), prefix + name):
            if candidate in self.source.shapes:
                return candidate
        if (
            self.model.get_output_embeddings() is not None
            and name == self._names[self.model.get_output_embeddings()] + ".weight"
        ):
            table = self._names[self.model.get_input_embeddings()] + ".weight"
            if table != name:
                return self.stored_name(table)
        raise CheckpointError(
            f"{self.source.path}: tensor {name} is missing.", fix="Is it the whole checkpoint?"
        )


def compute_device(name: str) -> torch.device:
    """The device of --device: one that is there."""
    if not re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", name):
        raise ConfigError(f"--device is {name}.", fix="It must be cpu or cuda.", param="device")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"There is no device {name}.", fix="Give --device cpu.", param="device")
    return device


def _refuse_experts(config: dict[str, Any]) -> None:
    """Their matrices are stored in ways of their own."""
    text = config.get("text_config")
    for settings in (config, text if isinstance(text, dict) else {}):
        if any(isinstance(num := settings.get(key), int) and num > 0 for key in _EXPERTS):
            raise ConfigError(
                "The model has experts, which quantize, prune, distill and convert do not support yet.",
                fix="Give a dense model.",
            )


def is_linear(module: nn.Module) -> bool:
    """A matrix: Linear, or GPT-2's, which is stored transposed."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def matrix_of(module: nn.Module) -> torch.Tensor:
    """[out, in]"""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight.detach() if isinstance(module, nn.Linear) else weight.detach().t()


def set_matrix(module: nn.Module, matrix_NK: torch.Tensor) -> None:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    weight.data.copy_(matrix_NK if isinstance(module, nn.Linear) else matrix_NK.t())


def without_weights(config: dict[str, Any]) -> Any:
    try:
        from accelerate import init_empty_weights
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        what = f"Compression runs models by Transformers, which is not installed ({error.name})."
        fix = f"Run: {sys.executable} -m pip install 'tidemill[compress]'. `make serve` does not install it; `make test` does."
        raise ConfigError(what, fix=fix) from error
    settings = {
        key: value
        for key, value in config.items()
        if key not in ("quantization_config", "torch_dtype", "dtype")
    }
    kind = settings.pop("model_type", None)
    try:
        made = AutoConfig.for_model(kind, **settings)
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"Transformers cannot build this model ({kind}): {error}.") from error
    return model.eval()


def _decoder_layers(model: Any) -> nn.ModuleList:
    for name in LAYERS:
        if isinstance(layers := getattr(model.base_model, name, None), nn.ModuleList):
            return layers
    raise CheckpointError(
        f"A {model.config.model_type} has no list of decoder layers, which compression walks through."
    )
