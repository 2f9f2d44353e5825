"""Decisions about drafts of tokens to come."""

from __future__ import annotations

from tidemill.config.options import Decision, EngineOptions, one_of
from tidemill.errors import ConfigError
from tidemill.model_config import ModelConfig

HEADS = ("medusa", "eagle", "eagle-tree", "exit", "exit-bandit")  # drafters of trained heads
TREES = ("medusa", "eagle-tree")  # drafts of these may be trees
SPECULATE: dict[str, tuple[str, ...]] = {  # drafters, by the option's value
    "auto": ("forced", "ngram"),
    "off": (),
    **{name: (name,) for name in ("forced", "ngram", "suffix", *HEADS)},
    "draft-model": ("forced", "draft-model"),
}
ACCEPTANCE = ("exact", "rejection")


def decide_speculate(options: EngineOptions, model: ModelConfig) -> Decision[tuple[str, ...]]:
    if options.speculate not in SPECULATE:
        raise ConfigError(
            f"There is no drafter {options.speculate!r}.", fix=f"Choose one of {', '.join(SPECULATE)}.", param="speculate"
        )
    names = SPECULATE[options.speculate]
    why = "drafts are verified where that saves time" if options.speculate == "auto" else "given"
    if options.draft_model is not None and options.speculate == "auto":
        names, why = SPECULATE["draft-model"], "a draft model was given"
    if ("draft-model" in names) != (options.draft_model is not None):
        raise ConfigError(
            f"speculate is {options.speculate}, and a draft model was {'given' if options.draft_model else 'not given'}.",
            fix="Give --draft-model PATH together with --speculate draft-model.",
            param="draft_model",
        )
    if options.speculate in HEADS and not options.draft_heads:
        kind = options.speculate.partition("-")[0]
        raise ConfigError(
            f"--speculate {options.speculate} needs trained heads.",
            fix=f"Give --draft-heads FOLDER; tidemill train-draft MODEL --kind {kind} makes one.",
            param="draft_heads",
        )
    if options.draft_heads and options.speculate not in HEADS:
        raise ConfigError(
            f"speculate is {options.speculate}, and draft heads were given, which it does not use.",
            fix=f"Give --draft-heads together with --speculate {', '.join(HEADS[:-1])} or {HEADS[-1]}.",
            param="draft_heads",
        )
    if model.pooler is not None:
        return (), "the model generates nothing"
    if names and model.has_states:
        if options.speculate != "auto" or options.draft_model is not None:
            raise ConfigError(
                "This model keeps states of constant size, which cannot be taken back where a draft was wrong.",
                fix="Use --speculate off.",
                param="speculate",
            )
        return (), "states of constant size cannot be taken back where a draft was wrong"
    return names, why


def decide_max_drafts(options: EngineOptions, device: str, speculate: tuple[str, ...]) -> Decision[int]:
    if not speculate:
        return 0, "no drafts"
    if options.max_drafts is None:
        why = "drafts for a request in a step, at most"
        if device == "cuda" and not {"draft-model", *HEADS}.intersection(speculate):
            return 16, f"{why}: guesses cost nothing, and a few more tokens of a step little"
        return 8, why
    if not 1 <= options.max_drafts <= 64:
        raise ConfigError(f"max_drafts is {options.max_drafts}.", fix="It must be from 1 to 64.", param="max_drafts")
    return options.max_drafts, "given"


def decide_acceptance(options: EngineOptions, device: str, speculate: tuple[str, ...]) -> Decision[str]:
    acceptance = one_of("acceptance", options.acceptance, ACCEPTANCE)
    if acceptance == "exact":
        return acceptance, "tokens are those without drafts"
    if device == "cuda":
        raise ConfigError("acceptance rejection is for the CPU only.", fix="Use --acceptance exact.", param="acceptance")
    if not speculate:
        raise ConfigError(
            "acceptance is rejection, but no tokens are guessed.",
            fix="Use --acceptance exact, or a model and --speculate with a drafter.",
            param="acceptance",
        )
    return acceptance, "sampled tokens are distributed as without drafts"
