"""The options table: flags, help, config file, TIDEMILL_* variables and docs/reference/options.md are all made from it.

A new option is one entry here, and one use of `settings["its-name"]`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, Literal

from tidemill.config import (
    ACCEPTANCE,
    DTYPES,
    LAYOUTS,
    MAX_LORA_RANK,
    QUANTIZATIONS,
    SPECULATE,
    EngineOptions,
    fmt_bytes,
    parse_bytes,
)
from tidemill.config.parallel import COLLECTIVES, MAX_RANKS, TENSOR_LAYOUTS
from tidemill.errors import ConfigError
from tidemill.frontend.parsers import REASONING_PARSERS, TOOL_PARSERS
from tidemill.kv.manager import INDEXES
from tidemill.kv_format import FORMATS, SHORT_NAMES
from tidemill.kv_policy import KINDS
from tidemill.sched.policies import POLICIES
from tidemill.sched.queue import ORDERS

Kind = Literal["text", "integer", "number", "switch", "size"]
ENGINE, ADAPTERS, SERVING, ACCESS, STORAGE, LOGGING = "Engine", "Adapters", "Serving", "Access", "Storage", "Logging"
RAY = "Ray"
_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_EXPECTED = {
    "text": "text that is not empty",
    "integer": "an integer",
    "number": "a number",
    "switch": "true or false",
    "size": "an amount of memory like 512M or 4G",
}
_ENGINE_DEFAULTS = {field.name: field.default for field in fields(EngineOptions)}


@dataclass(frozen=True)
class Option:
    """One thing a user may set. `name` is written with hyphens, as in the flag."""

    name: str
    kind: Kind
    section: str
    help: str
    default: Any = None  # of an engine option: as in EngineOptions
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
        if self.field:
            object.__setattr__(self, "default", _ENGINE_DEFAULTS[self.field])
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
        return fmt_bytes(value) if self.kind == "size" else f"{value:g}" if self.kind == "number" else str(value)

    def read(self, value: object, source: str) -> Any:
        """The value of what a flag, a variable (both text) or a config file (TOML types) gives. `source` is named in errors."""
        if self.is_list:
            parts = value if isinstance(value, (list, tuple)) else [value]
            return tuple(self._read_one(part, source) for part in parts)
        return self._read_one(value, source)

    def _read_one(self, raw: object, source: str) -> Any:
        value: Any = None
        with suppress(ValueError, ConfigError):
            value = self._convert(raw)
        in_range = value is not None and (self.low is None or value >= self.low) and (self.high is None or value <= self.high)
        if in_range and (not self.choices or value in self.choices):
            return value
        shown = "not what it must be" if self.is_secret else repr(raw)
        raise ConfigError(f"{source} is {shown}.", fix=self._allowed + _service_link(raw), param=self.key)

    def _convert(self, value: object) -> Any:
        """None or ValueError: of another kind."""
        text = value.strip() if isinstance(value, str) else None
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if self.kind == "text":
            return dict(self.spellings).get(text or "", text) or None
        if self.kind == "switch":
            return value if isinstance(value, bool) else _SWITCH.get((text or "").lower())
        if self.kind == "size":
            return parse_bytes(text) if text else value if isinstance(value, int) and is_number and value >= 0 else None
        if self.kind == "number":
            return float(text) if text else float(str(value)) if is_number else None
        return int(text) if text else value if isinstance(value, int) and is_number else None

    @property
    def _allowed(self) -> str:
        if self.choices:
            return f"Choose one of {', '.join(self.choices)}."
        words = _EXPECTED[self.kind]
        if self.low is not None:
            words += f" from {self.low:g} to {self.high:g}" if self.high is not None else f", {self.low:g} or more"
        return f"It must be {words}."


def _service_link(value: object) -> str:
    if isinstance(value, str) and value.startswith("tcp://"):
        return " Kubernetes sets this variable for a service named tidemill: set enableServiceLinks to false."
    return ""


OPTIONS = (
    Option(
        "model", "text", ENGINE, field="model",
        help="smollm2, a .gguf file, a folder with config.json and safetensors, or a model of the Hugging Face hub: org/name, or "
        "org/name:Q4_K_M for one quantization of a GGUF repository.",
        short="A .gguf, a folder or org/name.",
    ),
    Option("device", "text", ENGINE, field="device", choices=("auto", *DTYPES), help="Where to compute: auto, cpu or cuda.",
           short="Where to compute: cpu or cuda."),
    Option(
        "dtype", "text", ENGINE, field="dtype", choices=("auto", *DTYPES["cpu"], *DTYPES["cuda"]),
        spellings=(("float", "float32"), ("f32", "float32"), ("bf16", "bfloat16")),
        help="Weights and matmuls: quantized (a quantized checkpoint keeps its 4 or 8 bits; CPU), float32 (CPU), bfloat16 (GPU), "
        "or auto.",
    ),
    Option(
        "quantization", "text", ENGINE, field="quantization", choices=("auto", "none", *QUANTIZATIONS),
        help="Weights on a GPU: auto (a quantized checkpoint stays as it is stored), none (bfloat16), or of a plain checkpoint "
        "fp8 (weights and activations), int8 (both) or int4 (weights), rounded as they are read; sparse24: matrices with two "
        "zeros among four values on sparse tensor cores.",
        short="Weights on a GPU: fp8, int8, int4.",
    ),
    Option(
        "kv-dtype", "text", ENGINE, field="kv_dtype", choices=("auto", *FORMATS),
        spellings=tuple(SHORT_NAMES.items()),
        help="Format of the KV cache: bfloat16; int8, int4 and, on a GPU, fp8 (e4m3), with a scale for each token and head; on a "
        "CPU also float32, float16, and kvquant4 or kvquant3, which --kv-calibration fits to the model; or auto.",
    ),
    Option("kv-calibration", "text", ENGINE, field="kv_calibration", automatic="none",
           help="For --kv-dtype kvquant4 or kvquant3: a file that calibrate-kv has written."),
    Option(
        "load-format", "text", ENGINE, field="load_format", choices=("auto", "dummy"),
        help="auto, or dummy: random weights of the shape in config.json, for benchmarks.",
    ),
    Option("max-context", "integer", ENGINE, field="max_context", low=1, automatic="the model's own, or what the KV memory holds",
           help="Longest prompt plus output, in tokens.",
           short="Longest prompt plus output, in tokens."),
    Option("max-requests", "integer", ENGINE, field="max_requests", low=1, automatic="64; 256 on a GPU",
           help="Slots: sequences computed at the same time; further ones are queued.",
           short="Sequences computed at the same time."),
    Option("token-budget", "integer", ENGINE, field="token_budget", low=1,
           automatic="256; on a GPU 2048, 4096 for a model of up to 4 billion parameters, up to 8192 for one with experts",
           help="Most tokens computed in one step; longer prompts are prefilled in chunks."),
    Option("memory", "size", ENGINE, field="memory_bytes", automatic="what is free",
           help="Most memory for weights, activations and KV cache of a model, like 16G. With --tensor-parallel: of each rank.",
           short="Most memory for a model, like 16G."),
    Option("gpu-memory-utilization", "number", ENGINE, field="gpu_memory_utilization", low=0, high=1, automatic="what is free",
           help="The same as a part of a GPU's memory, like 0.5. On a CPU it has no effect: give --memory."),
    Option("weight-memory", "size", ENGINE, field="weight_memory_bytes", automatic="all of them",
           help="Memory for weights, like 8G, of a model that is larger: what does not fit is read from disk as it is "
           "needed, on a GPU from host memory."),
    Option("weight-cache", "text", ENGINE, field="weight_cache", automatic="~/.cache/tidemill/weights:100G",
           help="With --weight-memory on a CPU: folder and quota, as PATH:SIZE, of the files from which weights are read. On the "
           "fastest disk."),
    Option("hot-neurons", "text", ENGINE, field="hot_neurons", automatic="none",
           help="With --weight-memory on a GPU, of a model with ReLUs: a folder that measure-neurons has written. Neurons that "
           "are used most often are on the GPU, the CPU computes the others from host memory."),
    Option("contextual-sparsity", "text", ENGINE, field="contextual_sparsity", automatic="none",
           help="On a CPU: a folder that train-predictors has written, whose predictors say which neurons and heads are computed "
           "for a token. Faster, and not exact."),
    Option("kv-memory", "size", ENGINE, field="kv_memory_bytes",
           automatic="half of the free memory, at most 4 GiB; all free memory of a GPU",
           help="Memory for the KV cache, like 512M or 4G. With --tensor-parallel: of each process."),
    Option("kv-host-memory", "size", ENGINE, field="kv_host_memory_bytes", automatic="none",
           help="Host memory behind the KV cache, like 8G: cached pages that must make room go there and come back on a hit."),
    Option("kv-disk", "text", ENGINE, field="kv_disk", automatic="none",
           help="A folder and its quota behind that, as PATH:SIZE, like /var/cache/tidemill:20G. Cached pages stay there, also "
           "over a restart."),
    Option("kv-export", "text", ENGINE, field="kv_export", automatic="none",
           help="Where other engines fetch KV pages that this one has computed, and how much memory these take: shm:NAME:SIZE on "
           "one host, tcp:HOST:PORT:SIZE or nixl:HOST:PORT:SIZE between hosts."),
    Option("kv-import", "text", ENGINE, field="kv_import", automatic="none",
           help="Engines whose KV pages are fetched instead of computed, where that is faster: shm:NAME, tcp:HOST:PORT or "
           "nixl:HOST:PORT, with commas between them."),
    Option("kv-key-file", "text", ENGINE, field="kv_key_file", automatic="none",
           help="For tcp: and nixl: of --kv-export and --kv-import: a file with the key that these engines share."),
    Option("page-size", "integer", ENGINE, field="page_size", low=1, high=64, automatic="16; 64 on a GPU, or if states are large",
           help="Tokens per page of the KV cache: a power of two up to 64."),
    Option("speculate", "text", ENGINE, field="speculate", choices=tuple(SPECULATE),
           help="How tokens are guessed ahead, to be verified several at a time; the output is the same with any. "
           "auto: what a grammar forces (forced), else what followed the last tokens before in the request (ngram), where that "
           "saves time. suffix: in other outputs as well. draft-model: by the model that `--draft-model` names.",
           short="How tokens are guessed ahead."),
    Option("draft-model", "text", ENGINE, field="draft_model", automatic="none",
           help="A smaller model with the same tokenizer, as `--model` names one, that guesses tokens ahead."),
    Option("draft-heads", "text", ENGINE, field="draft_heads", automatic="none",
           help="For --speculate medusa, eagle, eagle-tree, exit or exit-bandit: a folder that train-draft has written."),
    Option("max-drafts", "integer", ENGINE, field="max_drafts", low=1, high=64, automatic="8, or 16 on a GPU",
           help="Tokens guessed for a request in a step, at most. 8 also on a GPU with a draft model or heads."),
    Option("adaptive-drafts", "switch", ENGINE, field="adaptive_drafts",
           help="Verify as many of the guessed tokens as measurements say are worth it; off: all of them."),
    Option("acceptance", "text", ENGINE, field="acceptance", choices=ACCEPTANCE,
           help="When a guessed token is taken. exact: if it is the one that is drawn, so the output is the same as without. "
           "rejection (CPU): as in speculative sampling; sampled output is only distributed alike."),
    Option("policy", "text", ENGINE, field="policy", choices=tuple(POLICIES),
           help="How requests share steps: continuous is for serving, the others are for comparison "
           f"({', '.join(name for name in POLICIES if name != 'continuous')})."),
    Option("kv-layout", "text", ENGINE, field="kv_layout", choices=LAYOUTS,
           help="Where keys and values lie. paged: in pages that a page table names. virtual: each slot has an address range of "
           "its own, in which memory is mapped as tokens come."),
    Option("kv-policy", "text", ENGINE, field="kv_policy", automatic="full",
           help="Which tokens of a request stay in the KV cache, if it does not ask for another policy (`kv_policy`): "
           f"{', '.join(KINDS)}, or JSON with its fields, such as {{\"kind\": \"streaming\", \"sinks\": 4, \"recent\": 1020}}."),
    Option("max-stream", "integer", ENGINE, field="max_stream", low=1, high=2**20,
           automatic="8 times the context, at most 131072",
           help="Tokens of a request whose KV policy is window or streaming: it may go on beyond the context."),
    Option("prefix-caching", "switch", ENGINE, field="prefix_caching",
           help="Keep the KV cache of prompts, so that a prefix that was computed before is not computed again."),
    Option("prefix-index", "text", ENGINE, field="prefix_index", choices=tuple(INDEXES),
           help="How a computed prefix is found: hash, by whole pages, or radix, by tokens, also within a page."),
    Option("queue-order", "text", ENGINE, field="queue_order", choices=ORDERS,
           help="Which queued request of a tenant starts next: the first that came, or the one with the longest cached prefix."),
    Option("batch-window", "number", ENGINE, field="batch_window_ms", low=0, high=10_000, automatic="50 with the policy dynamic",
           help="Milliseconds for which the policy dynamic lets a batch form that is not full."),
    Option("evict", "switch", ENGINE, field="evict",
           help="Running requests may be preempted. Off (--no-evict): a request starts only if there are KV pages for its prompt "
           "and max_tokens, and runs to its end."),
    Option("max-pinned", "number", ENGINE, field="max_pinned", low=0, high=0.9,
           help="Part of the KV cache that prompt caches and retained prefixes may hold."),
    Option("session-retention", "number", ENGINE, field="session_retention_s", low=0, high=86_400,
           help="Seconds for which the KV cache of a conversation is kept over others while its tool call is under way; 0: it is "
           "not."),
    Option("threads", "integer", ENGINE, field="threads", low=1, high=256, automatic="the physical cores this process may use",
           help="CPU threads for computing, of each process.",
           short="CPU threads for computing."),
    Option("tensor-parallel", "integer", ENGINE, field="tensor_parallel", low=1, high=MAX_RANKS,
           help="Processes that share every layer of the model: each has some heads and columns, and on a GPU machine a GPU.",
           short="Ranks (GPUs) that share each layer."),
    Option("tensor-layout", "text", ENGINE, field="tensor_layout", choices=TENSOR_LAYOUTS,
           help="How these processes share a layer. 1d: each has some heads and columns. 2d: parts of the hidden size as well. "
           "gathered: each computes some of a step's tokens with weights that it gathers from all. phased: 1d for steps of few "
           "tokens, and like gathered for others, with the bits of 1d. auto: as `plan-layout` says."),
    Option("collectives", "text", ENGINE, field="collectives", choices=COLLECTIVES,
           help="How GPUs that share layers exchange: ipc, through each other's memory, on one host; nccl, also between hosts. "
           "The bits are the same. auto: ipc if all are on one host."),
    Option("pipeline-parallel", "integer", ENGINE, field="pipeline_parallel", low=1, high=MAX_RANKS,
           help="Stages of layers, each in processes of its own. Multiplies with --tensor-parallel."),
    Option("pipeline-layers", "text", ENGINE, field="pipeline_layers", automatic="by the weights that a token is multiplied by",
           help="How many layers each stage has, like 12,18; or a file that measure-layers has written, by whose times stages "
           "take equally long."),
    Option("expert-parallel", "switch", ENGINE, field="expert_parallel",
           help="With --tensor-parallel: each process has some of the experts, instead of a part of each."),
    Option("remote-workers", "integer", ENGINE, field="remote_workers", low=0, high=MAX_RANKS - 1,
           help="So many of these processes come from other hosts: start each with `tidemill worker --join`."),
    Option("workers-address", "text", ENGINE, field="workers_address", automatic="none",
           help="HOST:PORT where they come to, by which other hosts reach this one."),
    Option("workers-key-file", "text", ENGINE, field="workers_key_file", automatic="none",
           help="A file with a key of 16 or more characters, the same on all hosts."),
    Option("data-parallel", "integer", SERVING, field="data_parallel", low=1, high=64,
           help="Engines that serve the model side by side, each with its weights and its KV cache, and with its share of the "
           "cores, or a GPU of its own. A request goes to the one that has its prefix, unless that one is too busy.",
           short="Engines side by side."),
    Option("prefill", "integer", SERVING, field="prefill_engines", low=0, high=64,
           help="Engines that compute prompts up to the first token, beside --decode engines that go on from there: long prompts "
           "do not hold up the tokens of others."),
    Option("decode", "integer", SERVING, field="decode_engines", low=0, high=64,
           help="Engines that go on with requests whose prompts --prefill engines have computed."),
    Option("kv-transfer-memory", "size", SERVING, field="kv_transfer_bytes", automatic="256 MiB",
           help="Shared memory of each --prefill engine, for KV pages on their way to decode engines: at least a prompt's."),
    Option("disaggregate", "text", SERVING, "auto: say whether --prefill and --decode would serve the measured load better.",
           "off", choices=("off", "auto")),
    Option("chat-template", "text", ENGINE, field="chat_template", automatic="the model's own",
           help="A file with a Jinja chat template, the template itself, or a name that llama.cpp knows (chatml, llama3 …)."),
    Option("chat-template-kwargs", "text", ENGINE, field="chat_template_kwargs",
           help="Variables of the chat template as JSON, if a request does not give them, like '{\"enable_thinking\": false}'."),
    Option("fast-math", "switch", ENGINE, field="fast_math",
           help="On a GPU: use cuBLAS matmuls and flash-attn-4 where they are faster. Not batch-invariant. Refused on "
           "a CPU."),
    Option("nano-batching", "text", ENGINE, field="nano_batching", choices=("auto", "on", "off"),
           help="On a GPU: steps in two halves, so that one half's attention runs beside the other's matmuls. auto: at the sizes "
           "where a trial at start is at least 2 % faster. Tokens are the same."),
    Option("sampling-defaults", "text", ENGINE, field="sampling_defaults",
           help="Sampling parameters of requests that do not give them: the model's own, neutral (temperature 1), or JSON for "
           "some of them, like '{\"temperature\": 0.7}'; the others are then the model's."),
    Option("default-max-tokens", "integer", ENGINE, field="default_max_tokens", low=0,
           automatic="the model's max_new_tokens; 1024 below a billion parameters, else 16384",
           help="Most tokens of an answer to a request without max_tokens; 0: up to the end of the context."),

    Option("lora", "text", ADAPTERS, field="loras", is_list=True,
           help="A LoRA adapter, as NAME=PATH of a folder that PEFT has saved. Requests for the model NAME use it.",
           short="A LoRA adapter, as NAME=PATH."),
    Option("max-loras", "integer", ADAPTERS, field="max_loras", low=1, automatic="those given, at least 8; none without any",
           help="Adapters in memory at the same time. Further ones are read when they are asked for, in the place of the least "
           "recently used."),
    Option("max-lora-rank", "integer", ADAPTERS, field="max_lora_rank", low=1, high=MAX_LORA_RANK, automatic="64",
           help="Highest rank of an adapter; a GPU reserves memory for it."),

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
    Option("served-name", "text", SERVING, field="served_name", automatic="the model as given",
           help="The model's name in the API: what clients send as model. More names may follow, with commas between them.",
           short="The model's name in the API."),
    Option("memory-budget", "size", SERVING, automatic="what is free at the start",
           help="Memory for all models of the server together; those that do not fit beside others are swapped on demand."),
    Option("max-loaded", "integer", SERVING, low=1, automatic="as many as fit",
           help="Most models that are loaded at the same time."),
    Option("idle-unload", "number", SERVING, low=0, automatic="never",
           help="Unload a model after so many seconds without a request; the next request loads it again."),
    Option("structured-backend", "text", SERVING, field="structured_backend", choices=("llguidance", "xgrammar"),
           help="Library for structured output: llguidance, or xgrammar (slower, and only for trusted clients)."),
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
    Option("max-queued", "integer", SERVING, field="max_waiting", low=1,
           help="Most queued requests; further ones are refused with status 429."),
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
