"""Decisions about drafts of tokens to come."""

from __future__ import annotations

from collections.abc import Collection

from tidemill.capabilities import HEADS, why_not
from tidemill.config.choices import ACCEPTANCE, SPECULATE
from tidemill.config.options import Decision, EngineOptions, one_of
from tidemill.errors import ConfigError


def decide_speculate(
    options: EngineOptions, features: Collection[str]
) -> Decision[tuple[str, ...]]:
    names = SPECULATE[one_of("speculate", options.speculate, SPECULATE)]
    why = "drafts are verified where that saves time" if options.speculate == "auto" else "given"
    if options.draft_model is not None and options.speculate == "auto":
        names, why = SPECULATE["draft-model"], "a draft model was given"
    refusal = why_not("speculation", features)
    return ((), refusal.why) if refusal else (names, why)


def decide_max_drafts(
    options: EngineOptions, device: str, speculate: tuple[str, ...]
) -> Decision[int]:
    if not speculate:
        return 0, "no drafts"
    if options.max_drafts is None:
        why = "drafts for a request in a step, at most"
        if device == "cuda" and not {"draft-model", *HEADS}.intersection(speculate):
            return 16, f"{why}: guesses cost nothing, and a few more tokens of a step little"
        return 8, why
    if not 1 <= options.max_drafts <= 64:
        raise ConfigError(
            f"max_drafts is {options.max_drafts}.",
            fix="It must be from 1 to 64.",
            param="max_drafts",
        )
    return options.max_drafts, "given"


def decide_acceptance(options: EngineOptions) -> Decision[str]:
    acceptance = one_of("acceptance", options.acceptance, ACCEPTANCE)
    if acceptance == "exact":
        return acceptance, "tokens are those without drafts"
    return acceptance, "sampled tokens are distributed as without drafts"
