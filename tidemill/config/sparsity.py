"""The decision about contextual sparsity."""

from __future__ import annotations

from tidemill.config.options import Decision, EngineOptions
from tidemill.errors import ConfigError
from tidemill.machine import Machine
from tidemill.model_config import ModelConfig


def decide_contextual_sparsity(
    options: EngineOptions, device: str, scheme: str, num_ranks: int, max_loras: int, model: ModelConfig, machine: Machine
) -> Decision[str | None]:
    """The folder of predictors."""
    folder = options.contextual_sparsity
    if folder is None:
        return None, "all neurons and heads are computed"
    wrong = {
        "a GPU": device == "cuda",
        "quantized weights": scheme != "dense",
        "several ranks": num_ranks > 1,
        "weight_memory": options.weight_memory_bytes is not None,
        "adapters": max_loras > 0,
        "an encoder": model.pooler is not None,
        "experts": any(model.experts),
        "a feed-forward without a gate": not model.is_gated,
        "layers without attention": bool(model.has_states),
    }
    fixes = {"quantized weights": "Add --dtype float32.", "a GPU": "Add --device cpu."}
    for what, is_wrong in wrong.items():
        if is_wrong:
            raise ConfigError(
                f"contextual_sparsity cannot be combined with {what}.",
                fix=fixes.get(what, "Leave --contextual-sparsity out."),
                param="contextual_sparsity",
            )
    if not machine.kernels:
        raise ConfigError(
            "contextual_sparsity needs the compiled kernels, which are not there.",
            fix="Install again with a C compiler, or leave --contextual-sparsity out.",
            param="contextual_sparsity",
        )
    return folder, "given: predictors choose the neurons and heads of each token, so results are not exact"
