"""The measured costs of moving a page and of computing its tokens again: which of the two is
faster."""

from __future__ import annotations

from dataclasses import dataclass, field

_FADES = 0.97  # of an observation, what is left after the next one


@dataclass(slots=True)
class _Line:
    """Seconds = start + slope * amount, by least squares over faded observations."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def observe(self, amount: float, seconds: float) -> None:
        for name, value in (
            ("weight", 1.0),
            ("x", amount),
            ("y", seconds),
            ("xx", amount * amount),
            ("xy", amount * seconds),
        ):
            setattr(self, name, _FADES * getattr(self, name) + value)

    @property
    def start_and_slope(self) -> tuple[float, float]:
        """Neither is negative. If all amounts were alike, all of it is slope."""
        spread = self.weight * self.xx - self.x * self.x
        if spread <= 1e-6 * self.weight * self.xx:
            return 0.0, self.y / self.x
        slope = (self.weight * self.xy - self.x * self.y) / spread
        start = (self.y - slope * self.x) / self.weight
        if slope < 0:
            return self.y / self.weight, 0.0
        return (start, slope) if start >= 0 else (0.0, self.y / self.x)


@dataclass(slots=True)
class _Rate:
    num_bytes: float = 0.0
    seconds: float = 0.0

    def observe(self, num_bytes: int, seconds: float) -> None:
        self.num_bytes = _FADES * self.num_bytes + num_bytes
        self.seconds = _FADES * self.seconds + seconds


@dataclass(slots=True)
class Costs:
    """Fed with what steps and moves took. Without observations a cost is 0, so moves are preferred
    until steps are known to be faster."""

    step_tokens: int = 256  # of a prompt in one step, at most
    _steps: _Line = field(default_factory=_Line)
    # by tier, and whether it is a load
    _moves: dict[tuple[int, bool], _Rate] = field(default_factory=dict)

    def computed(self, num_tokens: int, seconds: float) -> None:
        if num_tokens > 0 and seconds > 0:
            self._steps.observe(num_tokens, seconds)

    def moved(self, tier: int, is_load: bool, num_bytes: int, seconds: float) -> None:
        if seconds > 0:
            self._moves.setdefault((tier, is_load), _Rate()).observe(num_bytes, seconds)

    def knows(self, tier: int) -> bool:
        """Both what its moves and what steps take was seen."""
        return bool(self._steps.weight) and any(
            (tier, is_load) in self._moves for is_load in (True, False)
        )

    def compute_s(self, num_tokens: int) -> float:
        if not self._steps.weight or num_tokens <= 0:
            return 0.0
        start, slope = self._steps.start_and_slope
        return -(-num_tokens // self.step_tokens) * start + num_tokens * slope

    def move_s(self, tier: int, is_load: bool, num_bytes: float) -> float:
        """The time of a move. A direction that was never seen counts like the other one."""
        rate = self._moves.get((tier, is_load)) or self._moves.get((tier, not is_load))
        return num_bytes * rate.seconds / rate.num_bytes if rate and rate.num_bytes else 0.0

    def load_is_faster(self, num_bytes: dict[int, int], num_tokens: int) -> bool:
        """Than computing so many tokens. `num_bytes`: by tier. True if it is not known."""
        if not all(self.knows(tier) for tier in num_bytes):
            return True
        return sum(
            self.move_s(tier, True, num) for tier, num in num_bytes.items()
        ) <= self.compute_s(num_tokens)

    def swap_s(self, tier: int, num_bytes: int) -> float:
        """Out and in again."""
        return self.move_s(tier, False, num_bytes) + self.move_s(tier, True, num_bytes)
