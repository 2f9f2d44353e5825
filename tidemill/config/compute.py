"""Decisions: the device, and how much a step computes. Each returns a value and the reason for it,
and refuses what cannot be."""

from __future__ import annotations

from collections.abc import Collection

from tidemill.capabilities import why_not
from tidemill.config.choices import DTYPES, MAX_LORA_RANK, QUANTIZATIONS
from tidemill.config.options import Decision, EngineOptions, at_least, one_of
from tidemill.errors import ConfigError
from tidemill.machine import Machine
from tidemill.types.model_config import ModelConfig

_ROWS_OF_EXPERT, _MOST_TOKENS = 512, 8192  # of a step with experts on a GPU
_SMALL = 4 * 10**9  # parameters of a model of which a GPU's step has more tokens
_ENCODER_BUDGETS = {"cpu": 1024, "cuda": 8192}
_MIN_LORAS = 8  # slots
WINDOW_MS, _MAX_WINDOW_MS = 50.0, 10_000  # in which a batch forms


def decide_device(options: EngineOptions, machine: Machine) -> Decision[str]:
    device = options.device
    if device not in ("auto", *DTYPES):
        raise ConfigError(
            f"device {device!r} is not available.",
            fix=f"Choose auto, {', '.join(DTYPES)}.",
            param="device",
        )
    if device == "cuda" and not machine.gpu:
        raise ConfigError(
            "device cuda was requested, but torch sees no GPU.",
            fix="Use --device cpu, or install torch for CUDA.",
            param="device",
        )
    if device != "auto":
        return device, "given"
    return ("cuda", machine.gpu) if machine.gpu else ("cpu", "no GPU")


def decide_dtype(
    options: EngineOptions, device: str, model: ModelConfig, machine: Machine
) -> Decision[str]:
    dtype = one_of("dtype", options.dtype, ("auto", *DTYPES["cpu"], *DTYPES["cuda"]))
    if device == "cuda":
        return "bfloat16", "given" if dtype != "auto" else "the format of the tensor cores"
    if dtype != "auto":
        return dtype, "given"
    if options.contextual_sparsity is not None:
        return "float32", "contextual sparsity takes weights as plain numbers"
    if not model.is_quantized:
        return "float32", "the checkpoint is not quantized; sums are exact float32"
    if machine.kernels:
        return (
            "quantized",
            f"the checkpoint is quantized; {machine.kernels} kernels multiply 4- and 8-bit weights as they are",
        )
    return "float32", f"no compiled kernels: {machine.no_kernels}"


def decide_scheme(
    options: EngineOptions, device: str, dtype: str, model: ModelConfig
) -> Decision[str]:
    """Decides how linears hold their weights, a scheme of `quant.METHODS`."""
    scheme = one_of("quantization", options.quantization, ("auto", "none", *QUANTIZATIONS))
    if device != "cuda":
        return ("quantized" if dtype == "quantized" else "dense"), "as dtype says"
    experts = "; experts are held in bfloat16" if model.experts else ""
    if scheme == "none" or (scheme == "auto" and not model.is_quantized):
        return "dense", "given" if scheme == "none" else "the checkpoint is not quantized"
    if scheme == "auto":
        return "quantized", f"as stored{experts}"
    return scheme, f"given: linears {QUANTIZATIONS[scheme]}{experts}"


def decide_threads(options: EngineOptions, machine: Machine) -> Decision[int]:
    num_here = (
        max(1, options.tensor_parallel * options.pipeline_parallel - options.remote_workers)
        * options.data_parallel
    )
    threads = options.threads or max(1, machine.num_cores // num_here)
    if not 1 <= threads <= 256:
        raise ConfigError(
            f"threads is {options.threads}.", fix="It must be from 1 to 256.", param="threads"
        )
    cores = "physical cores this process may use" + (
        f", shared by {num_here} processes" if num_here > 1 else ""
    )
    return threads, "given" if options.threads else cores


def decide_max_requests(options: EngineOptions, device: str, model: ModelConfig) -> Decision[int]:
    if options.max_requests is not None:
        return at_least("max_requests", options.max_requests, 1), "given"
    if device == "cuda" and model.pooler is not None:
        return (
            512,
            "slots: inputs of two steps, one of which is computed while the next is gathered",
        )
    most, why = 64, "slots; more would only make each request slower on a CPU"
    if device == "cuda":
        most, why = 256, "slots: the largest CUDA graph batch"
    if (
        options.token_budget is not None
        and 1 <= options.token_budget < most
        and model.pooler is None
    ):
        return options.token_budget, "slots: a token of each in a step, with this token budget"
    return most, why


def decide_token_budget(
    options: EngineOptions, device: str, max_requests: int, context: int, model: ModelConfig
) -> Decision[int]:
    if model.pooler is not None:
        return _encoder_budget(options, device, max_requests, context)
    if options.token_budget is None:
        default, why = 2048 if device == "cuda" else 256, "keeps a step short beside a long prompt"
        if device == "cuda" and model.num_parameters <= _SMALL and not model.has_states:
            default, why = (
                4096,
                "a small model does not fill the GPU with fewer; short beside a long prompt",
            )
        if device == "cuda" and (enough := _tokens_for_experts(model)) > default:
            default, why = (
                enough,
                "a step reads every expert: enough for each, and still short beside a long prompt",
            )
        return max(default, max_requests), f"tokens per step: {why}"
    if at_least("token_budget", options.token_budget, 1) < max_requests:
        raise ConfigError(
            f"token_budget is {options.token_budget}, less than max_requests, {max_requests}: some requests would never decode.",
            fix="Raise --token-budget or lower --max-requests.",
            param="token_budget",
        )
    return options.token_budget, "given"


def _tokens_for_experts(model: ModelConfig) -> int:
    """The number of tokens at which each expert multiplies _ROWS_OF_EXPERT on average: with fewer,
    its weights are read too often.

    On an H200, experts of Qwen3-30B-A3B's shape take 0.22 us a token and layer with 2,048 tokens a
    step, 0.18 with 4,096 and 0.16 with 8,192; a step of 8,192 takes about 0.12 s, as long as one of
    2,048 through a dense model of 18B."""
    wanted = max(
        (_ROWS_OF_EXPERT * moe.num_experts // moe.top_k for moe in model.experts if moe), default=0
    )
    return min(wanted, _MOST_TOKENS)


def _encoder_budget(
    options: EngineOptions, device: str, max_requests: int, context: int
) -> Decision[int]:
    least = max(context, max_requests)
    if options.token_budget is None:
        return max(
            _ENCODER_BUDGETS[device], least
        ), "tokens per step: an encoder computes an input whole"
    if options.token_budget < least:
        raise ConfigError(
            f"token_budget is {options.token_budget}; an encoder computes an input whole, so it must hold {least} tokens.",
            fix=f"Raise --token-budget to {least}, or lower --max-context and --max-requests.",
            param="token_budget",
        )
    return options.token_budget, "given"


def decide_background_tokens(device: str, token_budget: int, model: ModelConfig) -> Decision[float]:
    rest = "background requests hardly slow down others, and never stop"
    if model.pooler is not None:
        return token_budget / 32, f"added up until an input fits: {rest}"
    if device == "cuda":
        return token_budget / 32, f"a step loads the weights anyway: {rest}"
    return 1 / 8, f"each token lengthens a step on a CPU: {rest}"


def decide_background_budget(device: str, token_budget: int, model: ModelConfig) -> Decision[int]:
    why = "a request that arrives meanwhile is queued for one step"
    if device == "cuda" or model.pooler is not None:
        return token_budget, why
    return min(token_budget, 64), f"{why}; longer ones are no faster on a CPU"


def decide_step_cost(device: str, has_states: bool) -> Decision[int]:
    """In tokens. On an H200 a step of Llama 8B takes 5.3 ms and 21 us for each token."""
    if device != "cuda":
        return 0, "a step's tokens are what it costs on a CPU"
    if has_states:
        return (
            0,
            "a prompt that begins beside another cannot start from the state that this one computes",
        )
    return 256, "reading the weights takes as long as computing so many tokens"


def decide_context(options: EngineOptions, model: ModelConfig) -> Decision[int]:
    if options.max_context is None:
        return at_least("max_context", model.max_context, 2), "the model's own"
    if at_least("max_context", options.max_context, 2) > model.max_context:
        raise ConfigError(
            f"max_context is {options.max_context}, but the model was made for {model.max_context}.",
            fix=f"Use --max-context {model.max_context} or less.",
            param="max_context",
        )
    return options.max_context, "given"


def decide_fast_math(options: EngineOptions) -> Decision[bool]:
    return (
        options.fast_math,
        "given: tokens may depend on the batch" if options.fast_math else "off: batch-invariant",
    )


def decide_nano_batching(options: EngineOptions, features: Collection[str]) -> Decision[str]:
    setting = one_of("nano_batching", options.nano_batching, ("auto", "on", "off"))
    if setting == "auto" and (refusal := why_not("nano-batching", features)):
        return "off", f"steps are not cut in two: {refusal.why}"
    return setting, "steps in two halves that overlap, on a GPU"


def decide_max_loras(options: EngineOptions) -> Decision[int]:
    num = len(options.lora_paths)
    if options.max_loras is not None:
        return at_least("max_loras", options.max_loras, 1), "given"
    return (
        (max(num, _MIN_LORAS), "the adapters given, and some more") if num else (0, "no adapters")
    )


def decide_max_lora_rank(options: EngineOptions, max_loras: int) -> Decision[int]:
    rank = options.max_lora_rank or 64
    if not 1 <= rank <= MAX_LORA_RANK:
        raise ConfigError(
            f"max_lora_rank is {rank}.",
            fix=f"It must be 1 to {MAX_LORA_RANK}.",
            param="max_lora_rank",
        )
    return (
        rank if max_loras else 0,
        "given" if options.max_lora_rank else "enough for most adapters",
    )


def decide_batch_window(options: EngineOptions) -> Decision[float]:
    """In seconds."""
    window_ms = options.batch_window_ms
    if options.policy != "dynamic":
        return 0.0, "no batch is waited for"
    if window_ms is not None and not 0 <= window_ms <= _MAX_WINDOW_MS:
        fix = f"It must be from 0 to {_MAX_WINDOW_MS}."
        raise ConfigError(f"batch_window_ms is {window_ms:g}.", fix=fix, param="batch_window_ms")
    return (
        WINDOW_MS if window_ms is None else window_ms
    ) / 1000, "until a batch that is not full starts"
