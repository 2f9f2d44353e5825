"""Flags of vLLM, SGLang and llama.cpp: what stands for each of them here, so that their command lines work or say why not."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from typer.core import TyperCommand

from tidemill.config import STORED_FORMATS
from tidemill.errors import ConfigError

VLLM, SGLANG, LLAMA = "vLLM", "SGLang", "llama.cpp"
_GPU_SHARE = 0.8  # at least this part of a GPU is what is taken anyway


@dataclass(frozen=True)
class Foreign:
    """One flag of another program, under all its names.

    `ours`: flags with the same meaning, of which a command has one; a value follows. `inside`: an option of ours that is a JSON
    object, and the member that the value is. `stands_for`: what each value means, as arguments of ours. Without any of these the
    flag has no effect on answers and is accepted with a note, or it is refused; `why` gives the reason for both.
    """

    names: str
    source: str
    ours: tuple[str, ...] = ()
    why: str = ""
    takes_value: bool = True
    automatic: tuple[str, ...] = ()  # values that mean: not given
    accepted: tuple[str, ...] | None = None  # without `ours`: the values that have no effect; None: all
    is_refused: bool = False
    inside: tuple[str, str] = ("", "")
    stands_for: dict[str, tuple[str, ...]] = field(default_factory=dict)
    several: bool = False  # one value may be a list with commas
    is_optional: bool = False  # a command without `ours` goes on, with a note

    @property
    def flags(self) -> list[str]:
        return self.names.split()


def _same(names: str, source: str, *ours: str, why: str = "", automatic: tuple[str, ...] = ()) -> Foreign:
    return Foreign(names, source, ours, why, automatic=automatic)


def _sampling(names: str, source: str, member: str, *ours: str, automatic: tuple[str, ...] = ()) -> Foreign:
    """A sampling parameter: of the command itself, or what requests get that do not give it."""
    return Foreign(names, source, ours, inside=("--sampling-defaults", member), automatic=automatic)


def _choice(names: str, source: str, why: str = "", **stands_for: tuple[str, ...]) -> Foreign:
    return Foreign(names, source, why=why, stands_for={name.replace("_", "-"): args for name, args in stands_for.items()})


def _switch(names: str, source: str, ours: str) -> Foreign:
    return Foreign(names, source, (ours,), takes_value=False)


def _no_effect(
    names: str, source: str, why: str, *, takes_value: bool = False, accepted: tuple[str, ...] | None = None
) -> Foreign:
    return Foreign(names, source, why=why, takes_value=takes_value or accepted is not None, accepted=accepted)


def _refused(names: str, source: str, why: str, *, takes_value: bool = True) -> Foreign:
    return Foreign(names, source, why=why, takes_value=takes_value, is_refused=True)


_ONE = ("1",)
_ONE_DEVICE = "the model runs on one device"
FOREIGN = (
    _same("--max-model-len", VLLM, "--max-context", automatic=("-1", "auto")),
    _same("-c --ctx-size", LLAMA, "--max-context", automatic=("0",), why="Of each request: it is not divided among slots."),
    _same("--max-num-seqs", VLLM, "--max-requests"),
    _same("-np --parallel", LLAMA, "--max-requests", automatic=("-1",)),
    _same("--max-num-batched-tokens", VLLM, "--token-budget"),
    _same("--block-size", VLLM, "--page-size"),
    _same("--kv-cache-memory-bytes", VLLM, "--kv-memory"),
    _same("--served-model-name", VLLM, "--served-name"),
    _same("--uds", VLLM, "--unix-socket"),
    _same("-a --alias", LLAMA, "--served-name"),
    _same("-m --model", f"{VLLM}, {LLAMA}", "--model", "MODEL"),
    _same("-hf -hfr --hf-repo", LLAMA, "--model", "MODEL"),
    _same("-t", LLAMA, "--threads", automatic=("-1",), why="In generate and chat, -t is the temperature."),
    _same("--chat-template-file", LLAMA, "--chat-template"),
    _same("--default-chat-template-kwargs", VLLM, "--chat-template-kwargs"),
    _choice("-rea --reasoning", LLAMA, auto=(), on=("--chat-template-kwargs", '{"enable_thinking": true}'),
            off=("--chat-template-kwargs", '{"enable_thinking": false}', "--thinking-token-budget", "0")),
    _same("--reasoning-budget", LLAMA, "--thinking-token-budget", automatic=("-1",)),
    Foreign("--reasoning-effort", LLAMA, inside=("--chat-template-kwargs", "reasoning_effort"), automatic=("default",)),
    _choice("--reasoning-format", LLAMA, auto=(), deepseek=(), none=("--reasoning-parser", "none")),
    _same("--tool-call-parser", f"{VLLM}, {SGLANG}", "--tool-parser"),
    _same("-n --predict --n-predict", LLAMA, "--max-tokens", "--default-max-tokens", automatic=("-1",)),
    _sampling("--temp --temperature", LLAMA, "temperature", "--temperature"),
    _sampling("--top-k", LLAMA, "top_k", "--top-k"),
    _sampling("--top-p", LLAMA, "top_p", "--top-p"),
    _sampling("--min-p", LLAMA, "min_p"),
    _sampling("--repeat-penalty", LLAMA, "repetition_penalty", "--repetition-penalty"),
    _sampling("--repeat-last-n", LLAMA, "repeat_last_n"),
    _choice("--generation-config", VLLM, auto=(), vllm=("--sampling-defaults", "neutral")),
    _same("--override-generation-config", VLLM, "--sampling-defaults"),
    Foreign("-s --seed", f"{LLAMA}, {VLLM}, {SGLANG}", ("--seed",), automatic=("-1",),
            why="a seed is part of a request, or of --sampling-defaults", is_optional=True),
    _same("-md --model-draft --spec-draft-model -hfd -hfrd --hf-repo-draft --spec-draft-hf", LLAMA, "--draft-model"),
    _same("--draft --draft-n --draft-max --spec-draft-n-max", LLAMA, "--max-drafts"),
    _same("--ssl-key-file --ssl-keyfile", f"{LLAMA}, {VLLM}", "--tls-key"),
    _same("--ssl-cert-file --ssl-certfile", f"{LLAMA}, {VLLM}", "--tls-cert"),
    _same("--ssl-ca-certs", VLLM, "--tls-client-ca"),
    _same("--api-prefix", LLAMA, "--root-path"),
    _same("--sleep-idle-seconds", LLAMA, "--idle-unload", automatic=("-1",)),
    _same("--models-max", LLAMA, "--max-loaded", automatic=("0",)),
    Foreign("--cors-origins", LLAMA, ("--allowed-origin",), several=True),
    _switch("--webui", LLAMA, "--ui"),
    _switch("--no-webui", LLAMA, "--no-ui"),
    _same("-sys --system-prompt", f"{LLAMA}, {VLLM}", "--system"),
    _switch("--enable-prefix-caching", VLLM, "--prefix-caching"),
    _switch("--no-enable-prefix-caching", VLLM, "--no-prefix-caching"),
    _switch("--cache-prompt", LLAMA, "--prefix-caching"),
    _switch("--no-cache-prompt", LLAMA, "--no-prefix-caching"),
    _switch("--enable-log-requests", VLLM, "--request-log"),
    _switch("--disable-log-requests --no-enable-log-requests", VLLM, "--no-request-log"),
    _switch("--log-disable", LLAMA, "--no-request-log"),
    _switch("--enable-force-include-usage", VLLM, "--force-include-usage"),
    Foreign("--gpu-memory-utilization", VLLM,
            why="all free memory of the GPU is used, less a reserve; below 0.8, give --kv-memory SIZE instead"),
    Foreign("-ngl --gpu-layers --n-gpu-layers", LLAMA,
            why="0 is --device cpu; otherwise all layers are on the GPU, if there is one"),
    _same("-tp --tensor-parallel-size", VLLM, "--tensor-parallel"),
    _same("-pp --pipeline-parallel-size", VLLM, "--pipeline-parallel"),
    _switch("-ep --enable-expert-parallel", VLLM, "--expert-parallel"),
    _same("-dp --data-parallel-size", VLLM, "--data-parallel"),
    _same("-q", VLLM, "--quantization", automatic=STORED_FORMATS),
    _same("--kv-cache-dtype", VLLM, "--kv-dtype", automatic=("auto",)),
    _no_effect("-ctk --cache-type-k -ctv --cache-type-v", LLAMA, "keys and values have one format, set by --kv-dtype",
               accepted=("f16", "bf16")),
    _no_effect("--enforce-eager", VLLM, "it changes no answer"),
    _no_effect("--enable-chunked-prefill --no-enable-chunked-prefill", VLLM, "long prompts are always prefilled in chunks"),
    _no_effect("--enable-auto-tool-choice", VLLM, "tools can always be called"),
    _no_effect("--enable-reasoning", VLLM, "reasoning is always separated"),
    _no_effect("--enable-prompt-tokens-details", VLLM, "the usage always has them"),
    _no_effect("--enable-server-load-tracking --enable-tokenizer-info-endpoint", VLLM, "these routes are always there"),
    _no_effect("--enable-request-id-headers", VLLM, "every response has one"),
    _no_effect("--disable-log-stats", VLLM, "figures are at /metrics"),
    _no_effect("--async-scheduling --no-async-scheduling", VLLM, "steps are always planned ahead"),
    _no_effect("--structured-outputs-config.backend --guided-decoding-backend", VLLM, "see --structured-backend",
               takes_value=True),
    _no_effect("--runner --convert", VLLM, "a model serves the routes that it can", takes_value=True),
    _no_effect("--swap-space", VLLM, "nothing is swapped to the CPU", takes_value=True),
    _no_effect("--uvicorn-log-level", VLLM, "the log of requests is set by --request-log and --log-format", takes_value=True),
    _no_effect("--jinja --no-jinja", LLAMA, "chat templates are always Jinja templates"),
    _no_effect("-fa --flash-attn", LLAMA, "it changes no answer", accepted=("on", "off", "auto", "1", "0")),
    _no_effect("-b --batch-size -ub --ubatch-size", LLAMA, "--token-budget bounds the tokens of one step", takes_value=True),
    _no_effect("-tb --threads-batch", LLAMA, "--threads holds for prefill and decode", takes_value=True),
    _no_effect("--mlock --no-mmap --mmap", LLAMA, "weights are copied into memory when the model is loaded"),
    _no_effect("-cb --cont-batching", LLAMA, "requests are batched continuously; see --policy"),
    _no_effect("--metrics --props", LLAMA, "metrics and the live view are always there"),
    _no_effect("--embedding --embeddings --rerank --reranking", LLAMA, "these routes are always there"),
    _no_effect("-kvu --kv-unified -no-kvu --no-kv-unified --swa-full --cache-idle-slots --no-cache-idle-slots", LLAMA,
               "all requests share the pages of the KV cache"),
    _no_effect("-cram --cache-ram", LLAMA, "--kv-host-memory keeps cached pages in host memory", takes_value=True),
    _no_effect("--cache-reuse -sps --slot-prompt-similarity -ctxcp --ctx-checkpoints --swa-checkpoints", LLAMA,
               "every prefix is found again", takes_value=True),
    _no_effect("--no-context-shift", LLAMA, "the output ends with the context"),
    _no_effect("--keep", LLAMA, "the context is not shifted", takes_value=True),
    _no_effect("--slot-save-path", LLAMA, "prompt caches keep prefixes by name", takes_value=True),
    _no_effect("--warmup --no-warmup --perf --no-perf --repack -nr --no-repack --check-tensors --offline", LLAMA,
               "it changes no answer"),
    _no_effect("-v --verbose --log-verbose --log-prefix --no-log-prefix --log-timestamps --no-log-timestamps", LLAMA,
               "the log of requests is set by --request-log and --log-format"),
    _no_effect("-lv --verbosity --log-verbosity --log-colors", LLAMA, "see --log-format", takes_value=True),
    _no_effect("--tags --threads-http -to --timeout --prio --poll --numa -C --cpu-mask -Cr --cpu-range", LLAMA,
               "it changes no answer", takes_value=True),
    _no_effect("-sm --split-mode -ts --tensor-split -mg --main-gpu", LLAMA, "--tensor-parallel shares the layers",
               takes_value=True),
    _no_effect("-cmoe --cpu-moe", LLAMA, "--weight-memory says what stays on the GPU"),
    _no_effect("-ncmoe --n-cpu-moe -ot --override-tensor", LLAMA, "--weight-memory says what stays on the GPU", takes_value=True),
    _no_effect("--draft-min --draft-n-min --spec-draft-n-min --draft-p-min --spec-draft-p-min --spec-type -ngld "
               "--gpu-layers-draft --spec-draft-ngl", LLAMA, "it changes no answer; see --speculate", takes_value=True),
    _no_effect("--no-mmproj --no-mmproj-auto --mmproj-auto --models-autoload", LLAMA, "it changes no answer"),
    _no_effect("--presence-penalty --frequency-penalty --dry-multiplier --xtc-probability --dynatemp-range --mirostat", LLAMA,
               "give it in a request, where it is supported", accepted=("0", "0.0")),
    _no_effect("-cnv --conversation", LLAMA, "chat is a conversation"),
    _refused("--trust-remote-code", VLLM, "code in a model's repository is never run", takes_value=False),
    _refused("--cpu-offload-gb", VLLM, "say how much memory weights may take with --weight-memory; the others are streamed"),
    _refused("--tokenizer", VLLM, "the tokenizer is the model's own"),
    _refused("--revision", VLLM, "the newest version is taken; download another with `hf download` and give its folder"),
    _refused("--download-dir", VLLM, "models are kept in the hub's cache; set HF_HOME to move it"),
    _refused("-hff --hf-file", LLAMA, "give the file after the repository: org/name:FILE, without .gguf"),
    _refused("-mu --model-url", LLAMA, "download the file and give its path, or give org/name:Q4_K_M"),
    _refused("--allowed-origins", VLLM, "give each origin with --allowed-origin"),
    _same("--lora-modules", VLLM, "--lora"),
    _no_effect("--enable-lora", VLLM, "--lora or --max-loras enables adapters"),
    _no_effect("--max-cpu-loras --lora-dtype", VLLM, "adapters beyond --max-loras are read again", takes_value=True),
    _refused("--lora-scaled --lora-init-without-apply", LLAMA, "an adapter's scale is in its adapter_config.json"),
    _refused("-mm --mmproj -mmu --mmproj-url", LLAMA, "images are not supported"),
    _refused("--context-shift", LLAMA, "the output ends with the context, or give --kv-policy streaming", takes_value=False),
    _refused("--models-dir --models-preset", LLAMA, "give each model with --model NAME=MODEL, or in [[models]] of --config"),
    _refused("--tools --tools-runtime --mcp-servers-config --mcp-servers-json", LLAMA, "tools are run by the client"),
    _refused("-hft --hf-token", LLAMA, "set HF_TOKEN"),
    _refused("--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --override-kv", LLAMA,
             "positions are computed as the model's configuration says"),
    _refused("--grammar --grammar-file -j --json-schema -l --logit-bias --samplers", LLAMA, "give it in a request"),
    _same("--model-path", SGLANG, "--model", "MODEL"),
    _same("--context-length", SGLANG, "--max-context"),
    _same("--max-running-requests", SGLANG, "--max-requests"),
    _same("--chunked-prefill-size", SGLANG, "--token-budget", automatic=("-1",)),
    _same("--tp --tp-size", SGLANG, "--tensor-parallel"),
    _same("--pp-size", SGLANG, "--pipeline-parallel"),
    _same("--dp --dp-size", SGLANG, "--data-parallel"),
    _switch("--disable-radix-cache", SGLANG, "--no-prefix-caching"),
    _no_effect("--mem-fraction-static --attention-backend --sampling-backend --grammar-backend", SGLANG,
               "it changes no answer", takes_value=True),
    _no_effect("--is-embedding --enable-metrics --enable-cache-report --disable-cuda-graph", SGLANG, "it changes no answer"),
)  # fmt: skip
_BY_FLAG = {flag: foreign for foreign in FOREIGN for flag in foreign.flags}


class Command(TyperCommand):
    """A command that also understands the flags of other programs, and names the nearest right one for a wrong one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:  # for completion
            args = translate(args, self.params)
        return super().parse_args(ctx, args)


def translate(args: Sequence[str], params: Iterable[Any]) -> list[str]:
    """The arguments with only this command's own flags. `params`: the command's, as click has them."""
    params = list(params)
    values = {opt: not getattr(param, "is_flag", False) for param in params for opt in (*param.opts, *param.secondary_opts)}
    known = {opt: takes for opt, takes in values.items() if opt.startswith("-")} | {"--help": False}
    if any(param.param_type_name == "argument" and param.name == "model" for param in params):
        known["MODEL"] = True
    left, done, has_model = list(args), list[str](), False
    while left:
        arg = left.pop(0)
        if arg == "--":
            return [*done, arg, *left]
        flag, equals, value = arg.partition("=") if arg.startswith("--") else (arg, "", "")
        flag = flag.replace("_", "-") if flag.startswith("--") else flag
        if flag in known:
            done.append(flag + equals + value)
            has_model |= flag in ("-m", "--model")
            if known[flag] and not equals and left:
                done.append(left.pop(0))
        elif flag in _BY_FLAG:
            foreign = _BY_FLAG[flag]
            if foreign.takes_value and not equals:
                value = _next_value(foreign, flag, left)
            while flag == "--served-model-name" and has_model and left and not left[0].startswith("-"):
                value += f",{left.pop(0)}"  # vLLM takes several, with spaces between them
            done += _ours(foreign, flag, value, known)
            has_model |= "MODEL" in foreign.ours
        elif flag.startswith("--"):
            raise _unknown(flag, known)
        else:
            done.append(arg)
            has_model = True
    return _joined(done)


def _joined(args: list[str]) -> list[str]:
    """One JSON object instead of several for the same option; of a member that is given twice, the last one counts. Sampling
    defaults that are one word are the base of the others."""
    for option in {each.inside[0] for each in FOREIGN if each.inside[0]}:
        split = [word for arg in args for word in (arg.split("=", 1) if arg.startswith(f"{option}=") else (arg,))]
        places = [i for i, arg in enumerate(split[:-1]) if arg == option]
        if len(places) > 1:
            try:
                objects = [_object(option, split[i + 1]) for i in places]
            except ValueError:
                return args  # told where it is read
            split[places[0] + 1] = json.dumps({name: value for one in objects for name, value in one.items()})
            for i in reversed(places[1:]):
                del split[i : i + 2]
            args = split
    return args


def _object(option: str, text: str) -> dict[str, Any]:
    if option == "--sampling-defaults" and text in ("model", "neutral"):
        return {"base": text}
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(text)
    return value


def _next_value(foreign: Foreign, flag: str, left: list[str]) -> str:
    is_optional = flag in ("-fa", "--flash-attn")  # they were switches once
    if is_optional and (not left or left[0] not in (foreign.accepted or ())):
        return "on"
    if not left:
        raise ConfigError(f"{flag} needs a value.")
    return left.pop(0)


def _ours(foreign: Foreign, flag: str, value: str, known: Iterable[str]) -> list[str]:
    """The arguments that stand for a flag and its value."""
    if foreign.is_refused:
        raise ConfigError(f"{flag} is not supported: {foreign.why}.")
    if foreign.stands_for:
        return _stands_for(foreign, flag, value, known)
    mine = next((ours for ours in foreign.ours if ours in known), None)
    if value in foreign.automatic and foreign.takes_value:
        return []
    if mine is not None:
        if foreign.several:
            return [word for part in value.split(",") for word in (mine, part)]
        return [value] if mine == "MODEL" else [mine, value] if foreign.takes_value else [mine]
    option, member = foreign.inside
    if option in known:
        try:
            shown = json.loads(value)
        except ValueError:
            shown = value
        return [option, json.dumps({member: shown})]
    if (foreign.ours or option) and not foreign.is_optional:
        raise ConfigError(f"This command has no {(*foreign.ours, option)[0]}, which {flag} means.", fix="See --help.")
    if flag == "--gpu-memory-utilization":
        _check_gpu_share(value)
    elif foreign.accepted is not None and value not in foreign.accepted:
        raise ConfigError(f"{flag} {value} is not supported: {foreign.why}.", fix=f"Possible: {', '.join(foreign.accepted)}.")
    elif foreign is _BY_FLAG["-ngl"] and value == "0":
        return ["--device", "cpu"]
    print(f"note: {flag} has no effect: {foreign.why}.", file=sys.stderr)
    return []


def _stands_for(foreign: Foreign, flag: str, value: str, known: Iterable[str]) -> list[str]:
    words = foreign.stands_for.get(value)
    if words is None:
        fix = f"Possible: {', '.join(foreign.stands_for)}."
        raise ConfigError(f"{flag} {value} is not supported.", fix=fix)
    there = [word for pair in zip(words[::2], words[1::2], strict=True) if pair[0] in known for word in pair]
    if words and not there:
        raise ConfigError(f"This command has no {words[0]}, which {flag} means.", fix="See --help.")
    return there


def _check_gpu_share(value: str) -> None:
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise ConfigError(f"--gpu-memory-utilization is {value!r}.", fix="It is a number above 0, up to 1.")
    if share < _GPU_SHARE:
        raise ConfigError(
            f"--gpu-memory-utilization {value} cannot be honoured: here the KV cache is given a size.",
            fix="Use --kv-memory, like --kv-memory 8G; `tidemill memory` shows what a model needs.",
        )


def _unknown(flag: str, known: Iterable[str]) -> ConfigError:
    candidates = [*known, *(name for name in _BY_FLAG if name.startswith("--"))]
    near = difflib.get_close_matches(flag, candidates, n=1, cutoff=0.6)
    return ConfigError(f"There is no option {flag}.", fix=f"Did you mean {near[0]}?" if near else "See --help.")


def option_for(key: str) -> str | None:
    """The name of our option for a key of a config file that is another program's."""
    foreign = _BY_FLAG.get(f"--{key.replace('_', '-')}")
    return foreign.ours[0].removeprefix("--").removeprefix("no-") if foreign and foreign.ours else None


def table() -> list[str]:
    """Lines of the table in docs/options.md."""
    lines = ["| flag | of | here |", "|---|---|---|"]
    for each in FOREIGN:
        names = ", ".join(f"`{flag}`" for flag in each.flags)
        if each.stands_for:
            meant = {value: f"`{' '.join(words)}`" if words else "nothing" for value, words in each.stands_for.items()}
            here = "; ".join(f"{value}: {words}" for value, words in meant.items())
        elif each.inside[0]:
            here = (f"`{each.ours[0]}`; `serve`: " if each.ours else "") + f"`{each.inside[1]}` in `{each.inside[0]}`"
        elif each.is_optional:
            here = f"`{each.ours[0]}`; `serve`: no effect: {each.why}"
        elif each.ours:
            mine = " or ".join(f"`{ours}`" for ours in each.ours if ours != "MODEL")
            here = mine + (f". {each.why}" if each.why else "")
        elif each.is_refused:
            here = f"refused: {each.why}"
        elif each.accepted is not None:
            here = f"only {', '.join(each.accepted)}: {each.why}"
        else:
            here = f"no effect: {each.why}"
        lines.append(f"| {names} | {each.source} | {here} |")
    return lines
