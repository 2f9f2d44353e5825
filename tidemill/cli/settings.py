"""Values of options: from a flag, else from the environment, else from a config file, else the
default."""

from __future__ import annotations

import difflib
import inspect
import os
import signal
import sys
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tidemill.cli.foreign import hint
from tidemill.cli.help import SHORT_ENOUGH, HelpRow, help_all
from tidemill.cli.options import ALIASES, BY_NAME, CONFIG, OPTIONS, Option
from tidemill.config import EngineOptions
from tidemill.errors import ConfigError
from tidemill.weights.hub import cached_models
from tidemill.weights.locate import PACKAGED

EPILOG = "Options can also be variables (TIDEMILL_PORT) or in a TOML file; flags win."
_MODELS = "models"  # the tables of the config file
_METAVARS = {"text": "TEXT", "integer": "INTEGER", "number": "FLOAT", "size": "SIZE"}


class Settings:
    """The options of a command, and where each value came from."""

    def __init__(
        self, values: dict[str, Any], sources: dict[str, str], tables: Sequence[ModelTable] = ()
    ) -> None:
        self._values, self._sources = values, sources
        self.tables = tables  # [[models]] of the config file
        self.models: list[str] = []  # as given on the command line, where several may be

    @staticmethod
    def read(
        names: Iterable[str],
        flags: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
        config: str | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> Settings:
        """`flags` maps names to what was given, None where nothing was; `defaults` are a command's
        own."""
        flags, environ = flags or {}, os.environ if environ is None else environ
        path = config or environ.get(CONFIG.variable)
        file = _read_file(Path(path).expanduser()) if path else {}
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        for option in (BY_NAME[name] for name in names):
            name = option.name
            if flags.get(name) not in (None, []):
                raw, source = flags[name], f"--{name}"
            elif text := environ.get(option.variable):
                raw, source = text.split() if option.is_list else text, option.variable
            elif option.key in file:
                raw, source = file[option.key], f"{name} in {path}"
            else:
                default = (defaults or {}).get(name, option.default)
                raw, source = None if default in (None, ()) else default, ""
                values[name] = default
            sources[name] = source
            if raw is not None:
                values[name] = option.read(raw, source)
        return Settings(
            values, sources, [ModelTable.read(table, path or "") for table in file.get(_MODELS, ())]
        )

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def source(self, name: str) -> str:
        """The flag, variable or file that a value came from; empty for a default."""
        return self._sources[name]

    @property
    def engine(self) -> dict[str, Any]:
        """The fields of EngineOptions that are among the options."""
        return {
            option.field: self._values[option.name]
            for option in OPTIONS
            if option.field and option.name in self._values
        }

    def engine_options(self, **own: Any) -> EngineOptions:
        """`own`: of a model, where they differ."""
        return EngineOptions(**self.engine | own)

    def shown(self) -> list[tuple[str, str, str]]:
        """Name, value and source of each; secrets are counted, not shown."""
        return [
            (
                name,
                BY_NAME[name].show(value),
                self._sources[name].removeprefix(f"{name} in ") or "default",
            )
            for name, value in self._values.items()
        ]

    def explained(self, error: ConfigError) -> ConfigError:
        """The same error, which also names the variable or the file that the value came from."""
        option = next(
            (
                option
                for option in OPTIONS
                if error.param and error.param in (option.field, option.key)
            ),
            None,
        )
        source = self._sources.get(option.name, "") if option else ""
        if not source or source.startswith("--") or source in error.message:
            return error
        return ConfigError(
            f"{error.message} It is set by {source}.", fix=error.fix, param=error.param
        )


@dataclass(frozen=True)
class ModelTable:
    """A table [[models]] of the config file: a model with its names and its own values of engine
    options."""

    engine: dict[str, Any]  # by field of EngineOptions
    aliases: tuple[str, ...]
    source: str  # the file

    @staticmethod
    def read(table: dict[str, Any], path: str) -> ModelTable:
        known = {option.key: option for option in OPTIONS if option.field} | {
            "name": BY_NAME["served-name"],
            "aliases": ALIASES,
        }
        engine: dict[str, Any] = {}
        aliases: tuple[str, ...] = ()
        for name, raw in table.items():
            option = known.get(name.replace("-", "_"))
            if option is None:
                names = {model.name for model in known.values()}
                fix = _instead(name, names)
                raise ConfigError(
                    f"A [[models]] table of {path} sets {name!r}, which is not an option of a model.",
                    fix=fix,
                )
            value = option.read(raw, f"{name} in [[models]] of {path}")
            if option is ALIASES:
                aliases = value
            else:
                engine[option.field] = value
        if "model" not in engine:
            raise ConfigError(
                f"A [[models]] table of {path} names no model.",
                fix='Add model = "PATH" to it.',
                param=_MODELS,
            )
        return ModelTable(engine, aliases, path)


def _instead(key: str, options: Collection[str]) -> str:
    """A hint for a key that is no option."""
    key = key.replace("_", "-")
    slip = difflib.get_close_matches(key, options, n=1, cutoff=0.9)
    near = slip or difflib.get_close_matches(key, options, n=1, cutoff=0.6)
    meant = f"Did you mean {near[0]}?" if near else "docs/reference/options.md lists them."
    return meant if slip else hint(key, options) or meant


def _read_file(path: Path) -> dict[str, Any]:
    """The config file by keys with underscores; names of options are checked, their values are not
    yet."""
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"The config file {path} cannot be read: {error}.", param=CONFIG.key
        ) from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        fix = "Write options like max-context = 4096."
        raise ConfigError(
            f"The config file {path} is not TOML: {error}.", fix=fix, param=CONFIG.key
        ) from error
    known = {option.key: option.name for option in OPTIONS}
    models = table.pop(_MODELS, [])
    if not isinstance(models, list) or not all(isinstance(table, dict) for table in models):
        raise ConfigError(
            f"models in {path} is not a list of tables.",
            fix="Write [[models]] before each model.",
            param=_MODELS,
        )
    found: dict[str, Any] = {_MODELS: models}
    for name, value in table.items():
        key = name.replace("-", "_")
        if key not in known:
            fix = _instead(name, known.values())
            raise ConfigError(f"{path} sets {name!r}, which is not an option.", fix=fix, param=name)
        if key in found:
            raise ConfigError(
                f"{path} sets {known[key]} twice, with hyphens and with underscores.",
                fix="Keep one of them.",
            )
        found[key] = value
    return found


def misspelled(environ: Mapping[str, str]) -> list[str]:
    """A line for each TIDEMILL_* variable that is no option, but looks like one. (Others are set by
    Kubernetes, for services.)"""
    known = [option.variable for option in (*OPTIONS, CONFIG)]
    near = {
        name: difflib.get_close_matches(name, known, n=1, cutoff=0.85)
        for name in environ
        if name.startswith("TIDEMILL_") and name not in known
    }
    return [
        f"{name} is not an option and is ignored. Did you mean {found[0]}?"
        for name, found in near.items()
        if found
    ]


def takes(
    *names: str, model: str = "argument", **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command options of the table: flags in its signature, and their values as its
    parameter `settings`.

    `model`: how it is given, as an argument or as an option; or several, as either. `defaults`: of
    this command, where they differ.
    """
    options = [BY_NAME[name] for name in names]
    own_defaults = {name.replace("_", "-"): value for name, value in defaults.items()}

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in inspect.signature(function, eval_str=True).parameters.values()
            if parameter.name != "settings"
        ]
        from_options = [_parameter(option, model, own_defaults) for option in (*options, CONFIG)]
        if model == "several":
            info = typer.Option("--model", "-m", help="The same as MODEL.", metavar="TEXT")
            kind = Annotated[list[str] | None, info]
            from_options.append(
                inspect.Parameter(
                    "more_models", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind
                )
            )
        # before arguments of the command's own
        is_first = model == "argument" and from_options[0].name == "model"
        parameters = [from_options[0], *own, *from_options[1:]] if is_first else own + from_options
        is_long = len(parameters) > SHORT_ENOUGH
        if is_long:
            parameters.append(help_all(len(parameters)))

        def run(**arguments: Any) -> None:
            arguments.pop("help_all", None)
            flags = {option.name: arguments.pop(option.key) for option in options}
            models: list[str] = []
            if model == "several":
                models = [*(flags["model"] or ()), *(arguments.pop("more_models") or ())]
                flags["model"] = models[0] if models else None
            settings = Settings.read(
                names, flags, config=arguments.pop(CONFIG.key), defaults=own_defaults
            )
            settings.models = models
            for line in misspelled(os.environ):
                print(f"warning: {line}", file=sys.stderr)
            try:
                function(settings=settings, **arguments)
            except ConfigError as error:
                raise settings.explained(error) from error.__cause__

        run.__name__, run.__doc__, run.__module__ = (
            function.__name__,
            function.__doc__,
            function.__module__,
        )
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        if is_long:
            rows = {
                option.key: HelpRow(option.section, _short_help(option, own_defaults))
                for option in options
            }
            run.help_rows = rows  # type: ignore[attr-defined]
        return run

    return decorate


def _parameter(option: Option, model: str, defaults: Mapping[str, Any]) -> inspect.Parameter:
    """The flag of an option. All but switches are text here, so that one place reads what flags and
    variables say."""
    default = str(defaults.get(option.name, option.default_text))
    words = option.help + (" May be given several times." if option.is_list else "")
    if default:
        words += f" Default: {default}."
    if option.name == "model" and model == "argument":
        info: Any = typer.Argument(help=words, metavar="MODEL", autocompletion=_known_models)
    elif option.name == "model" and model == "several":
        info = typer.Argument(
            help=f"{words} NAME=MODEL names it. May be given several times.",
            metavar="MODEL",
            autocompletion=_known_models,
        )
        annotation = Annotated[list[str] | None, info]
        return inspect.Parameter(
            option.key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
        )
    else:
        flags = [option.flag, "-m"] if option.name == "model" else [option.flag]
        complete = (
            _known_models
            if option.name == "model"
            else _completion(option.choices)
            if option.choices
            else None
        )
        info = typer.Option(
            *flags, help=words, metavar=_METAVARS.get(option.kind), autocompletion=complete
        )
    kind: Any = (
        bool | None
        if option.kind == "switch"
        else list[str] | None
        if option.is_list
        else str | None
    )
    return inspect.Parameter(
        option.key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, info]
    )


def _short_help(option: Option, defaults: Mapping[str, Any]) -> str:
    default = defaults.get(option.name, "" if option.default in (None, ()) else option.default_text)
    return f"{option.short} Default: {default}." if option.short and default != "" else option.short


def _completion(choices: tuple[str, ...]) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        return [choice for choice in choices if choice.startswith(incomplete)]

    return complete


def _known_models(incomplete: str) -> list[str]:
    """The names that need no path, for shell completion. The shell knows more about paths."""
    return [name for name in (*PACKAGED, *cached_models()) if name.startswith(incomplete)]


def raise_on_interrupt() -> None:
    """From here on Ctrl-C is an exception, so that what has been started (a progress bar, an
    engine) is ended in order."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
