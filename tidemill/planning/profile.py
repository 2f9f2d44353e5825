"""Profile: what steps cost on a machine, measured once (`tidemill calibrate`) and saved as JSON."""

from __future__ import annotations

import difflib
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import msgspec

from tidemill.errors import ConfigError
from tidemill.planning.cost import Amount, FittedCost, StepShape
from tidemill.types.cache_layout import Group
from tidemill.types.model_config import ModelConfig

FORMAT = 1  # of the file; raised when its fields mean something else
_MAX_BYTES = 1 << 20
_SHIPPED = files("tidemill.planning") / "profiles"
MOST_ROWS, MOST_PAGES = 2**20, 2**31
_Count = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
_Bytes = Annotated[int, msgspec.Meta(ge=1, le=2**60)]
_Part = Annotated[float, msgspec.Meta(gt=-1e6, lt=1e6)]


class ModelShape(msgspec.Struct, frozen=True):
    """The fields of a model that its speed depends on."""

    name: str
    num_layers: _Count
    hidden_size: _Count
    num_heads: _Count
    num_kv_heads: _Count
    head_dim: _Count
    vocab_size: _Count
    weight_bytes: _Bytes
    kv_bytes_per_token: _Bytes

    @staticmethod
    def of(name: str, config: ModelConfig, weight_bytes: int, kv_dtype: str) -> ModelShape:
        return ModelShape(
            name,
            config.num_layers,
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.vocab_size,
            weight_bytes,
            config.kv_bytes_per_token(kv_dtype),
        )


class EngineShape(msgspec.Struct, frozen=True):
    """The engine that was measured: what a simulation has if nothing else is asked for."""

    device: str
    dtype: str
    scheme: str
    kv_dtype: str
    page_size: _Count
    num_pages: Annotated[int, msgspec.Meta(ge=2, le=MOST_PAGES)]
    max_context: _Count
    max_requests: Annotated[int, msgspec.Meta(ge=1, le=MOST_ROWS)]
    token_budget: _Count
    steps_ahead: Amount
    threads: Amount = 1
    fast_math: bool = False
    # Of layers with windows or states, whose pages come and go by themselves. None: all layers see
    # all tokens, and the same is assumed of profiles from before these two were kept.
    groups: tuple[Group, ...] = ()
    page_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**60)] = 0  # where there are groups


class FitErrors(msgspec.Struct, frozen=True):
    """Relative, on the steps that it was fitted to."""

    num_steps: Amount
    median: _Part
    p90: _Part
    total: _Part


class Profile(msgspec.Struct, frozen=True):
    """A cost model, and where it comes from."""

    format: int
    version: str  # of Tidemill
    date: str
    machine: str
    model: ModelShape
    engine: EngineShape
    cost: FittedCost
    errors: FitErrors
    is_estimated: bool = False  # not measured, but scaled from another model's

    @property
    def host_s(self) -> float:
        return self.cost.host_s

    def starting_s(self, num_new: int) -> float:
        return self.cost.starting_s(num_new)

    @property
    def first_pays(self) -> bool:
        return self.cost.first_pays

    @property
    def submit_s(self) -> float:
        return self.cost.submit_s

    @property
    def heat(self) -> tuple[float, float, float]:
        return self.cost.heat

    @property
    def shared_unit(self) -> int:
        return self.cost.shared_unit

    def step_s(self, plan: object) -> float:
        return self.cost.step_s(plan)  # type: ignore[arg-type]

    def decode_line(self, num_decoding: int) -> tuple[float, float, float]:
        return self.cost.decode_line(num_decoding)

    def shape_s(self, shape: StepShape) -> float:
        return self.cost.shape_s(shape)

    def rest_s(self, shape: StepShape) -> float:
        return self.cost.rest_s(shape)

    def save(self, path: Path) -> None:
        check_target(path)
        try:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")
        except OSError as error:
            raise _cannot_write(path, f"{error.strerror}") from error

    @staticmethod
    def load(name: str | Path) -> Profile:
        """A file, or one of those that are shipped, by name."""
        path = Path(name)
        if not path.exists() and path.suffix != ".json" and len(path.parts) == 1:
            shipped = _SHIPPED / f"{name}.json"
            if not shipped.is_file():
                raise _unknown(str(name))
            return _decode(shipped.read_bytes(), str(name))
        try:
            with path.open("rb") as file:
                data = file.read(_MAX_BYTES + 1)
        except OSError as error:
            fix = f"Make one with `tidemill calibrate MODEL -o {path}`, or choose one of {', '.join(shipped_profiles())}."
            raise ConfigError(
                f"The profile {path} cannot be read: {error.strerror}.", fix=fix, param="profile"
            ) from error
        return _decode(data, str(path))


def shipped_profiles() -> list[str]:
    return sorted(
        entry.name.removesuffix(".json")
        for entry in _SHIPPED.iterdir()
        if entry.name.endswith(".json")
    )


def check_target(path: Path) -> None:
    """That a profile can be written there. Its folder is made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_folder = path.is_dir()
    except OSError as error:
        raise _cannot_write(path, f"{error.strerror}") from error
    if is_folder:
        raise _cannot_write(path, "it is a folder")


def _cannot_write(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"The profile {path} cannot be written: {why}.",
        fix="Give another file with -o.",
        param="out",
    )


def _unknown(name: str) -> ConfigError:
    known = shipped_profiles()
    near = difflib.get_close_matches(name, known, n=1)
    fix = f"Did you mean {near[0]}?" if near else f"Give a file, or one of {', '.join(known)}."
    return ConfigError(f"There is no profile {name!r}.", fix=fix, param="profile")


def _decode(data: bytes, source: str) -> Profile:
    again = "Make it anew with `tidemill calibrate MODEL -o FILE`."
    if len(data) > _MAX_BYTES:
        raise ConfigError(
            f"{source} is no profile: it has more than {_MAX_BYTES:,} bytes.",
            fix=again,
            param="profile",
        )
    try:
        head = msgspec.json.decode(data, type=_Head)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(
            f"{source} is no profile: {error}.", fix=again, param="profile"
        ) from error
    if head.format != FORMAT:
        whose = f"a profile of format {head.format}, written by Tidemill {head.version}"
        raise ConfigError(
            f"{source} is {whose}; this version reads format {FORMAT}.", fix=again, param="profile"
        )
    try:
        profile = msgspec.json.decode(data, type=Profile)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(
            f"{source} is no profile: {error}.", fix=again, param="profile"
        ) from error
    for curve in (profile.cost.decode, profile.cost.mixed):
        increasing = all(a < b for a, b in zip(curve.at, curve.at[1:], strict=False))
        if not curve.at or len(curve.at) != len(curve.seconds) or not increasing:
            raise ConfigError(
                f"{source} is no profile: a curve's points are not in order.",
                fix=again,
                param="profile",
            )
    sizes, page_size = (
        [group.page_size for group in profile.engine.groups],
        profile.engine.page_size,
    )
    if sizes and (
        min(sizes) < 1 or any(size % page_size for size in sizes) or not profile.engine.page_bytes
    ):
        what = f"pages of engine.groups have {sizes} tokens and {profile.engine.page_bytes} bytes"
        raise ConfigError(f"{source} is no profile: {what}.", fix=again, param="profile")
    return profile


class _Head(msgspec.Struct, frozen=True):
    format: int
    version: str = "?"
