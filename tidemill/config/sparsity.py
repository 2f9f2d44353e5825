"""The decision about contextual sparsity."""

from __future__ import annotations

from tidemill.config.options import Decision, EngineOptions


def decide_contextual_sparsity(options: EngineOptions) -> Decision[str | None]:
    """The folder of predictors."""
    if options.contextual_sparsity is None:
        return None, "all neurons and heads are computed"
    why = "given: predictors choose the neurons and heads of each token, so results are not exact"
    return options.contextual_sparsity, why
