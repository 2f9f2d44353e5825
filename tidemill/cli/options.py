"""The options table: flags, help, config file, TIDEMILL_* variables and docs/reference/options.md
are all made from it.

An option of the engine is a field of `EngineOptions`. Any other is one entry here, and one use of
`settings["its-name"]`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import Field, dataclass, fields
from typing import Any, Literal

from tidemill.config import EngineOptions, fmt_bytes, parse_bytes
from tidemill.config.options import ENGINE, SERVING
from tidemill.errors import ConfigError
from tidemill.frontend.parsers import REASONING_PARSERS, TOOL_PARSERS

Kind = Literal["text", "integer", "number", "switch", "size"]
ACCESS, STORAGE, LOGGING, RAY = "Access", "Storage", "Logging", "Ray"
# by the type of a field
_KINDS: dict[str, Kind] = {"int": "integer", "float": "number", "bool": "switch"}
_SWITCH = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}
_EXPECTED = {
    "text": "text that is not empty",
    "integer": "an integer",
    "number": "a number",
    "switch": "true or false",
    "size": "an amount of memory like 512M or 4G",
}


@dataclass(frozen=True)
class Option:
    """One thing a user may set. `name` is written with hyphens, as in the flag."""

    name: str
    kind: Kind
    section: str
    help: str
    default: Any = None
    short: str = ""  # of a basic option: its help in one line
    automatic: str = ""  # in words, what the value is if nothing is given and the default is None
    field: str = ""  # of EngineOptions
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    is_list: bool = False  # may be given several times
    is_secret: bool = False  # never printed
    spellings: tuple[tuple[str, str], ...] = ()  # other words for a choice

    def __post_init__(self) -> None:
        if self.is_list:
            object.__setattr__(self, "default", ())

    @property
    def key(self) -> str:
        """The option as a Python name and as a key of the config file, which takes hyphens as well."""
        return self.name.replace("-", "_")

    @property
    def flag(self) -> str:
        return f"--{self.name}/--no-{self.name}" if self.kind == "switch" else f"--{self.name}"

    @property
    def variable(self) -> str:
        return f"TIDEMILL_{self.key.upper()}"

    @property
    def default_text(self) -> str:
        if self.default is None or self.default == ():
            return self.automatic
        if self.kind == "switch":
            return "on" if self.default else "off"
        return f"{self.default:g}" if self.kind == "number" else str(self.default)

    def show(self, value: Any) -> str:
        """A value as it may be printed."""
        if self.is_secret:
            return f"{len(value)} given" if value else ""
        if value is None or value == ():
            return self.automatic and f"automatic: {self.automatic}"
        if isinstance(value, tuple):
            return " ".join(value)
        if isinstance(value, bool):
            return "on" if value else "off"
        return (
            fmt_bytes(value)
            if self.kind == "size"
            else f"{value:g}"
            if self.kind == "number"
            else str(value)
        )

    def read(self, value: object, source: str) -> Any:
        """The value of what a flag, a variable (both text) or a config file (TOML types) gives.
        `source` is named in errors."""
        if self.is_list:
            parts = value if isinstance(value, (list, tuple)) else [value]
            return tuple(self._read_one(part, source) for part in parts)
        return self._read_one(value, source)

    def _read_one(self, raw: object, source: str) -> Any:
        value: Any = None
        with suppress(ValueError, ConfigError):
            value = self._convert(raw)
        in_range = (
            value is not None
            and (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
        )
        if in_range and (not self.choices or value in self.choices):
            return value
        shown = "not what it must be" if self.is_secret else repr(raw)
        raise ConfigError(
            f"{source} is {shown}.", fix=self._allowed + _service_link(raw), param=self.key
        )

    def _convert(self, value: object) -> Any:
        """None or ValueError: of another kind."""
        text = value.strip() if isinstance(value, str) else None
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if self.kind == "text":
            return dict(self.spellings).get(text or "", text) or None
        if self.kind == "switch":
            return value if isinstance(value, bool) else _SWITCH.get((text or "").lower())
        if self.kind == "size":
            return (
                parse_bytes(text)
                if text
                else value
                if isinstance(value, int) and is_number and value >= 0
                else None
            )
        if self.kind == "number":
            return float(text) if text else float(str(value)) if is_number else None
        return int(text) if text else value if isinstance(value, int) and is_number else None

    @property
    def _allowed(self) -> str:
        if self.choices:
            return f"Choose one of {', '.join(self.choices)}."
        words = _EXPECTED[self.kind]
        if self.low is not None:
            words += (
                f" from {self.low:g} to {self.high:g}"
                if self.high is not None
                else f", {self.low:g} or more"
            )
        return f"It must be {words}."


def _service_link(value: object) -> str:
    if isinstance(value, str) and value.startswith("tcp://"):
        return " Kubernetes sets this variable for a service named tidemill: set enableServiceLinks to false."
    return ""


def _engine_option(field: Field[Any]) -> Option:
    """The option that a field of EngineOptions declares. Its type says of what kind it is."""
    declared = {"name": field.name.replace("_", "-"), "section": ENGINE, **field.metadata}
    kind: Kind = (
        "size"
        if field.name.endswith("_bytes")
        else _KINDS.get(str(field.type).partition(" ")[0], "text")
    )
    is_list = str(field.type).startswith("tuple")
    return Option(**declared, kind=kind, default=field.default, field=field.name, is_list=is_list)


OPTIONS = (
    *(_engine_option(field) for field in fields(EngineOptions)),
    Option("disaggregate", "text", SERVING, "auto: say whether --prefill and --decode would serve the measured load better.",
           "off", choices=("off", "auto")),
    Option("host", "text", SERVING,
           "Address to listen on. 0.0.0.0 is every network of this machine, and needs an API key.", "127.0.0.1",
           short="Address to listen on."),
    Option("port", "integer", SERVING, "Port to listen on; 0 takes any free one.", 8000, low=0, high=65535,
           short="Port to listen on."),
    Option("unix-socket", "text", SERVING, "Listen on a Unix socket of this path instead of host and port."),
    Option("unix-socket-mode", "text", SERVING, "Permissions of the Unix socket, in octal.", "600"),
    Option("root-path", "text", SERVING, "Prefix of all paths behind a reverse proxy, like /llm."),
    Option("tls-cert", "text", ACCESS, "Certificate chain (PEM): serve HTTPS.",
           short="Certificate chain (PEM): serve HTTPS."),
    Option("tls-key", "text", ACCESS, "Private key (PEM) of the certificate.", automatic="in the file of the certificate",
           short="Private key (PEM) of the certificate."),
    Option("tls-client-ca", "text", ACCESS, "Certificates (PEM) of authorities: clients must show a certificate of one of them."),
    Option("memory-budget", "size", SERVING, automatic="what is free at the start",
           help="Memory for all models of the server together; those that do not fit beside others are swapped on demand."),
    Option("max-loaded", "integer", SERVING, low=1, automatic="as many as fit",
           help="Most models that are loaded at the same time."),
    Option("idle-unload", "number", SERVING, low=0, automatic="never",
           help="Unload a model after so many seconds without a request; the next request loads it again."),
    Option("tool-parser", "text", SERVING, "How the model writes tool calls: as its chat template does (auto), none, or a name.",
           "auto", choices=("auto", "none", *TOOL_PARSERS)),
    Option("reasoning-parser", "text", SERVING, "How the model writes its reasoning: likewise.", "auto",
           choices=("auto", "none", *REASONING_PARSERS)),
    Option("thinking-token-budget", "integer", SERVING, low=0, automatic="no limit",
           help="Reasoning is ended after so many tokens if a request does not say; 0: none."),
    Option("force-include-usage", "switch", SERVING, "Every chunk of a stream has the usage so far, also if it is not asked for.",
           False),
    Option("return-tokens-as-token-ids", "switch", SERVING, "In logprobs, tokens are written as token_id:N, for every request.",
           False),
    Option("pooling", "text", SERVING, "How embeddings are made of the hidden states if a request does not say; auto: as the "
           "model does, or their mean; none: each token has one.", "auto", choices=("auto", "mean", "last", "cls", "none"),
           spellings=(("rank", "auto"),)),
    Option("drain-seconds", "number", SERVING,
           "When the server is stopped (Ctrl-C, SIGTERM), how long running requests may take to finish.", 30.0, low=0),
    Option("stall-seconds", "number", SERVING,
           "How long the engine may have work and complete no step before it is restarted.", 60.0, low=1),
    Option("start-seconds", "number", SERVING,
           "How long the engine may show no progress while it loads the model before that is an error.", 300.0, low=1),
    Option("ray", "switch", RAY, "Run on a Ray cluster: each replica is an actor of it. Needs tidemill[ray].", False),
    Option("replicas", "integer", RAY, "Engines, or workers of a batch, on the cluster.", 1, low=1, high=1024),
    Option("autoscale", "text", RAY, automatic="off",
           help="Fewest and most replicas, as MIN:MAX, by how many requests wait and for how long."),
    Option("ray-address", "text", RAY, automatic="RAY_ADDRESS, or a cluster is started on this machine",
           help="Address of the Ray cluster, as HOST:PORT; auto: the one that this machine is a node of."),
    Option("ray-wait", "number", RAY, "Seconds to wait until nodes have room for the replicas.", 15.0, low=1, high=86_400),
    Option("api-key", "text", ACCESS, is_list=True, is_secret=True,
           help="A key that clients must send: 16 or more characters, or sha256:HEX of one. A file or the variable keeps it "
           "out of the process list.",
           short="A key that clients must send."),
    Option("api-key-file", "text", ACCESS,
           "A file of keys, or of sha256:HEX of keys, one a line. After a key, priority=N (-100 most urgent, 100 least) sets the "
           "priority of its requests, and record-text=off seals them where --record records."),
    Option("admin-key", "text", ACCESS, is_list=True, is_secret=True,
           help="A key that may also read metrics and the live view, and see requests made with any key."),
    Option("allowed-host", "text", ACCESS, is_list=True,
           help="A name under which clients reach the server, besides localhost and IP addresses, like llm.example.org."),
    Option("allowed-origin", "text", ACCESS, is_list=True,
           help="The origin of a web page that may call the server from a browser, like https://app.example.org; `localhost`: "
                "any page of this machine; `*`: any page.",
           short="A web page that may call the server."),
    Option("ui", "switch", ACCESS, "The web page at /; off, there is none.", True),
    Option("slots", "switch", ACCESS, "/slots shows the requests that are computed; off, it answers with status 501.", True),
    Option("trust-request-chat-template", "switch", ACCESS, "A request may bring a chat template of its own.", False),
    Option("data-dir", "text", STORAGE, "Folder for uploaded files and batches.", automatic="~/.local/share/tidemill"),
    Option("data-quota", "size", STORAGE, "Most that uploaded files and batches may take on disk.", "10GB"),
    Option("request-log", "switch", LOGGING, "Write one line for each finished request.", True),
    Option("log-format", "text", LOGGING, "Format of the request log: text or json.", "text", choices=("text", "json")),
    Option("log-file", "text", LOGGING, "File of the request log; it may be rotated at any time.", automatic="stderr"),
    Option("record", "text", LOGGING, automatic="nothing is recorded",
           help="A folder, and the most that it may take (DIR:SIZE, 1GB), for a recording of every request, its output and every "
           "step: `replay` computes it again and compares, `simulate`, `plan` and `bench serve` take it as load."),
    Option("record-text", "text", LOGGING, "Off, recordings are sealed with the owner's key: without it nobody reads them.", "on",
           choices=("on", "off")),
    Option("record-key", "text", LOGGING, "File of that key; it is made if there is none.",
           automatic="record.key in ~/.local/share/tidemill"),
    Option("otlp-endpoint", "text", LOGGING, automatic="OTEL_EXPORTER_OTLP_ENDPOINT, or no spans",
           help="Address of an OpenTelemetry collector (OTLP over HTTP) that gets a span per request; needs tidemill[otel]."),
)  # fmt: skip
BY_NAME = {option.name: option for option in OPTIONS}
ENGINE_NAMES = tuple(option.name for option in OPTIONS if option.section == ENGINE)
# Not in the table: a config file cannot name another.
CONFIG = Option("config", "text", "", "A TOML file of options, like max-context = 4096.")
# Of a table [[models]] in a config file.
ALIASES = Option("aliases", "text", "", "Other names of the model in the API.", is_list=True)
