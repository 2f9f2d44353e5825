"""Costs of a model on one device, as they were measured (`planning/profile.py`), and those of
several devices, which follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tidemill.errors import ConfigError
from tidemill.planning.cost import CostModel, Curve, FittedCost
from tidemill.planning.hardware import ONE, Estimate, Hardware, Shape, estimate
from tidemill.planning.profile import Profile, shipped_profiles
from tidemill.types.model_config import ModelConfig

_NONE = "none"
_ESTIMATED = "estimated from the model's shape and the device's measured rates"
_TOKENS, _PAIRS = 2048, 10**6  # of a step at which rates of prompts are compared


class Costs:
    """By model and shape; None: there is no profile."""

    def __init__(
        self,
        models: Mapping[str, ModelConfig],
        hardware: Hardware,
        texts: Sequence[str] | None = None,
    ) -> None:
        """`texts`: PROFILE, or MODEL=PROFILE for one of several models."""
        self.models, self._hardware = models, hardware
        self._profiles: dict[str, Profile] = {}
        named = self._named(texts or ())
        for name, model in models.items():
            own = named.get(name) or f"{hardware.name}-{name}".lower()
            if own != _NONE and (name in named or own in shipped_profiles()):
                self._profiles[name] = _checked(Profile.load(own), own, model)

    def __call__(self, name: str, shape: Shape) -> CostModel | None:
        profile = self._profiles.get(name)
        if profile is None:
            return None
        model = self.models[name]
        return derived(
            profile.cost,
            estimate(model, self._hardware, ONE),
            estimate(model, self._hardware, shape),
        )

    def _named(self, texts: Sequence[str]) -> dict[str, str]:
        found = {}
        for text in texts:
            name, equals, profile = text.rpartition("=")
            if not equals and len(self.models) == 1:
                name = next(iter(self.models))
            if name not in self.models:
                fix = f"Write MODEL=PROFILE with one of {', '.join(self.models)}."
                raise ConfigError(
                    f"--profile {text!r} is for no model of this plan.", fix=fix, param="profile"
                )
            found[name] = profile
        return found

    @property
    def source(self) -> str:
        """The source of the costs."""
        parts = [
            f"{'estimated' if p.is_estimated else 'measured'} for {p.model.name} on {p.machine} ({p.date}), and derived"
            for p in self._profiles.values()
        ]
        return "; ".join(parts + ([_ESTIMATED] if len(parts) < len(self.models) else []))


def _checked(profile: Profile, source: str, model: ModelConfig) -> Profile:
    theirs = profile.model
    own = model.num_layers, model.hidden_size, model.num_heads, model.num_kv_heads, model.head_dim
    if own != (
        theirs.num_layers,
        theirs.hidden_size,
        theirs.num_heads,
        theirs.num_kv_heads,
        theirs.head_dim,
    ):
        fix = "Make one with `tidemill calibrate`, or give --profile none for estimates."
        raise ConfigError(
            f"The profile {source} is of {theirs.name}, which has another shape.",
            fix=fix,
            param="profile",
        )
    return profile


class Measured(FittedCost, frozen=True):
    """Measured costs, with bounds for the search and for the order of time in a cluster."""

    @property
    def least_s(self) -> float:
        """No step takes less."""
        return min(*self.decode.seconds, *self.mixed.seconds)

    def prefill_floor_s(self, start: int, end: int, budget: int) -> float:
        """A lower bound of the time of a prefill; same as of an Estimate."""
        num, (sizes, seconds) = end - start, _points(self.mixed)
        rate = min(s / n for n, s in zip(sizes, seconds, strict=True))
        if len(sizes) > 1:  # beyond the last point
            rate = min(rate, self.mixed.rise)
        num_steps = -(-num // budget)
        return max(rate * (num - 1), num_steps * self.least_s, 0.0)

    def decode_floor_s(self, context: int) -> float:
        """A lower bound of the time of a decode step; same as of an Estimate. Others may share the
        context."""
        return self.least_s


def derived(cost: FittedCost, single: Estimate, cut: Estimate) -> Measured:
    """The costs of several devices: each part is measured on one, times what the estimates say that
    cutting the model does to it."""
    values = {name: getattr(cost, name) for name in cost.__struct_fields__}
    if single == cut:
        return Measured(**values)
    by_context = cut.decode_line(1)[1] / single.decode_line(1)[1]
    changed = {
        "decode": Curve(
            cost.decode.at,
            [s * _ratio(single, cut, n, n) for n, s in zip(*_points(cost.decode), strict=True)],
        ),
        "mixed": Curve(
            cost.mixed.at,
            [s * _ratio(single, cut, n, 1) for n, s in zip(*_points(cost.mixed), strict=True)],
        ),
        "pair_s": cost.pair_s * _pair_s(cut) / _pair_s(single),
    }
    of_context = ("decode_context_s", "longest_s", "mixed_context_s", "shared_s")
    return Measured(**values | changed | {name: values[name] * by_context for name in of_context})


def _points(curve: Curve) -> tuple[list[int], list[float]]:
    return curve.at, curve.seconds


def _ratio(single: Estimate, cut: Estimate, num_tokens: int, num_draws: int) -> float:
    return cut.seconds(num_tokens, num_draws, 0, 0) / single.seconds(num_tokens, num_draws, 0, 0)


def _pair_s(cost: Estimate) -> float:
    return (cost.seconds(_TOKENS, 1, 0, _PAIRS) - cost.seconds(_TOKENS, 1, 0, 0)) / _PAIRS
