"""Budgets: what resolve() derives, refuses and explains; and the estimate against real allocations."""

import re
from dataclasses import replace

import pytest

from tests.helpers import load_model
from tidemill.config import EngineOptions, fmt_bytes, parse_bytes, resolve
from tidemill.errors import ConfigError
from tidemill.machine import Machine
from tidemill.runner.make_cpu import make_cpu_runner
from tidemill.types.model_config import AttentionSpec, ModelConfig, MoESpec, Rotation, alike

SMOLLM2 = ModelConfig(
    architecture="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, max_context=8192, norm_eps=1e-5,
    layers=alike(30, AttentionSpec(num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125, rotation=None)), tie_embeddings=True,
)  # fmt: skip
LARGE = Machine(num_cores=8, memory_bytes=64 * 2**30, available_bytes=60 * 2**30, kernels="neon")
PLAIN = replace(LARGE, kernels="", no_kernels="they were not built")
QUANTIZED = replace(SMOLLM2, stored={"Q4_1": 106_168_320, "Q8_0": 28_311_552, "F32": 35_136})


def test_kv_bytes_come_from_kv_heads():
    assert SMOLLM2.kv_bytes_per_token("float32") == 2 * 3 * 64 * 30 * 4
    assert SMOLLM2.num_parameters == 134_515_008


def test_everything_is_settled_and_explained():
    config = resolve(EngineOptions(), SMOLLM2, LARGE)
    assert config.threads == 8
    assert config.max_context == 8192
    assert config.kv_bytes <= 4 * 2**30
    assert config.kv_bytes == config.num_pages * 16 * SMOLLM2.kv_bytes_per_token("float32")
    for field in (
        "dtype",
        "threads",
        "max_requests",
        "token_budget",
        "max_context",
        "kv_bytes",
        "num_pages",
    ):
        assert config.reasons[field]


def test_a_quantized_checkpoint_stays_quantized_where_it_can():
    config = resolve(EngineOptions(), QUANTIZED, LARGE)
    assert (config.dtype, config.kv_dtype) == ("quantized", "bfloat16")
    assert "neon" in config.reasons["dtype"]
    assert config.weight_bytes == 106_168_320 * 20 // 32 + 28_311_552 * 34 // 32 + 35_136 * 4
    exact = resolve(EngineOptions(dtype="float32"), QUANTIZED, LARGE)
    assert (exact.dtype, exact.kv_dtype) == ("float32", "float32")
    assert exact.weight_bytes == 134_515_008 * 4
    plain = resolve(EngineOptions(), QUANTIZED, PLAIN)
    assert plain.dtype == "float32"
    assert "they were not built" in plain.reasons["dtype"]
    assert resolve(EngineOptions(), SMOLLM2, LARGE).dtype == "float32"


def test_16_bit_weights_stay_so_with_compiled_kernels():
    short = replace(SMOLLM2, stored={"BF16": 134_515_008})
    assert resolve(EngineOptions(), short, LARGE).weight_bytes == 134_515_008 * 2
    assert resolve(EngineOptions(), short, PLAIN).weight_bytes == 134_515_008 * 4


def test_a_context_longer_than_the_models_is_refused():
    with pytest.raises(ConfigError) as caught:
        resolve(EngineOptions(max_context=100_000), SMOLLM2, LARGE)
    assert "--max-context 8192" in caught.value.fix


def test_quantized_is_refused_where_it_cannot_be():
    with pytest.raises(ConfigError, match="not built"):
        resolve(EngineOptions(dtype="quantized"), QUANTIZED, PLAIN)
    with pytest.raises(ConfigError, match="quantized checkpoints"):
        resolve(EngineOptions(dtype="quantized"), SMOLLM2, LARGE)


class TestWithAGPU:
    MACHINE = replace(LARGE, gpu="NVIDIA Test", gpu_bytes=80 * 2**30, gpu_free_bytes=78 * 2**30)

    @pytest.mark.parametrize(
        ("given", "why"),
        [
            ({}, "if the server has --kv-policy"),
            (
                {"kv_policy": "full", "speculate": "eagle", "draft_heads": "x"},
                "does not know KV policies",
            ),
            ({"kv_policy": "full", "tensor_parallel": 3}, "on CPUs only"),
        ],
    )
    def test_kv_policies_are_for_one_rank_without_heads(self, given, why):
        model = replace(
            SMOLLM2,
            layers=tuple(
                replace(one, rotation=Rotation(num_dims=64, theta=1e4)) for one in SMOLLM2.layers
            ),
        )
        wide = replace(model, layers=tuple(replace(one, head_dim=96) for one in model.layers))
        may = EngineOptions(kv_policy="full")
        # by FlexAttention
        assert "FlexAttention" in resolve(may, wide, self.MACHINE).reasons["kv_policies"]
        assert "streaming" in resolve(may, model, self.MACHINE).kv_policies
        config = resolve(EngineOptions(**given), model, self.MACHINE)
        assert not config.kv_policies
        assert why in config.reasons["kv_policies"]

    def test_what_kv_policies_keep_beside_the_cache_is_reserved(self):
        model = replace(
            SMOLLM2,
            layers=tuple(
                replace(one, rotation=Rotation(num_dims=64, theta=1e4)) for one in SMOLLM2.layers
            ),
        )
        long, num_heads = replace(model, max_context=2**17), model.num_layers * model.num_kv_heads
        config, without = (
            resolve(EngineOptions(kv_policy=given), long, self.MACHINE) for given in ("full", None)
        )
        assert config.policy_bytes == config.num_pages * 64 * num_heads * 8  # a sum for each token
        # the lowest and the highest key of each page
        assert config.summary_bytes == config.num_pages * num_heads * 2 * 64 * 2
        assert config.num_pages < without.num_pages
        assert 77 * 2**30 < config.memory_bytes <= 78 * 2**30
        assert not without.policy_bytes
        given = EngineOptions(kv_policy="full", kv_memory_bytes=config.kv_bytes + 5 * 2**30)
        with pytest.raises(
            ConfigError, match=r"GiB of KV memory with .* for KV policies; 78.00 GiB are free"
        ):
            resolve(given, long, self.MACHINE)
        assert not resolve(EngineOptions(device="cpu"), model, self.MACHINE).policy_bytes

    def test_it_is_taken_and_filled(self):
        config = resolve(EngineOptions(), SMOLLM2, self.MACHINE)
        assert (config.device, config.dtype, config.kv_dtype) == ("cuda", "bfloat16", "bfloat16")
        assert config.max_requests == 256
        assert config.token_budget == 4096
        large = replace(SMOLLM2, intermediate_size=64 * SMOLLM2.intermediate_size)
        assert large.num_parameters > 4e9
        assert resolve(EngineOptions(), large, self.MACHINE).token_budget == 2048
        assert config.weight_bytes == 2 * SMOLLM2.num_parameters
        assert config.reasons["device"] == "NVIDIA Test"
        assert config.max_drafts == 16
        assert (
            resolve(
                EngineOptions(speculate="eagle", draft_heads="x"), SMOLLM2, self.MACHINE
            ).max_drafts
            == 8
        )
        long = replace(SMOLLM2, max_context=2**17)
        full = resolve(EngineOptions(), long, self.MACHINE)
        assert 70 * 2**30 < full.kv_bytes + full.weight_bytes < 78 * 2**30

    def test_a_step_has_enough_tokens_for_every_expert(self):
        for num_experts, top_k, tokens in (
            (128, 8, 8192),
            (48, 4, 6144),
            (8, 2, 4096),
            (512, 2, 8192),
        ):
            spec = MoESpec(num_experts=num_experts, top_k=top_k, expert_size=64, renormalise=True)
            model = replace(SMOLLM2, experts=(None, *(spec,) * 29))
            config = resolve(EngineOptions(), model, self.MACHINE)
            assert config.token_budget == tokens
            assert ("expert" in config.reasons["token_budget"]) == (tokens > 4096)
            assert config.activation_bytes > model.activation_bytes(tokens, 256)
            assert (
                resolve(EngineOptions(token_budget=1024), model, self.MACHINE).token_budget == 1024
            )
            assert resolve(EngineOptions(device="cpu"), model, self.MACHINE).token_budget == 256

    def test_the_cpu_can_still_be_chosen(self):
        assert resolve(EngineOptions(device="cpu"), SMOLLM2, self.MACHINE).dtype == "float32"

    def test_what_does_not_fit_says_so(self):
        small = replace(self.MACHINE, gpu_free_bytes=2**28)
        with pytest.raises(ConfigError, match=r"256 MiB are free of the 80.00 GiB of NVIDIA Test"):
            resolve(EngineOptions(), SMOLLM2, small)
        long = replace(SMOLLM2, max_context=2**17)
        with pytest.raises(
            ConfigError, match=r"and 80.00 GiB of KV memory; 78.00 GiB are free of the 80.00 GiB"
        ) as caught:
            resolve(EngineOptions(kv_memory_bytes=80 * 2**30), long, self.MACHINE)
        assert "--kv-memory" in caught.value.fix

    def test_the_cache_stays_within_32_bit_coordinates(self):
        """Bulk copies address rows of head_dim values of the whole cache, the null page included,
        by signed 32-bit numbers."""
        huge = replace(self.MACHINE, gpu_bytes=2**40, gpu_free_bytes=2**40)
        long = replace(SMOLLM2, max_context=2**17)
        rows_per_page = 2 * long.num_layers * long.num_kv_heads * 64
        config = resolve(EngineOptions(), long, huge)
        assert (
            (config.num_pages + 1) * rows_per_page < 2**31 <= (config.num_pages + 2) * rows_per_page
        )
        assert "32-bit coordinates" in config.reasons["kv_bytes"]
        few = resolve(EngineOptions(kv_memory_bytes=2**39, max_requests=8), long, huge)
        assert few.num_pages == 8 * 2**17 // 64  # all that 8 slots can fill
        with pytest.raises(ConfigError, match="32-bit coordinates") as caught:
            resolve(EngineOptions(kv_memory_bytes=2**39), long, huge)
        most = re.search(r"at most (\d+M) with --kv-memory", caught.value.fix)
        assert (
            resolve(EngineOptions(kv_memory_bytes=parse_bytes(most[1])), long, huge).num_pages
            <= config.num_pages
        )
        assert caught.value.param == "kv_memory_bytes"

    def test_a_share_of_the_gpu_limits_the_model(self):
        long = replace(SMOLLM2, max_context=2**17)
        half = resolve(EngineOptions(gpu_memory_utilization=0.5), long, self.MACHINE)
        assert 39 * 2**30 < half.memory_bytes <= 40 * 2**30
        assert not half.notes
        on_cpu = resolve(
            EngineOptions(gpu_memory_utilization=0.5, device="cpu"), long, self.MACHINE
        )
        assert on_cpu.kv_bytes == resolve(EngineOptions(device="cpu"), long, self.MACHINE).kv_bytes
        assert "gpu_memory_utilization has no effect on a CPU" in on_cpu.notes[0]
        for wrong in (0.0, 1.5):
            with pytest.raises(ConfigError, match="above 0, up to 1"):
                resolve(EngineOptions(gpu_memory_utilization=wrong), long, self.MACHINE)

    def test_a_model_too_large_for_a_gpu_gets_figures(self):
        """Each option that is named makes it fit, as far as one machine can show."""
        large = replace(SMOLLM2, intermediate_size=550 * SMOLLM2.intermediate_size)
        with pytest.raises(ConfigError, match=r"81\.68 GiB for weights") as caught:
            resolve(EngineOptions(), large, self.MACHINE)
        weights = re.search(r"--weight-memory (\d+M)", caught.value.fix)[1]
        assert re.search(r"--quantization fp8 \(40.* GiB\) or int4 \(2", caught.value.fix)
        assert (
            "--tensor-parallel 2 shares it among 2 GPUs like this one (this machine has 0)"
            in caught.value.fix
        )
        roomy = replace(self.MACHINE, available_bytes=2**38)
        assert resolve(
            EngineOptions(weight_memory_bytes=parse_bytes(weights)), large, roomy
        ).weight_memory
        assert resolve(EngineOptions(quantization="int4"), large, self.MACHINE).scheme == "int4"

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"device": "tpu"}, "not available"),
            (
                {"device": "cuda", "dtype": "quantized"},
                "--dtype quantized cannot be combined with a GPU",
            ),
        ],
    )
    def test_impossible_choices(self, options, words):
        with pytest.raises(ConfigError, match=words):
            resolve(EngineOptions(**options), SMOLLM2, self.MACHINE)

    def test_no_gpu(self):
        with pytest.raises(ConfigError, match="torch sees no GPU"):
            resolve(EngineOptions(device="cuda"), SMOLLM2, LARGE)


def test_a_small_machine_gets_a_shorter_context():
    small = Machine(num_cores=1, memory_bytes=2**30, available_bytes=900 * 2**20)
    config = resolve(EngineOptions(), SMOLLM2, small)
    assert config.max_context < 8192
    assert "KV memory can hold" in config.reasons["max_context"]
    assert config.full_context_requests >= 1


def test_a_small_token_budget_has_fewer_slots():
    small = resolve(EngineOptions(token_budget=40), SMOLLM2, LARGE)
    assert (small.token_budget, small.max_requests) == (40, 40)


def test_reasons_use_common_words():
    gpu = replace(LARGE, gpu="NVIDIA Test", gpu_bytes=80 * 2**30, gpu_free_bytes=78 * 2**30)
    reasons = (
        resolve(EngineOptions(), SMOLLM2, LARGE).reasons
        | resolve(EngineOptions(), SMOLLM2, gpu).reasons
    )
    assert "identical prefixes are computed once" in reasons["prefix_caching"]
    assert "the largest CUDA graph batch" in reasons["max_requests"]
    assert not re.search(r"\b(rows|beginnings|recorded)\b", " ".join(reasons.values()))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "int3"}, "int3"),
        ({"page_size": 24}, "power of two"),
        ({"fast_math": True}, "kernels of GPUs"),
        ({"max_context": 9000}, "8192"),
        ({"max_context": 1}, "at least 2"),
        ({"max_requests": 0}, "at least 1"),
        ({"token_budget": 10, "max_requests": 20}, "never decode"),
        ({"kv_memory_bytes": 1000}, "hold 0 tokens"),
        (
            {"kv_memory_bytes": 2**21},
            "with --kv-memory, which hold 128 tokens, or accept a short context with",
        ),
        (
            {"kv_memory_bytes": 2**36, "max_requests": 999, "token_budget": 999},
            "of KV memory; the machine has 64.00 GiB",
        ),
        ({"kv_memory_bytes": 40 * 2**20, "max_context": 8192}, "--max-context"),
        ({"threads": -1}, "threads"),
    ],
)
def test_impossible_options_name_the_fix(options, words):
    with pytest.raises(ConfigError) as caught:
        resolve(EngineOptions(**options), SMOLLM2, LARGE)
    assert words in str(caught.value)


def test_more_kv_memory_than_can_be_used_says_what_was_given():
    config = resolve(EngineOptions(kv_memory_bytes=900 * 2**30), SMOLLM2, LARGE)
    assert config.kv_bytes == 64 * 8192 * SMOLLM2.kv_bytes_per_token("float32")
    assert config.reasons["kv_bytes"] == (
        "of the 900.00 GiB that were given: every slot at full context, which is all that can be used"
    )
    # asked for
    short = resolve(EngineOptions(kv_memory_bytes=2**21, max_context=32), SMOLLM2, LARGE)
    assert short.max_context == 32
    busy = replace(LARGE, available_bytes=10 * 2**30)
    assert (
        "are needed and 10.00 GiB are free"
        in resolve(EngineOptions(kv_memory_bytes=12 * 2**30), SMOLLM2, busy).notes[0]
    )


def test_a_model_that_does_not_fit_says_what_is_needed_and_what_helps():
    tiny = Machine(num_cores=1, memory_bytes=2**29, available_bytes=2**29, kernels="neon")
    with pytest.raises(ConfigError, match="513 MiB for weights") as caught:
        resolve(EngineOptions(), SMOLLM2, tiny)
    weights = re.search(r"--weight-memory (\d+M) .* from disk", caught.value.fix)[1]
    assert "takes about 78 MiB for weights" in caught.value.fix
    assert resolve(
        EngineOptions(weight_memory_bytes=parse_bytes(weights)), SMOLLM2, tiny
    ).weight_memory == parse_bytes(weights)


def test_estimated_kv_is_what_is_allocated(tiny_folder):
    from tests.helpers import engine_config

    model = load_model(tiny_folder)
    config = engine_config(model)
    runner = make_cpu_runner(model, config)
    null_page = config.page_size * model.config.kv_bytes_per_token("float32")
    assert runner.cache.numel() * runner.cache.element_size() == config.kv_bytes + null_page


def test_amounts_of_memory():
    assert parse_bytes("512M") == 512 * 2**20
    assert parse_bytes("1.5GiB") == 3 * 2**29
    assert parse_bytes("1000") == 1000
    assert fmt_bytes(3 * 2**29) == "1.50 GiB"
    for wrong in ("", "lots", "-1G", "1X"):
        with pytest.raises(ConfigError):
            parse_bytes(wrong)
