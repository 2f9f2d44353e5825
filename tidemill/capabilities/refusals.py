"""The cells of the capability table that are not yes: what cannot be used together, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType

from tidemill.capabilities.features import (
    CALIBRATED,
    FEATURES,
    HEADS,
    KINDS_OF_LAYERS,
    POLICIES,
    SCALED,
)
from tidemill.errors import ConfigError, InvalidRequest
from tidemill.types.coverage import SHARED, UNEQUAL
from tidemill.types.kv_format import FORMATS, ON_DEVICE

Names = str | tuple[str, ...]  # of features; several have the same reason


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """`feature` is what is asked for, and what an error is about."""

    feature: str
    others: frozenset[str]  # that are in use with it
    needed: tuple[str, ...]  # one of these would do; with them, `others` may be empty
    why: str
    fix: str
    is_left_out: bool  # the engine goes on without the feature, and says why

    def holds(self, names: frozenset[str]) -> bool:
        """Tells if the feature cannot be in use with these."""
        return self.others <= names and (not self.needed or names.isdisjoint(self.needed))

    def message(self, notes: Mapping[str, str]) -> str:
        words = FEATURES[self.feature].words
        words = words[0].upper() + words[1:] if " " in words else words
        if self.needed:
            needed = " or ".join(FEATURES[name].words for name in self.needed)
            return f"{words} needs {needed}: {self.why}."
        others = [
            FEATURES[name].words + (f" ({notes[name]})" if notes.get(name) else "")
            for name in FEATURES
            if name in self.others
        ]
        return f"{words} cannot be combined with {' and '.join(others)}: {self.why}."

    def error(
        self,
        kind: type[ConfigError | InvalidRequest],
        notes: Mapping[str, str] = MappingProxyType({}),
    ) -> ConfigError | InvalidRequest:
        return kind(self.message(notes), fix=self.fix, param=FEATURES[self.feature].param or None)


def _no(
    features: Names, others: Names, why: str, fix: str = "", *, on: str = "", left_out: bool = False
) -> Iterator[Refusal]:
    """The features cannot be used with any of the others. `on`: a device, if only there."""
    for feature, other in product(_several(features), _several(others)):
        yield Refusal(
            feature=feature,
            others=frozenset({other, on} - {""}),
            needed=(),
            why=why,
            fix=fix or f"Leave {_flag(feature)} out.",
            is_left_out=left_out,
        )


def _needs(
    features: Names, needed: Names, why: str, fix: str, *, on: str = ""
) -> Iterator[Refusal]:
    """The features are of use only with one of those that are needed."""
    for feature in _several(features):
        yield Refusal(
            feature=feature,
            others=frozenset({on} - {""}),
            needed=_several(needed),
            why=why,
            fix=fix,
            is_left_out=False,
        )


def _several(names: Names) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _flag(name: str) -> str:
    return FEATURES[name].words.partition(" ")[0] if FEATURES[name].words.startswith("--") else "it"


_HEADS = tuple(f"speculate {name}" for name in HEADS)
_EXITS = ("speculate exit", "speculate exit-bandit")
_GIVEN = tuple(f"speculate {name}" for name in ("forced", "ngram", "suffix", *HEADS, "draft-model"))
_QUANTIZED = tuple(f"quantization {kind}" for kind in ("fp8", "int8", "int4", "sparse24"))
_LAYOUTS = ("tensor-layout 2d", "tensor-layout gathered", "tensor-layout phased")
_KV_POLICIES = tuple(f"kv-policy {kind}" for kind in POLICIES)
_KINDS = ("window", *KINDS_OF_LAYERS)
_UNUSUAL = (*UNEQUAL, SHARED)
_TIERS = ("kv-host-memory", "kv-disk")
_PEERS = ("kv-export", "kv-import")
_ROLES = ("prefill", "decode")


def _formats(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"kv-dtype {name}" for name in names)


def _not_on(device: str) -> tuple[str, ...]:
    return _formats(tuple(name for name in FORMATS if name not in ON_DEVICE[device]))


_FOUR_BITS = _formats(tuple(name for name in FORMATS if FORMATS[name].bits < 8))
_NOT_PLAIN = _formats(tuple(name for name in FORMATS if name not in ("float32", "bfloat16")))
_NO_COMPILER = "they are multiplied by compiled code"
_COMPILE = "Install again with a C compiler, or leave {} out."

_WEIGHTS = (
    *_no(
        "dtype quantized",
        "GPU",
        "tensor cores multiply bfloat16, and a quantized checkpoint stays quantized by itself",
        "Choose auto, bfloat16.",
    ),
    *_no("dtype float32", "GPU", "tensor cores multiply bfloat16", "Choose auto, bfloat16."),
    *_no("dtype bfloat16", "CPU", "it adds in float32", "Choose auto, float32, quantized."),
    *_no(
        "dtype quantized",
        "no kernels",
        "they multiply 4- and 8-bit weights",
        "Install with a C compiler, or use --dtype float32.",
    ),
    *_no(
        "dtype quantized",
        "plain checkpoint",
        "it is for quantized checkpoints",
        "Use --dtype float32.",
    ),
    *_no(
        _QUANTIZED,
        "CPU",
        "weights are quantized while they are read on GPUs only",
        "Use a quantized checkpoint, or make one: tidemill quantize.",
    ),
    *_no(
        _QUANTIZED,
        "quantized checkpoint",
        "it is for plain checkpoints",
        "Leave --quantization out, or use the checkpoint it was made of.",
    ),
    *_no("weight-memory", "kv-layout virtual", "streamed steps read pages", on="GPU"),
    *_no(
        "weight-memory",
        _HEADS,
        "draft heads are in CUDA graphs, and streamed steps are none",
        on="GPU",
    ),
    *_no("weight-memory", "ranks", "each rank has its part of the weights in memory"),
    *_no("weight-memory", "encoder", "an encoder's weights are all in memory"),
    *_no(
        "weight-memory",
        "no kernels",
        "they read weights from disk",
        _COMPILE.format("--weight-memory"),
        on="CPU",
    ),
    *_no(
        "hot-neurons",
        "no ReLU",
        "its neurons are hardly ever zero",
        "Leave --hot-neurons out: --weight-memory alone streams whole layers.",
    ),
    *_no(
        "hot-neurons",
        ("no gate", "experts"),
        "neurons are divided in plain gated feed-forwards",
        "Leave --hot-neurons out: --weight-memory alone streams whole layers.",
    ),
    *_no(
        "hot-neurons",
        "CPU",
        "nothing is divided there",
        "Leave --hot-neurons out: --weight-memory alone reads the neurons that are not zero from "
        "disk.",
    ),
    *_no(
        "hot-neurons",
        "quantized weights",
        "neurons are rows of plain matrices",
        "Leave --quantization out, or use the checkpoint it was made of.",
    ),
    *_no("hot-neurons", "lora", "adapters add to whole feed-forwards"),
    *_needs(
        "hot-neurons",
        "weight-memory",
        "all neurons are on the GPU without it",
        "Say how much of the GPU's memory weights may take with --weight-memory.",
    ),
    *_no(
        "hot-neurons",
        "no kernels",
        "the CPU computes the other neurons",
        _COMPILE.format("--hot-neurons"),
    ),
    *_no(
        "contextual-sparsity",
        "GPU",
        "neurons and heads are chosen on CPUs only",
        "Add --device cpu.",
    ),
    *_no(
        "contextual-sparsity",
        "quantized weights",
        "it takes weights as plain numbers",
        "Add --dtype float32.",
    ),
    *_no("contextual-sparsity", "ranks", "each rank would choose its own neurons"),
    *_no("contextual-sparsity", "weight-memory", "both say which neurons are read"),
    *_no("contextual-sparsity", "lora", "adapters add to whole layers"),
    *_no(
        "contextual-sparsity",
        ("encoder", "experts", "no gate", "states"),
        "predictors are of plain attention and plain gated feed-forwards",
    ),
    *_no(
        "contextual-sparsity",
        "no kernels",
        "they compute the chosen neurons",
        _COMPILE.format("--contextual-sparsity"),
    ),
    *_no(
        "lora",
        "encoder",
        "adapters of encoders do not run on a GPU yet",
        "Use --device cpu.",
        on="GPU",
    ),
)

_CACHE = (
    *_no("kv-dtype", "no KV cache", "there is nothing to store"),
    *_no(
        _not_on("cpu"),
        "CPU",
        "the kernels of cpu do not have it",
        f"Choose one of auto, {', '.join(ON_DEVICE['cpu'])}.",
    ),
    *_no(
        _not_on("cuda"),
        "GPU",
        "the kernels of cuda do not have it",
        f"Choose one of auto, {', '.join(ON_DEVICE['cuda'])}.",
    ),
    *_no(
        _formats(SCALED),
        "encoder",
        "an encoder keeps no keys and values from step to step",
        "Leave --kv-dtype out.",
    ),
    *_no(
        _formats(SCALED),
        "heads below 32",
        "on a GPU heads must have at least 32 dimensions",
        "Leave --kv-dtype out.",
        on="GPU",
    ),
    *_no(
        "kv-dtype int4",
        "heads below 64",
        "on a GPU heads must have at least 64 dimensions",
        "Use --kv-dtype int8.",
        on="GPU",
    ),
    *_no(
        "kv-dtype int4",
        "partial rotation",
        "on a GPU rotation must be of whole heads",
        "Use --kv-dtype int8.",
        on="GPU",
    ),
    *_no(_FOUR_BITS, "odd heads", "two values share a byte", "Use --kv-dtype int8."),
    *_no(
        _formats(CALIBRATED),
        "heads of no eighths",
        "it takes heads of a multiple of 8",
        "Use --kv-dtype int8.",
    ),
    *_no(
        _formats(SCALED),
        "FlexAttention",
        "torch's FlexAttention does not read keys and values with scales",
        "Leave --kv-dtype out.",
    ),
    *(
        refusal
        for kind in CALIBRATED
        for refusal in _needs(
            f"kv-dtype {kind}",
            "kv-calibration",
            "it is fitted to a model",
            f"Make a calibration with: tidemill calibrate-kv MODEL --bits {FORMATS[kind].bits} -o "
            f"FILE, and give it with "
            "--kv-calibration FILE.",
        )
    ),
    *_needs(
        "kv-calibration",
        _formats(CALIBRATED),
        "other formats have no constants of a model",
        "Give that, or leave --kv-calibration out.",
    ),
    *_no(
        _UNUSUAL,
        "GPU",
        "the kernels there read keys and values of one size, of each layer its own",
        "Use --device cpu.",
    ),
    *_no(
        _formats(SCALED),
        _UNUSUAL,
        "pages with scales hold layers that are all alike",
        "Leave --kv-dtype out.",
    ),
    *_no(
        "kv-layout virtual",
        _UNUSUAL,
        "an address range holds layers that are all alike",
        "Use --kv-layout paged.",
    ),
    *_no(
        "FlexAttention",
        "states",
        "it does not compute layers with states beside it",
        "Use --device cpu.",
    ),
    *_no(
        "kv-layout virtual",
        "encoder",
        "an encoder keeps no keys and values",
        "Use --kv-layout paged.",
    ),
    *_no("kv-layout virtual", "states", "they lie in pages", "Use --kv-layout paged."),
    *_no(
        "kv-layout virtual",
        "window",
        "they give back pages in the middle of a row",
        "Use --kv-layout paged.",
    ),
    *_no(
        "kv-layout virtual",
        _NOT_PLAIN[1:],
        "such keys and values have their scales in the page",
        "Use --kv-layout paged.",
    ),
    *_no(
        "kv-layout virtual",
        (*_TIERS, *_PEERS),
        "what is behind the cache takes pages of one pool",
        "Use --kv-layout paged.",
    ),
    *_no(
        "kv-layout virtual",
        _EXITS,
        "drafts of the first layers read pages",
        "Use --kv-layout paged.",
    ),
    *_no("kv-layout virtual", "fast-math", "its kernels read pages", "Use --kv-layout paged."),
    *_no(
        "kv-layout virtual",
        "not Linux",
        "memory can be mapped at several addresses on Linux only",
        "Use --kv-layout paged.",
        on="CPU",
    ),
    *_no(
        "kv-layout virtual",
        _HEADS,
        "draft heads are in graphs of paged attention",
        "Use --kv-layout paged.",
        on="GPU",
    ),
    *_no(
        "kv-layout virtual",
        "lora",
        "LoRA adapters of a GPU are in graphs of paged attention",
        "Use --kv-layout paged.",
        on="GPU",
    ),
    *_no(
        "kv-layout virtual",
        _KINDS,
        "the contiguous attention kernel does not have it",
        "Use --kv-layout paged.",
        on="GPU",
    ),
    *_no(
        "kv-layout virtual",
        "heads of no power",
        "they are not entered into the cache by a kernel of ours",
        "Use --kv-layout paged.",
        on="GPU",
    ),
    *_no(_KV_POLICIES, "encoder", "an encoder keeps no tokens", "Leave kv_policy out."),
    *_no(
        _KV_POLICIES,
        "states",
        "this model's states of constant size keep no tokens that could be given up",
        "Leave kv_policy out.",
    ),
    *_no(_KV_POLICIES, _KINDS, "KV policies do not know such layers", "Leave kv_policy out."),
    *_no(
        _KV_POLICIES,
        "learned positions",
        "this model has learned its positions; KV policies need rotary ones",
        "Leave kv_policy out.",
    ),
    *_no(
        _KV_POLICIES,
        "shared KV heads",
        "there are more ranks than KV heads: none sees all of the attention that a key gets",
        "Leave kv_policy out.",
    ),
    *_no(
        _KV_POLICIES,
        _NOT_PLAIN,
        "KV policies take keys in float32 or bfloat16",
        "Leave kv_policy out.",
    ),
    *_no(_KV_POLICIES, "kv-layout virtual", "KV policies need pages", "Leave kv_policy out."),
    *_no(
        _KV_POLICIES,
        "no-evict",
        "what a policy's copies of shared pages take is not reserved, and nothing is preempted "
        "(--no-evict)",
        "Leave kv_policy out.",
    ),
    *_no(
        _KV_POLICIES,
        "no kv-policy",
        "on a GPU they take memory of their own and are there if the server has --kv-policy "
        "(full: requests choose)",
        "Leave kv_policy out.",
        on="GPU",
    ),
    *_no(
        _KV_POLICIES,
        "FlexAttention",
        "torch's FlexAttention does not tell what attention each key gets",
        "Leave kv_policy out.",
    ),
    *_no(
        _KV_POLICIES,
        _HEADS,
        "on a GPU this drafter does not know KV policies",
        "Leave kv_policy out.",
        on="GPU",
    ),
    *_no("kv-policy double", "GPU", "it is computed on a CPU only", "Use quest."),
    *_no(
        _KV_POLICIES,
        "ranks",
        "several ranks compute them on CPUs only, with the compiled kernels",
        "Leave kv_policy out.",
        on="GPU",
    ),
    *_no(
        _KV_POLICIES,
        "ranks",
        "several ranks compute them on CPUs only, with the compiled kernels",
        "Leave kv_policy out.",
        on="no kernels",
    ),
    *_no(
        "prefix-caching", "encoder", "a token of an encoder sees those after it, too", left_out=True
    ),
    *_no(
        "queue-order prefix",
        ("no-prefix-caching", "encoder"),
        "there is no prefix caching",
        "Use --queue-order arrival, or a model and options with prefix caching.",
    ),
    *_no((*_TIERS, *_PEERS), "encoder", "an encoder keeps nothing", left_out=True),
    *_no(
        _TIERS,
        "no-prefix-caching",
        "there is no prefix caching, and no page could be found again",
        "Leave it out, or use a model and options with prefix caching.",
    ),
    *_no(
        _PEERS,
        "no-prefix-caching",
        "there is no prefix caching, and no page could be found by its content",
        "Leave it out, or use a model and options with prefix caching.",
    ),
    *_no(
        _TIERS,
        "prefix-index radix",
        "by the keys of the prefix index hash pages are found in host memory and on disk",
        "Leave --prefix-index out.",
    ),
    *_no(
        _PEERS,
        "prefix-index radix",
        "engines know pages by the keys of the prefix index hash",
        "Leave --prefix-index out.",
    ),
    *_no(
        "prompt caches",
        ("no-prefix-caching", "encoder", "no-pinned"),
        "this server pins nothing",
        "Serve with --max-pinned above 0 and with prefix caching.",
    ),
)

_STEPS = (
    *_no("fast-math", "CPU", "it chooses among kernels of GPUs"),
    *_no(
        "flash-attn-4",
        _formats(SCALED),
        "it does not read keys and values with scales",
        left_out=True,
    ),
    *_no("flash-attn-4", "weight-memory", "weights are streamed", left_out=True),
    *_no(
        "flash-attn-4",
        ("states", "FlexAttention"),
        "it is not for this model's layers",
        left_out=True,
    ),
    *_no("nano-batching", "CPU", "it overlaps kernels of GPUs"),
    *_no(
        "nano-batching", ("kv-layout virtual", "FlexAttention"), "attention is not by our kernels"
    ),
    *_no("nano-batching", "weight-memory", "weights are streamed"),
    *_no(
        "nano-batching",
        ("experts", "states"),
        "experts and states are counted and kept for a whole step",
    ),
    *_no("nano-batching", "mixed windows", "layers keep different tokens"),
    *_no("nano-batching", _HEADS, "draft heads look at a step's hidden states"),
    *_needs(
        "batch-window",
        "policy dynamic",
        "other policies wait for no batch",
        "Leave --batch-window out, or use --policy dynamic.",
    ),
    *_no("speculation", "encoder", "the model generates nothing", left_out=True),
    *_no(
        "speculation",
        "states",
        "states of constant size cannot be taken back where a draft was wrong",
        left_out=True,
    ),
    *_no(
        _GIVEN,
        "states",
        "states of constant size cannot be taken back where a draft was wrong",
        "Use --speculate off.",
    ),
    *_needs(
        "draft-model",
        "speculate draft-model",
        "other drafters do not use it",
        "Give --draft-model PATH together with --speculate draft-model.",
    ),
    *_needs(
        "speculate draft-model",
        "draft-model",
        "it drafts",
        "Give --draft-model PATH together with --speculate draft-model.",
    ),
    *(
        refusal
        for name in HEADS
        for refusal in _needs(
            f"speculate {name}",
            "draft-heads",
            "it drafts by trained heads",
            f"Give --draft-heads FOLDER; tidemill train-draft MODEL --kind "
            f"{name.partition('-')[0]} makes one.",
        )
    ),
    *_needs(
        "draft-heads",
        _HEADS,
        "other drafters do not use them",
        f"Give --draft-heads together with --speculate {', '.join(HEADS[:-1])} or {HEADS[-1]}.",
    ),
    *_no(
        "draft trees",
        ("FlexAttention", *_formats(SCALED), "lora"),
        "its attention does not read paths of a tree",
        on="GPU",
        left_out=True,
    ),
    *_no("acceptance rejection", "GPU", "it is for the CPU only", "Use --acceptance exact."),
    *_no(
        "acceptance rejection",
        ("speculate off", "encoder", "states"),
        "no tokens are guessed",
        "Use --acceptance exact, or a model and --speculate with a drafter.",
    ),
)

_ALONE = "Leave one of them out."
_RANKS = (
    *_no("ranks", "quantization sparse24", "sparse matrices are not divided", _ALONE, on="GPU"),
    *_no("pipeline-parallel", "nano-batching", "stages overlap by themselves", _ALONE, on="GPU"),
    *_no("pipeline-parallel", "states", "stages of GPUs have no states", _ALONE, on="GPU"),
    *_no(
        "pipeline-parallel",
        SHARED,
        "a layer and the one whose cache it reads may be in two stages",
        _ALONE,
    ),
    *_no(_LAYOUTS, _UNUSUAL, "rows become heads of layers that are all alike", _ALONE),
    *_no("ranks", "encoder", "encoders are not divided", "Use --data-parallel."),
    *_no("ranks", "kv-layout virtual", "ranks read pages", _ALONE),
    *_no("ranks", _TIERS, "tiers of GPUs are of one rank", _ALONE, on="GPU"),
    *_no("ranks", "NIXL", "ranks exchange pages through shared memory and TCP", _ALONE),
    *_no("ranks", _PEERS, "KV pages of other engines go to one GPU", _ALONE, on="GPU"),
    *_no("ranks", "kv-calibration", "a calibration is of whole layers", _ALONE),
    *_no("ranks", "lora", "adapters of GPUs are not divided", _ALONE, on="GPU"),
    *_no("ranks", _HEADS, "draft heads look at a whole model", _ALONE),
    *_no("ranks", "fast-math", "ranks must choose the same kernels", _ALONE),
    *_needs(
        "expert-parallel",
        "ranks",
        "experts are divided among ranks",
        "Give --tensor-parallel as well.",
    ),
    *_no("expert-parallel", "no experts", "there are none to be divided"),
    *_needs(
        _LAYOUTS,
        "tensor-parallel",
        "it divides layers among ranks",
        "Give --tensor-parallel as well.",
    ),
    *_no(_LAYOUTS, "GPU", "it is a layout of CPUs", _ALONE),
    *_no(_LAYOUTS, "pipeline-parallel", "it is for one stage", _ALONE),
    *_no(_LAYOUTS, "expert-parallel", "it divides each expert", _ALONE),
    *_no(_LAYOUTS, "lora", "adapters are divided by heads and columns", _ALONE),
    *_no(
        ("tensor-layout 2d", "tensor-layout phased"),
        ("experts", "states"),
        "it divides attention and dense feed-forwards",
        _ALONE,
    ),
    *_no("tensor-layout 2d", "no grid", "ranks are rows and columns of one", _ALONE),
    *_no(
        ("tensor-layout gathered", "tensor-layout phased"),
        "no kernels",
        "they gather weights",
        _ALONE,
    ),
    *_no(
        "tensor-layout phased",
        "remote-workers",
        "ranks read each other's weights in memory",
        _ALONE,
    ),
    *_needs(
        ("collectives ipc", "collectives nccl"),
        "tensor-parallel",
        "it is for GPUs that share layers",
        "Leave it out, or give --device cuda and --tensor-parallel.",
    ),
    *_no(
        ("collectives ipc", "collectives nccl"),
        "CPU",
        "it is for GPUs that share layers",
        "Leave it out, or give --device cuda and --tensor-parallel.",
    ),
    *_needs(
        "pipeline-layers",
        "pipeline-parallel",
        "there is one stage",
        "Give --pipeline-parallel as well, or leave it out.",
    ),
    *_no(
        "remote-workers",
        _PEERS,
        "KV pages of other engines are in this host's memory",
        "Leave --kv-export and --kv-import out.",
    ),
    *_needs(
        "remote-workers",
        "ranks",
        "the others come from there",
        "At least rank 0 is on this host: give fewer, or raise --tensor-parallel or "
        "--pipeline-parallel.",
    ),
    *_needs(
        "remote-workers", "workers-address", "other hosts come to it", "Give --workers-address."
    ),
    *_needs(
        "remote-workers",
        "workers-key-file",
        "other hosts show that they know it",
        "Give --workers-key-file.",
    ),
)

_NO_PAGES = "KV pages cannot go from prefill engines to decode engines"
_ENGINES = (
    *_needs(
        "kv-transfer-memory",
        _ROLES,
        "it is of prefill engines",
        "Add --prefill and --decode, or leave it out.",
    ),
    *_needs(
        "prefill",
        "decode",
        "prompts are gone on with there",
        "Give both, like --prefill 1 --decode 1, or neither.",
    ),
    *_needs(
        "decode",
        "prefill",
        "prompts are computed there",
        "Give both, like --prefill 1 --decode 1, or neither.",
    ),
    *_no(
        _ROLES,
        "data-parallel",
        "engines are either alike or have roles",
        "Leave out --data-parallel: --prefill and --decode say how many engines there are.",
    ),
    *_no(
        _ROLES,
        "replicas",
        "engines on the cluster are either alike or have roles",
        "Leave out --replicas and --autoscale: --prefill and --decode say how many engines there "
        "are.",
    ),
    *_no(
        _ROLES,
        "remote-workers",
        "engines with roles cannot share workers of other hosts",
        "Start a server on each host, and put `tidemill route` before them.",
    ),
    *_no(
        _ROLES,
        ("no-prefix-caching", "prefix-index radix", "kv-layout virtual", *_PEERS),
        _NO_PAGES,
        "Leave it out, or --prefill and --decode.",
    ),
    *_no(
        _ROLES,
        "encoder",
        "an encoder does not decode: it has no use for roles",
        "Serve it with --data-parallel.",
    ),
    *_no(
        (*_ROLES, "data-parallel"),
        "ranks",
        "several engines share no GPUs with several ranks yet",
        "Start a server for each group of GPUs, and put `tidemill route` before them.",
        on="GPU",
    ),
    *_no(
        "LLM",
        (*_ROLES, "data-parallel"),
        "it has no others",
        "Serve the model with --data-parallel or --prefill and --decode, or make an LLM in each "
        "of several processes.",
    ),
    *_no(
        (*_ROLES, "data-parallel", "ray"),
        ("several models", "unloading"),
        "several engines are for a single model that stays loaded",
        "Serve one model, without --memory-budget, --max-loaded and --idle-unload, or start a "
        "server for each model.",
    ),
    *_no(
        "remote-workers",
        ("several models", "unloading"),
        "workers of other hosts are for a single model that stays loaded: they end when it is "
        "unloaded",
        "Leave --idle-unload, --max-loaded and --memory-budget out, or --remote-workers.",
    ),
    *_no(
        "ray",
        "data-parallel",
        "replicas are engines of one model",
        "Serve one model, with --replicas instead of --data-parallel.",
    ),
)

_OF_SAMPLING = (
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_word_ids",
    "grammar",
    "reasoning",
)
_REQUESTS = (
    *_no(
        _KV_POLICIES,
        ("pooling", "beams"),
        "it is for outputs that are sampled",
        "Leave one of them out.",
    ),
    *_no(
        _OF_SAMPLING,
        "beams",
        "beams are the most likely outputs of the model itself",
        "Leave one of them out.",
    ),
    *_no(("stop", "stop_regex"), "beams", "beams end at tokens", "Use stop_token_ids."),
    *_no(
        ("logprob_token_ids", "prompt_logprobs", "pooling"),
        "beams",
        "beams have logprobs of their own",
        "Leave one of them out.",
    ),
    *_no("beams", "stream", "the beams are known only at the end", "Leave stream out."),
    *_no("best_of", "stream", "the best sample is known only at the end", "Leave one of them out."),
    *_no(
        "beams",
        "no-evict",
        "beams preempt each other, which this server does not do",
        "Sample with n instead, or serve without --no-evict.",
    ),
    *_no(
        "post_sampling_probs",
        "GPU",
        "its sampler gives the model's own",
        "Leave post_sampling_probs out.",
    ),
    *_no(
        "loading adapters",
        "autoscale",
        "a replica that is started later would not have it",
        "Serve with --lora.",
    ),
    *_needs(
        "loading adapters",
        "lora",
        "the engine has reserved no memory for adapters",
        "Start it with --max-loras, or with --lora NAME=PATH.",
    ),
)

REFUSALS = (*_ENGINES, *_RANKS, *_WEIGHTS, *_CACHE, *_STEPS, *_REQUESTS)
