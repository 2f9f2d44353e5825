"""Sampling defaults: what a request that does not say gets. The server, the command line and LLM
all take them from here.

They come from the model: generation_config.json of a Hugging Face folder, `general.sampling.*` of a
GGUF file, or the table below for a packaged model; some may be given as JSON instead. A parameter
that is given always counts, and leaves the defaults of the others as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from tidemill.errors import ConfigError, InvalidRequest
from tidemill.types.sampling import GREEDY_BELOW, SamplingParams
from tidemill.weights.gguf import GGUFFile
from tidemill.weights.locate import PACKAGED, packaged_file, read_json

SOURCES = ("model", "neutral")
# of a request: vLLM's and llama.cpp's word for no seed, also where there is a default one
ANY_SEED = -1
NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "penalty_window": -1,
}
_API_NAMES = {"penalty_window": "repeat_last_n"}  # where the API has another one
# Measured, with these temperatures: docs/lab/decoding.md.
_OF_PACKAGED = {"smollm2": {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1}}
_GGUF_NAMES = {
    "temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
    "penalty_last_n": "penalty_window",
}  # fmt: skip
# Answers without max_tokens. A small model may not find an end: at the context's end it would have
# rambled for minutes.
_SMALL_PARAMETERS, _SMALL_LIMIT, _LIMIT = 10**9, 1024, 16_384


@dataclass(frozen=True, kw_only=True)
class SamplingDefaults:
    """`limit`: of answers without max_tokens; None: the end of the context. `seed`: None: each
    request draws its own."""

    values: dict[str, float] = field(default_factory=lambda: dict(NEUTRAL))
    limit: int | None = None
    seed: int | None = None
    # names of values that count only where tokens are drawn
    for_sampling: frozenset[str] = frozenset()
    source: str = "neutral"  # in words, where the values are from
    notes: tuple[str, ...] = ()  # what the model asks for and does not get

    def fill(
        self, params: SamplingParams, room: int, *, null_is_absent: bool = False
    ) -> SamplingParams:
        """The parameters of a request whose prompt leaves `room` for its output. In Python
        max_tokens=None asks for all of it; in an API (`null_is_absent`) it is not given."""
        if params.pooling is not None:
            return params
        values = self.values if params.beams is None else {}
        chosen: dict[str, Any] = {
            name: value for name, value in values.items() if not params.is_given(name)
        }
        if self.for_sampling and chosen.get("temperature", params.temperature) < GREEDY_BELOW:
            chosen = {
                name: value for name, value in chosen.items() if name not in self.for_sampling
            }
        if not params.is_given("max_tokens") or (null_is_absent and params.max_tokens is None):
            chosen["max_tokens"] = (
                None if self.limit is None else max(min(self.limit, room), params.min_tokens, 1)
            )
        if params.seed is None or params.seed == ANY_SEED:
            # drawn when the request is submitted
            chosen["seed"] = self.seed if params.seed is None else None
        return msgspec.structs.replace(params, **chosen)

    def shown(self) -> dict[str, float | int | None]:
        """The values as they are, under the names of the API."""
        seed = {} if self.seed is None else {"seed": self.seed}
        return (
            {_API_NAMES.get(name, name): value for name, value in self.values.items()}
            | {"max_tokens": self.limit}
            | seed
        )

    def __str__(self) -> str:
        changed = {name: value for name, value in self.values.items() if value != NEUTRAL[name]}
        words = [f"{_API_NAMES.get(name, name)} {value:g}" for name, value in changed.items()]
        words += [] if self.seed is None else [f"seed {self.seed}"]
        return f"{', '.join(words) or 'neutral'} ({self.source})"


def sampling_defaults(
    path: Path, num_parameters: int, source: str = "model", limit: int | None = None
) -> SamplingDefaults:
    """The sampling defaults of the checkpoint at `path`. `limit`: as given by --default-max-tokens;
    0 is the end of the context."""
    source, values = read_source(source)
    if limit is not None and limit < 0:
        raise ConfigError(
            f"default_max_tokens is {limit}.",
            fix="It must be 0 or more.",
            param="default_max_tokens",
        )
    read = (
        SamplingDefaults(source="--sampling-defaults neutral")
        if source == "neutral"
        else _of_model(path)
    )
    if values:
        source = f"{', '.join(_API_NAMES.get(name, name) for name in values)} by --sampling-defaults; {read.source}"
        seed = values.pop("seed", None)
        own = read.for_sampling - values.keys()
        seed = None if seed is None else int(seed)
        read = replace(
            read, values=read.values | values, seed=seed, for_sampling=own, source=source
        )
    if limit is None:
        limit = read.limit or (_SMALL_LIMIT if num_parameters < _SMALL_PARAMETERS else _LIMIT)
    return replace(read, limit=limit or None)


def read_source(text: str) -> tuple[str, dict[str, float]]:
    """One of SOURCES, and the values that are given beside it: a JSON object under the names of the
    API, in which `base` is the source of the others."""
    if text in SOURCES:
        return text, {}
    fix = 'Choose model or neutral, or give a JSON object like {"temperature": 0.7, "top_p": 0.9}.'
    try:
        fields = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise ConfigError(
            f"There are no sampling defaults {text[:100]!r}.", fix=fix, param="sampling_defaults"
        )
    fields = {name: value for name, value in fields.items() if value is not None}
    if (base := fields.pop("base", SOURCES[0])) not in SOURCES:
        raise ConfigError(
            f"Sampling defaults have the base {base!r}.",
            fix="Choose model or neutral.",
            param="sampling_defaults",
        )
    names = {_API_NAMES.get(name, name): name for name in (*NEUTRAL, "seed")}
    if unknown := sorted(fields.keys() - names.keys()):
        fix = f"Possible are {', '.join(names)}."
        raise ConfigError(
            f"Sampling defaults cannot have {unknown[0]!r}.", fix=fix, param="sampling_defaults"
        )
    params = {names[name]: value for name, value in fields.items()}
    try:
        checked = SamplingParams(**params)
    except InvalidRequest as error:
        raise ConfigError(
            f"Sampling defaults: {error.message}", fix=error.fix, param="sampling_defaults"
        ) from error
    return base, {name: getattr(checked, name) for name in params}


def _of_model(path: Path) -> SamplingDefaults:
    for name, values in _OF_PACKAGED.items():
        if path == packaged_file(name):
            source = f"measured for {PACKAGED[name]}"
            return SamplingDefaults(
                values=NEUTRAL | values,
                for_sampling=frozenset({"repetition_penalty"}),
                source=source,
            )
    if path.is_dir():
        file = path / "generation_config.json"
        return (
            _of_generation_config(read_json(file))
            if file.is_file()
            else SamplingDefaults(source="no generation_config.json")
        )
    return _of_gguf(GGUFFile(path).metadata)


def _of_generation_config(config: dict[str, Any]) -> SamplingDefaults:
    """do_sample: false means greedy, as in Transformers. Where it is absent the values count, as in
    vLLM."""
    params = {
        name: config[name]
        for name in NEUTRAL.keys() - _API_NAMES.keys()
        if config.get(name) is not None
    }
    if config.get("do_sample") is False:
        params["temperature"] = 0.0
    limit = config.get("max_new_tokens")
    is_limit = isinstance(limit, int) and not isinstance(limit, bool) and limit > 0
    return _checked(params, "generation_config.json", limit if is_limit else None)


def _of_gguf(metadata: dict[str, Any]) -> SamplingDefaults:
    prefix = "general.sampling."
    params = {
        name: metadata[prefix + key]
        for key, name in _GGUF_NAMES.items()
        if prefix + key in metadata
    }
    if isinstance(params.get("penalty_window"), int):
        # llama.cpp: anything below 0 is the context
        params["penalty_window"] = max(params["penalty_window"], -1)
    if isinstance(params.get("temperature"), float) and params["temperature"] < GREEDY_BELOW:
        params["temperature"] = 0.0
    defaults = _checked(params, "general.sampling of the GGUF file")
    others = sorted(
        key
        for key in metadata
        if key.startswith(prefix) and key.removeprefix(prefix) not in _GGUF_NAMES
    )
    notes = (f"{', '.join(others)} of the GGUF file have no effect",) if others else ()
    return replace(defaults, notes=defaults.notes + notes)


def _checked(params: dict[str, Any], source: str, limit: int | None = None) -> SamplingDefaults:
    """A value that no request could have is left out, and noted: the model itself may be fine."""
    values: dict[str, float] = dict(NEUTRAL)
    notes = []
    for name, value in params.items():
        try:
            checked = SamplingParams(**{name: value})
        except InvalidRequest as error:
            notes.append(f"{source}: {error.message}")
        else:
            number = getattr(checked, name)
            # GGUF has 32-bit floats
            values[name] = round(number, 6) if isinstance(number, float) else number
    return SamplingDefaults(
        values=values,
        limit=limit,
        source=source if params else f"{source} has none",
        notes=tuple(notes),
    )
