"""Flags of vLLM, SGLang and llama.cpp that commands take: what stands for each of them here, or why
it has no effect."""

from __future__ import annotations

from dataclasses import dataclass, field

from tidemill.config import STORED_FORMATS

VLLM, SGLANG, LLAMA = "vLLM", "SGLang", "llama.cpp"


@dataclass(frozen=True)
class Foreign:
    """One flag of another program, under all its names.

    `ours`: flags with the same meaning, of which a command has one; a value follows. `inside`: an
    option of ours that is a JSON object, and the member that the value is. `stands_for`: what each
    value means, as arguments of ours. Without any of these the flag has no effect on answers and is
    accepted with a note; `why` gives the reason.
    """

    names: str
    source: str
    ours: tuple[str, ...] = ()
    why: str = ""
    takes_value: bool = True
    automatic: tuple[str, ...] = ()  # values that mean: not given
    # without `ours`: the values that have no effect; None: all
    accepted: tuple[str, ...] | None = None
    inside: tuple[str, str] = ("", "")
    stands_for: dict[str, tuple[str, ...]] = field(default_factory=dict)
    several: bool = False  # words that follow are values, too
    by_commas: bool = False  # one value is a list with commas
    is_optional: bool = False  # a command without `ours` goes on, with a note
    is_switch: bool = False  # the value is not told: any that is not `automatic` turns `ours` on
    unit: str = ""  # of the value, for ours
    variable: str = ""  # of the environment, which is set to the value; a switch sets it to 1

    @property
    def is_translated(self) -> bool:
        """Something of ours stands for it; the others have no effect."""
        return bool(self.ours or self.inside[0] or self.stands_for or self.variable)

    @property
    def flags(self) -> list[str]:
        return self.names.split()


def _same(
    names: str,
    source: str,
    *ours: str,
    why: str = "",
    automatic: tuple[str, ...] = (),
    unit: str = "",
) -> Foreign:
    return Foreign(names, source, ours, why, automatic=automatic, unit=unit)


def _sampling(
    names: str, source: str, member: str, *ours: str, automatic: tuple[str, ...] = ()
) -> Foreign:
    """A sampling parameter: of the command itself, or what requests get that do not give it."""
    return Foreign(names, source, ours, inside=("--sampling-defaults", member), automatic=automatic)


def _choice(names: str, source: str, why: str = "", **stands_for: tuple[str, ...]) -> Foreign:
    return Foreign(
        names,
        source,
        why=why,
        stands_for={name.replace("_", "-"): args for name, args in stands_for.items()},
    )


def _switch(names: str, source: str, *ours: str, variable: str = "") -> Foreign:
    return Foreign(names, source, ours, takes_value=False, variable=variable)


def _no_effect(
    names: str,
    source: str,
    why: str,
    *,
    takes_value: bool = False,
    accepted: tuple[str, ...] | None = None,
) -> Foreign:
    return Foreign(
        names, source, why=why, takes_value=takes_value or accepted is not None, accepted=accepted
    )


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
    _sampling("-s", LLAMA, "seed", "--seed", automatic=("-1",)),
    Foreign("--seed --random-seed", f"{LLAMA}, {VLLM}, {SGLANG}", ("--seed",), automatic=("-1",), is_optional=True,
            why="requests draw seeds of their own; one seed for all is `seed` in --sampling-defaults, or -s. Beside flags that "
            "only llama.cpp has, --seed is -s"),
    _same("-md --model-draft --spec-draft-model -hfd -hfrd --hf-repo-draft --spec-draft-hf", LLAMA, "--draft-model"),
    _same("--draft --draft-n --draft-max --spec-draft-n-max", LLAMA, "--max-drafts"),
    _same("--ssl-key-file --ssl-keyfile", f"{LLAMA}, {VLLM}", "--tls-key"),
    _same("--ssl-cert-file --ssl-certfile", f"{LLAMA}, {VLLM}", "--tls-cert"),
    _same("--ssl-ca-certs", VLLM, "--tls-client-ca"),
    _same("--api-prefix", LLAMA, "--root-path"),
    _same("--sleep-idle-seconds", LLAMA, "--idle-unload", automatic=("-1",)),
    _same("--models-max", LLAMA, "--max-loaded", automatic=("0",)),
    Foreign("--cors-origins", LLAMA, ("--allowed-origin",), several=True, by_commas=True),
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
    _same("--mem-fraction-static", SGLANG, "--gpu-memory-utilization", why="Activations are part of it."),
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
    _no_effect("--warmup --no-warmup --perf --no-perf --repack -nr --no-repack --check-tensors -e --escape --no-escape "
               "--no-host --op-offload --no-op-offload --reuse-port -bs --backend-sampling -kvo --kv-offload -nkvo "
               "--no-kv-offload -dio --direct-io -ndio --no-direct-io --no-prefill-assistant --no-skip-chat-parsing "
               "--no-mmproj-offload -no-ag --no-agent --spec-draft-backend-sampling --no-spec-draft-backend-sampling", LLAMA,
               "it changes no answer"),
    _no_effect("-dt --defrag-thold -lm --load-mode -fit --fit -fitt --fit-target -fitc --fit-ctx --cpu-strict --prio-batch "
               "--poll-batch -Cb --cpu-mask-batch -Crb --cpu-range-batch --cpu-strict-batch -cms --checkpoint-min-step "
               "--sse-ping-interval --cors-methods --cors-headers", LLAMA, "it changes no answer", takes_value=True),
    _no_effect("--cors-credentials --no-cors-credentials", LLAMA, "browsers send keys as headers"),
    _switch("--offline", LLAMA, variable="HF_HUB_OFFLINE"),
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
               "--gpu-layers-draft --n-gpu-layers-draft --spec-draft-ngl -td --threads-draft --spec-draft-threads -tbd "
               "--threads-batch-draft --spec-draft-threads-batch -devd --device-draft --spec-draft-device -ctkd -ctvd "
               "--cache-type-k-draft --cache-type-v-draft --spec-draft-type-k --spec-draft-type-v", LLAMA,
               "it changes no answer; see --speculate", takes_value=True),
    _no_effect("--no-mmproj --no-mmproj-auto --mmproj-auto --models-autoload", LLAMA, "it changes no answer"),
    _no_effect("--presence-penalty --frequency-penalty --dry-multiplier --xtc-probability --dynatemp-range --mirostat", LLAMA,
               "give it in a request, where it is supported", accepted=("0", "0.0")),
    _no_effect("--top-nsigma --top-n-sigma --adaptive-target", LLAMA, "there is no such sampler", accepted=("-1", "-1.0")),
    _no_effect("--typical --typical-p", LLAMA, "give typical_p in a request", accepted=("1", "1.0")),
    _no_effect("--xtc-threshold --dry-base --dry-allowed-length --dry-penalty-last-n --dry-sequence-breaker --adaptive-decay "
               "--dynatemp-exp --mirostat-lr --mirostat-ent", LLAMA, "it refines a sampler that is off", takes_value=True),
    _no_effect("--embd-normalize", LLAMA, "embeddings are normalized", accepted=("2",)),
    _no_effect("-cnv --conversation", LLAMA, "chat is a conversation"),
    _no_effect("--trust-remote-code", f"{VLLM}, {SGLANG}",
               "code in a model's repository is never run, and none is needed: architectures are part of Tidemill"),
    Foreign("--download-dir", f"{VLLM}, {SGLANG}", variable="HF_HUB_CACHE"),
    Foreign("-hft --hf-token", f"{LLAMA}, {VLLM}", variable="HF_TOKEN"),
    Foreign("--lora-modules --lora-paths", f"{VLLM}, {SGLANG}", ("--lora",), several=True),
    _no_effect("--enable-lora", VLLM, "--lora or --max-loras enables adapters"),
    _no_effect("--max-cpu-loras --lora-dtype", VLLM, "adapters beyond --max-loras are read again", takes_value=True),
    Foreign("--skip-chat-parsing", LLAMA, takes_value=False,
            stands_for={"": ("--tool-parser", "none", "--reasoning-parser", "none")}),
    _same("--model-path", SGLANG, "--model", "MODEL"),
    _same("--context-length", SGLANG, "--max-context"),
    _same("--max-running-requests", SGLANG, "--max-requests"),
    _same("--chunked-prefill-size", SGLANG, "--token-budget", automatic=("-1",)),
    _same("--tp --tp-size", SGLANG, "--tensor-parallel"),
    _same("--pp-size", SGLANG, "--pipeline-parallel"),
    _same("--dp --dp-size", SGLANG, "--data-parallel"),
    _switch("--disable-radix-cache", SGLANG, "--no-prefix-caching"),
    Foreign("--ep --ep-size --expert-parallel-size", SGLANG, ("--expert-parallel",), automatic=("1",), is_switch=True),
    _same("--max-queued-requests", SGLANG, "--max-queued"),
    _same("--watchdog-timeout", SGLANG, "--stall-seconds"),
    _same("--fastapi-root-path", SGLANG, "--root-path"),
    _same("--admin-api-key", SGLANG, "--admin-key"),
    _same("--file-storage-path", SGLANG, "--data-dir"),
    _same("--preferred-sampling-params", SGLANG, "--sampling-defaults"),
    _same("--max-loras-per-batch", SGLANG, "--max-loras"),
    _same("--hicache-size", SGLANG, "--kv-host-memory", unit="GB", automatic=("0",)),
    _same("--kv-offloading-size", VLLM, "--kv-host-memory", unit="GiB"),
    _same("--shutdown-timeout", VLLM, "--drain-seconds"),
    _same("--otlp-traces-endpoint", f"{VLLM}, {SGLANG}", "--otlp-endpoint"),
    _switch("--log-requests", SGLANG, "--request-log"),
    _switch("--stream-response-default-include-usage", SGLANG, "--force-include-usage"),
    _switch("--disable-uvicorn-access-log", VLLM, "--no-request-log"),
    _choice("--schedule-policy", SGLANG, fcfs=(), lpm=("--queue-order", "prefix")),
    _no_effect("--scheduling-policy", VLLM, "requests have priorities always", accepted=("fcfs", "priority")),
    _no_effect("--max-logprobs", VLLM, "a request may ask for 20", takes_value=True),
    _no_effect("--tokenizer-mode --config-format --model-impl", f"{VLLM}, {SGLANG}",
               "files are read as what they are", accepted=("auto", "hf", "safetensors", "gguf", "vllm", "sglang")),
    _no_effect("--enable-log-outputs --enable-log-deltas --no-enable-log-deltas", VLLM, "prompts and outputs are never logged"),
    _no_effect("--max-log-len --log-config-file --log-level --log-level-http --log-requests-level --decode-log-interval "
               "--uvicorn-access-log-exclude-prefixes --disable-access-log-for-endpoints", f"{VLLM}, {SGLANG}",
               "the log of requests is set by --request-log and --log-format", takes_value=True),
    _no_effect("--allowed-methods --allowed-headers", VLLM, "see --allowed-origin", takes_value=True),
    _no_effect("--allow-credentials --disable-fastapi-docs --enable-offline-docs --log-error-stack", VLLM,
               "it changes no answer"),
    _no_effect("--enable-per-request-metrics --per-request-spec-decode-metrics", VLLM, "ask for `timings` in a request"),
    _no_effect("--response-role", VLLM, "answers have the role assistant", accepted=("assistant",)),
    _no_effect("--chat-template-content-format", VLLM, "templates get what they ask for", accepted=("auto",)),
    _no_effect("--api-server-count -asc --max-parallel-loading-workers "
               "--distributed-executor-backend -O --optimization-level --compilation-config -cc --stream-interval "
               "--attention-config -ac --kernel-config --performance-mode --safetensors-load-strategy --renderer-num-workers "
               "--fingerprint-mode --prefix-caching-hash-algo --jit-monitor-mode --cudagraph-capture-sizes "
               "--max-cudagraph-capture-size --limit-mm-per-prompt --mm-processor-cache-gb", VLLM,
               "it changes no answer", takes_value=True),
    _no_effect("--disable-custom-all-reduce --disable-cascade-attn --use-tqdm-on-load --no-use-tqdm-on-load "
               "--language-model-only --enable-flashinfer-autotune --fully-sharded-loras --disable-hybrid-kv-cache-manager "
               "--cudagraph-metrics --kv-cache-metrics --enable-mfu-metrics --skip-mm-profiling --aggregate-engine-logging "
               "--numa-bind --exclude-tools-when-tool-choice-none --enable-ssl-refresh", f"{VLLM}, {SGLANG}",
               "it changes no answer"),
    _no_effect("--schedule-conservativeness --max-prefill-tokens --num-continuous-decode-steps --load-balance-method "
               "--radix-eviction-policy --tokenizer-worker-num --detokenizer-worker-num --warmups --numa-node --lora-backend "
               "--max-loaded-loras --cuda-graph-max-bs --cuda-graph-max-bs-decode --cuda-graph-bs --torch-compile-max-bs "
               "--dist-timeout --swa-full-tokens-ratio --hicache-ratio --hicache-write-policy --hicache-io-backend "
               "--hicache-mem-layout "
               "--decode-attention-backend --prefill-attention-backend --moe-runner-backend --triton-attention-num-kv-splits",
               SGLANG, "it changes no answer", takes_value=True),
    _no_effect("--enable-mixed-chunk --disable-overlap-schedule --skip-server-warmup --enable-torch-compile "
               "--disable-cuda-graph-padding --enable-p2p-check --enable-priority-scheduling --show-time-cost --enable-trace "
               "--enable-nccl-nvls --enable-symm-mem --triton-attention-reduce-in-fp32 --enable-hierarchical-cache "
               "--sleep-on-idle --disable-outlines-disk-cache --enable-request-time-stats-logging",
               SGLANG, "it changes no answer"),
    _no_effect("--enable-deterministic-inference", SGLANG, "answers never depend on the batch"),
    _no_effect("--max-total-tokens", SGLANG, "--kv-memory gives the KV cache its size", takes_value=True),
    Foreign("--pooler-config", VLLM, stands_for={
        '{"task": "embed"}': (), '{"task": "classify"}': (), '{"task": "token_embed"}': ("--pooling", "none"),
        **{f'{{"pooling_type": "{kind.upper()}"}}': ("--pooling", kind) for kind in ("mean", "last", "cls")},
    }),
    _no_effect("--attention-backend --sampling-backend --grammar-backend", SGLANG,
               "it changes no answer", takes_value=True),
    _no_effect("--skip-tokenizer-init", f"{VLLM}, {SGLANG}", "requests may have token ids for texts, and ask for ids"),
    _no_effect("--ignore-patterns", VLLM, "a repository's safetensors or one GGUF are fetched", takes_value=True),
    _no_effect("--enable-mis", SGLANG, "the items of a score share their prefix through the prefix cache"),
    _no_effect("--is-embedding --enable-metrics --enable-cache-report --disable-cuda-graph", SGLANG, "it changes no answer"),
)  # fmt: skip
