"""Students: models by Transformers that learn from the one they were made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tidemill.compress.decoder import Decoder, without_weights
from tidemill.compress.draft.run import Stopped
from tidemill.compress.draft.steps import Schedule, run_steps
from tidemill.compress.folder import FolderWriter
from tidemill.compress.walk import Reporter
from tidemill.compress.work import Work
from tidemill.errors import CalibrationError, CheckpointError, ConfigError

LOSSES = ("soft", "ted", "hard")
_FILTER_RATE = 1e-3
_DISTANCE = 1.0  # the weight of the distance between filtered states, beside that of distributions


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """The settings of a student's learning. `steps` 0: not at all."""

    loss: str = "soft"
    steps: int = 200
    batch: int = 4  # sequences of a step
    rate: float = 5e-4
    temperature: float = 1.0  # of both distributions
    seed: int = 0

    def check(self) -> None:
        if self.loss not in LOSSES:
            raise ConfigError(
                f"--loss {self.loss} is not known.",
                fix=f"Give one of {', '.join(LOSSES)}.",
                param="loss",
            )
        limits = {
            "steps": (0, 10**7),
            "batch": (1, 4096),
            "rate": (1e-8, 1.0),
            "temperature": (0.05, 100.0),
        }
        for name, (low, high) in limits.items():
            if not low <= getattr(self, name) <= high:
                raise ConfigError(
                    f"--{name} is {getattr(self, name)}.",
                    fix=f"It must be {low} to {high}.",
                    param=name,
                )


def layer_tensors(decoder: Decoder, chosen: list[int]) -> dict[str, torch.Tensor]:
    """The stored tensors of a model with these layers, which are numbered anew."""
    tensors: dict[str, torch.Tensor] = {}
    for place, number in enumerate(chosen):
        old, new = (decoder.name_of(decoder.layers[i]) for i in (number, place))
        read = decoder.read(decoder.tensor_names(number))
        tensors |= {new + name.removeprefix(old): value for name, value in read.items()}
    return tensors


def build(config: dict[str, Any], tensors: dict[str, torch.Tensor], device: str) -> Any:
    """A model with these weights, in float32."""
    model = without_weights(config)
    unknown = model.load_state_dict(tensors, strict=False, assign=True).unexpected_keys
    model.tie_weights()
    missing = [name for name, value in model.state_dict().items() if value.is_meta]
    if missing or unknown:
        raise CheckpointError(
            f"Tensors do not fit the configuration: {', '.join([*missing, *unknown][:3])}."
        )
    return model.to(device).requires_grad_(False)


def learn(
    student: Any, teacher: Any, chosen: list[int], ids_SL: torch.Tensor, learning: Learning, work: Work, report: Reporter,
    is_stopped: Callable[[], bool],
) -> None:  # fmt: skip
    """Changes the student. `chosen`: the teacher's layer that each of the student's began as.
    Embeddings and head stay."""
    learning.check()
    if learning.steps == 0:
        return
    frozen = {
        id(parameter)
        for part in (student.get_input_embeddings(), student.get_output_embeddings())
        for parameter in part.parameters()
    }
    for value in student.parameters():
        value.requires_grad_(id(value) not in frozen)
    module = nn.ModuleDict({"student": student})
    loss: Callable[[torch.Tensor], torch.Tensor]
    if learning.loss == "ted":
        filters = _teacher_filters(teacher, chosen, ids_SL, learning, work, report, is_stopped)
        module["filters"] = filters
        loss = _Ted(
            student,
            teacher,
            chosen,
            [parameter.detach().clone() for parameter in filters.parameters()],
            filters,
            learning,
        )
    else:
        loss = _Plain(student, teacher, learning)
    report.stage("Training the student", learning.steps)
    _train(
        module,
        lambda step: loss(_batch(ids_SL, learning, step)),
        learning.steps,
        learning.rate,
        learning,
        work,
        "student",
        report,
        is_stopped,
    )
    student.requires_grad_(False)


def _train(
    module: nn.Module, loss: Callable[[int], torch.Tensor], steps: int, rate: float, learning: Learning, work: Work, name: str,
    report: Reporter, is_stopped: Callable[[], bool],
) -> None:  # fmt: skip
    def checked(step: int) -> torch.Tensor:
        loss_value = loss(step)
        if not bool(loss_value.isfinite()):
            raise CalibrationError(
                f"The loss of step {step} is not finite.",
                fix="Give a lower --rate, or look at the text.",
            )
        return loss_value

    schedule = Schedule(
        steps, rate, asdict(learning) | {"part": name}, work.folder / f"{name}.train.safetensors"
    )
    if not run_steps(
        module,
        checked,
        schedule,
        lambda done, loss: report.at(done, f"loss {loss:.3f}"),
        is_stopped,
    ):
        raise Stopped


def _batch(ids_SL: torch.Tensor, learning: Learning, step: int) -> torch.Tensor:
    """Every epoch has an order of its own."""
    num = ids_SL.shape[0]
    per_epoch = max(1, num // learning.batch)
    epoch, number = divmod(step, per_epoch)
    order = torch.randperm(
        num, generator=torch.Generator().manual_seed(learning.seed * 1_000_003 + epoch)
    )
    return ids_SL[order[number * learning.batch : (number + 1) * learning.batch]]


def distribution_loss(logits: torch.Tensor, true: torch.Tensor, temperature: float) -> torch.Tensor:
    """KL(true || own) of both at a temperature, in the scale of the gradients at 1."""
    own, wanted = (x.flatten(0, -2) / temperature for x in (logits, true))
    return (
        F.kl_div(
            own.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="batchmean"
        )
        * temperature**2
    )


@dataclass(slots=True)
class _Plain:
    student: Any
    teacher: Any
    how: Learning

    def __call__(self, ids_BL: torch.Tensor) -> torch.Tensor:
        ids_BL = ids_BL.to(self.student.device)
        logits = self.student(input_ids=ids_BL, use_cache=False).logits
        if self.how.loss == "hard":
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids_BL[:, 1:].flatten())
        with torch.no_grad():
            true = self.teacher(input_ids=ids_BL, use_cache=False).logits
        return distribution_loss(logits, true, self.how.temperature)


class _Filter(nn.Module):
    """The filter of a layer's states for what matters for the next token: at first all of it."""

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(size, device=device))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states @ self.weight.t()


def _teacher_filters(
    teacher: Any, chosen: list[int], ids_SL: torch.Tensor, learning: Learning, work: Work, report: Reporter,
    is_stopped: Callable[[], bool],
) -> nn.ModuleList:  # fmt: skip
    """A filter for each chosen layer, so that norm and head make of its filtered states what they
    make of the last ones. A step trains one of them."""
    size = teacher.config.hidden_size
    filters = nn.ModuleList(_Filter(size, teacher.device) for _ in chosen)

    def loss(step: int) -> torch.Tensor:
        number = step % len(chosen)
        with torch.no_grad():
            output = teacher(
                input_ids=_batch(ids_SL, learning, step).to(teacher.device),
                use_cache=False,
                output_hidden_states=True,
            )
        states = filters[number](output.hidden_states[chosen[number] + 1])
        return distribution_loss(_to_logits(teacher, states), output.logits, learning.temperature)

    steps = max(len(chosen), learning.steps // 2)
    report.stage("Training filters", steps)
    _train(filters, loss, steps, _FILTER_RATE, learning, work, "filters", report, is_stopped)
    return filters


def _to_logits(model: Any, states: torch.Tensor) -> torch.Tensor:
    norm = getattr(model.base_model, "norm", None) or getattr(model.base_model, "ln_f", None)
    return model.get_output_embeddings()(states if norm is None else norm(states))


@dataclass(slots=True)
class _Ted:
    """Soft labels, and the distance of filtered states, layer by layer (task-aware layerwise
    distillation)."""

    student: Any
    teacher: Any
    chosen: list[int]
    true_filters: list[torch.Tensor]
    filters: nn.ModuleList
    how: Learning

    def __call__(self, ids_BL: torch.Tensor) -> torch.Tensor:
        arguments: dict[str, Any] = {
            "input_ids": ids_BL.to(self.student.device),
            "use_cache": False,
            "output_hidden_states": True,
        }
        made = self.student(**arguments)
        with torch.no_grad():
            true = self.teacher(**arguments)
        distance = torch.zeros((), device=made.logits.device)
        for number, (layer, weight) in enumerate(zip(self.chosen, self.true_filters, strict=True)):
            if number + 1 == len(self.chosen):
                break  # the last states are those that logits are made of
            wanted = true.hidden_states[layer + 1] @ weight.t()
            own = self.filters[number](made.hidden_states[number + 1])
            distance = distance + F.mse_loss(own, wanted) / wanted.square().mean()
        loss = distribution_loss(made.logits, true.logits, self.how.temperature)
        return loss + _DISTANCE * distance / max(1, len(self.chosen) - 1)


def write_student(
    student: Any, decoder: Decoder, config: dict[str, Any], work: Work, dtype: str
) -> int:
    """The folder gets its name. Returns its tensors' bytes."""
    writer = FolderWriter(work.result, dtype)
    head = student.get_output_embeddings()
    is_tied = head is not None and head.weight is student.get_input_embeddings().weight
    for name, value in student.state_dict().items():
        if not (
            is_tied and value.data_ptr() == head.weight.data_ptr() and name.startswith("lm_head")
        ):
            writer.add(name, value)
    writer.close(decoder.source, config)
    work.publish()
    return writer.total_bytes
