"""Mamba, Mamba-2 and Qwen3-Next, small and random: against Transformers in float32, and against
themselves cut in other ways."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.helpers import (
    Answer,
    engine_config,
    greedy,
    load_model,
    make_core,
    reference_agrees,
    run,
    take,
)
from tidemill import config
from tidemill.distributed.world import Stage
from tidemill.kernels import native
from tidemill.kernels.attention import TorchAttention
from tidemill.kernels.kv_cache import PagedKV, new_cache
from tidemill.kernels.machine import detect
from tidemill.kernels.native_attention import NativeAttention
from tidemill.kernels.native_state import NativeStates
from tidemill.kernels.state import PagedStates, TorchStates
from tidemill.kv.manager import INDEXES
from tidemill.models.registry import model_class
from tidemill.quant import PLAIN
from tidemill.types.cache_layout import Place, StateLayout
from tidemill.types.model_config import AttentionSpec, StateSpec
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit
from tidemill.weights.checkpoint import open_checkpoint

SIZES = {
    "vocab_size": 200, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 12, "conv_kernel": 4, "initializer_range": 0.2,
    "pad_token_id": 0, "use_associative_scan": False,
}  # fmt: skip
FAMILIES = {
    "Mamba": {"intermediate_size": 64, "time_step_rank": 5},
    "Mamba with biases": {
        "use_bias": True,
        "use_conv_bias": False,
        "conv_kernel": 3,
        "tie_word_embeddings": False,
    },
    "Qwen3Next": {
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 40,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [1],
        "max_position_embeddings": 256,
        "layer_types": [
            "linear_attention",
            "full_attention",
            "linear_attention",
            "linear_attention",
        ],
    },
    "Mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 8},
}
INTERVAL = 16


def make_reference(name: str, path=None, **changed):
    import transformers

    settings = SIZES | FAMILIES[name] | changed
    kind = name.split()[0]
    torch.manual_seed(0)
    reference = (
        getattr(transformers, f"{kind}ForCausalLM")(
            getattr(transformers, f"{kind}Config")(**settings)
        )
        .eval()
        .float()
    )
    for weight_name, weight in reference.named_parameters():
        if "A_log" in weight_name:
            weight.data.uniform_(-2, 1.5)
        elif "norm" in weight_name or weight_name.endswith(".D"):
            weight.data.normal_(
                0.0 if kind == "Qwen3Next" and "linear_attn" not in weight_name else 1.0, 0.3
            )
        elif "dt_" in weight_name and weight.dim() == 1:
            weight.data.uniform_(-3, 1)
        elif weight.dim() > 1 or "bias" in weight_name:
            weight.data.normal_(0.0, 0.25)
    if path is not None:
        reference.save_pretrained(path)
    return reference


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    return make_reference(request.param, path), path


class Harness:
    """A pool and a table, without an engine: rows get pages as they grow."""

    def __init__(self, model, num_rows: int = 4, max_blocks: int = 16) -> None:
        self.model, layers = model, model.config.layers
        sizes = [spec.piece_bytes if isinstance(spec, StateSpec) else [] for spec in layers]
        layout = StateLayout.pack(sizes, (max(max(one, default=0) for one in sizes) // 64 + 4) * 64)
        num_columns = max_blocks * layout.block_pages
        assert layout.block_pages > 1
        # what others left there
        pool = torch.randint(
            0, 255, (1 + num_rows * num_columns, layout.page_bytes), dtype=torch.uint8
        )
        table = 1 + torch.randperm(num_rows * num_columns, dtype=torch.int32).view(
            num_rows, num_columns
        )
        states = PagedStates(pool, list(table.split(max_blocks, dim=1)), layout, layers, INTERVAL)
        self.states = NativeStates(states) if native.lib else TorchStates(states)
        assert native.lib is None or NativeStates.can_run(states)
        self.attention = self._make_attention(num_rows) if model.config.token_layers else None

    def _make_attention(self, num_rows: int):
        config, num_pages, page_size = self.model.config, 32, 16
        self.page_size = page_size
        cache = new_cache(
            1 + num_rows * num_pages,
            len(config.token_layers),
            config.num_kv_heads,
            page_size,
            config.head_dim,
        )
        self.table = (1 + torch.randperm(num_rows * num_pages, dtype=torch.int32)).view(
            num_rows, num_pages
        )
        angles = [
            one
            for one, spec in zip(self.model.angles(256), config.layers, strict=True)
            if isinstance(spec, AttentionSpec)
        ]
        places = tuple(Place(0, i) for i in range(len(angles)))
        kv = PagedKV(cache, [self.table], config.token_layers, angles, places)
        return NativeAttention(kv) if native.lib else TorchAttention(kv)

    def plan(self, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray):
        states = self.states.plan(rows, starts, counts)
        if self.attention is None:
            return states
        positions = np.concatenate(
            [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
        )
        pages = self.table.numpy()[np.repeat(rows, counts), positions // self.page_size].astype(
            np.int64
        )
        slots = torch.from_numpy(pages * self.page_size + positions % self.page_size)
        attention = self.attention.plan(
            rows, starts, counts, torch.from_numpy(positions), slots[None]
        )
        kinds = [isinstance(spec, AttentionSpec) for spec in self.model.config.layers]
        return SimpleNamespace(
            convolve=states.convolve,
            scan=states.scan,
            attend=lambda layer, qkv, learned: attention.attend(sum(kinds[:layer]), qkv, learned),
        )

    @torch.inference_mode()
    def step(self, *items: tuple[int, int, list[int]]) -> torch.Tensor:
        """Items are (row, start, ids). Logits of all their tokens."""
        rows, starts, counts = np.array([(row, start, len(ids)) for row, start, ids in items]).T
        ids = torch.tensor([i for _, _, ids in items for i in ids])
        embedded = self.model.embed_tokens(
            ids, torch.cat([torch.arange(start, start + len(ids)) for _, start, ids in items])
        )
        return self.model.logits(self.model(embedded, self.plan(rows, starts, counts)))


def prompts(num: int, longest: int = 90) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, longest, (num,), generator=generator).tolist()
    return [torch.randint(2, 200, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture(autouse=True)
def interval(monkeypatch):
    """States are kept more often than a user's, so that short prompts have some."""
    monkeypatch.setattr(config.cache, "STATE_INTERVAL", INTERVAL)


def test_tokens_and_logits_equal_transformers(saved, backend):
    reference, path = saved
    model = load_model(path)
    harness, asked = Harness(model), prompts(20 if backend == "compiled" else 3)
    with torch.inference_mode():
        for prompt in sorted(asked, key=len)[-3:]:
            expected = reference(torch.tensor([prompt])).logits[0]
            assert (harness.step((0, 0, prompt)) - expected).abs().max() < 1e-3
    core = make_core(model)
    outputs = run(core, {str(i): (prompt, greedy(32)) for i, prompt in enumerate(asked)})
    results = [
        reference_agrees(reference, prompt, outputs[str(i)].tokens)
        for i, prompt in enumerate(asked)
    ]
    assert sum(agreed for agreed, _ in results) >= 0.98 * len(asked) * 32
    assert core.runner.fallback == "" or backend == "torch"  # the forward pass is recorded


def test_a_request_sees_neither_others_nor_chunks_nor_the_cache(saved):
    _, path = saved
    model = load_model(path)
    asked = {str(i): (prompt, greedy(12, logprobs=2)) for i, prompt in enumerate(prompts(8))}
    asked["again"] = asked["3"]
    alone = {
        name: run(make_core(model, prefix_caching=False), {name: request})[name]
        for name, request in asked.items()
    }
    for options in (
        {},
        {"token_budget": 7, "max_requests": 7},
        {"token_budget": 64, "policy": "static"},
    ):
        core = make_core(model, **options)
        assert run(core, asked) == alone
        assert run(core, asked) == alone  # from states that were kept


def test_a_preempted_request_starts_again_from_a_state_that_was_kept(saved):
    _, path = saved
    model = load_model(path)
    asked = {str(i): (prompt, greedy(20, logprobs=0)) for i, prompt in enumerate(prompts(5))}
    alone = {name: run(make_core(model), {name: request})[name] for name, request in asked.items()}
    core, answers = make_core(model), {name: Answer() for name in asked}
    for name, (prompt, params) in asked.items():
        core.submit(Submit(name, prompt, params, []))
    num_steps = num_preempted = 0
    while core.has_work:
        take(core, answers)
        num_steps += 1
        if num_steps % 9 == 0 and core.scheduler.running:
            core.scheduler.table.preempt(core.scheduler.running[-1], "test")
            num_preempted += 1
    assert num_preempted > 1
    assert answers == alone
    core.scheduler.table.check_integrity()


def test_bits_do_not_depend_on_how_a_sequence_is_computed(saved, backend):
    _, path = saved
    model = load_model(path)
    ids = prompts(1, 90)[0] + prompts(4, 60)[2]
    whole = Harness(model).step((0, 0, ids))
    for size in (1, 7, INTERVAL, 40):
        harness = Harness(model)
        parts = [harness.step((2, at, ids[at : at + size])) for at in range(0, len(ids), size)]
        assert torch.equal(torch.cat(parts), whole)
    harness, others = Harness(model), prompts(3, 50)
    harness.step((0, 0, ids[:9]))
    together = harness.step(
        (1, 0, others[0]), (0, 9, ids[9:]), (3, 0, others[1]), (2, 0, others[2])
    )
    first = len(others[0])
    assert torch.equal(together[first : first + len(ids) - 9], whole[9:])


@pytest.fixture(scope="module")
def mamba(tmp_path_factory):
    path = tmp_path_factory.mktemp("mamba")
    make_reference("Mamba", path)
    return load_model(path)


def test_a_stage_of_a_pipeline_has_its_own_layers(mamba):
    model = type(mamba)(mamba.config, PLAIN)
    model.keep(Stage(0, 2, 0, 1))
    assert len(list(model.blocks)) == 1


def test_a_mamba_serves_64_requests_of_any_length_in_constant_memory(mamba):
    layout = engine_config(mamba, max_context=2000).layout
    per_request = layout.num_pages_for(2000, 64)
    assert per_request == layout.num_pages_for(200, 64) <= 6
    core = make_core(
        mamba,
        max_context=2000,
        token_budget=64,
        kv_memory_bytes=64 * per_request * layout.states.page_bytes,
    )
    kv, held = core.scheduler.kv, []
    asked = {str(i): (prompts(1)[0][:1], greedy(40)) for i in range(63)}
    asked["long"] = ([7] * 1900, greedy(50))
    for name, (prompt, params) in asked.items():
        core.submit(Submit(name, prompt, params, []))
    answers = {name: Answer() for name in asked}
    while core.has_work:
        take(core, answers)
        held.append(
            max((kv.num_pages_of(request.seq) for request in core.scheduler.running), default=0)
        )
        assert len(core.scheduler.running) + len(core.scheduler.waiting) <= 64
    assert max(held) <= per_request
    assert not any(answer.finish_reason is None for answer in answers.values())
    assert core.scheduler.kv.num_pages == 64 * per_request


def test_a_prefix_is_found_although_what_follows_is_shifted(saved):
    """States are kept all along a prompt, not only at its end."""
    _, path = saved
    model = load_model(path)
    shared = prompts(3, 90)[2] + [5] * 70
    first, second = shared + [9] * 20, shared[: len(shared) - 11] + [8] * 31
    core = make_core(model)
    run(core, {"first": (first, greedy(4))})
    asked = {"second": (second, greedy(8, logprobs=1))}
    again = run(core, asked)["second"]
    assert again.last.num_cached == (len(shared) - 11) // INTERVAL * INTERVAL > 0
    assert again == run(make_core(model, prefix_caching=False), asked)["second"]


@pytest.fixture
def sparse(monkeypatch):
    """An interval that no prompt here reaches: states that are found were kept where a prompt or a
    prefix ended."""
    monkeypatch.setattr(config.cache, "STATE_INTERVAL", 1024)


def is_as_without_the_cache(core, model, name, request):
    """Tokens that were found, of an answer that is the same, bit for bit, as without the prefix
    cache."""
    answer = run(core, {name: request})[name]
    assert answer == run(make_core(model, prefix_caching=False), {name: request})[name]
    core.scheduler.table.check_integrity()
    return answer.last.num_cached


@pytest.mark.parametrize(("budget", "index"), [(64, "hash"), (7, "hash"), (64, "radix")])
def test_the_next_turn_starts_where_the_prompt_before_it_ended(saved, sparse, budget, index):
    _, path = saved
    model = load_model(path)
    core, first = (
        make_core(model, token_budget=budget, max_requests=7, prefix_index=index),
        [3 + i % 150 for i in range(75)],
    )
    answer = run(core, {"1": (first, greedy(10))})["1"]
    second = [*first, *answer.tokens, 9, 8, 7]
    assert is_as_without_the_cache(core, model, "2", (second, greedy(10, logprobs=1))) == 64
    third = [*second, 5, 5, 5, 5, 5, 5, 5, 5]
    assert (
        is_as_without_the_cache(core, model, "3", (third, greedy(10, logprobs=1)))
        == (len(second) - 1) // 16 * 16
    )
    assert (
        is_as_without_the_cache(
            core, model, "other", ([*first[:70], 1, 2, 3], greedy(10, logprobs=1))
        )
        == 64
    )
    assert is_as_without_the_cache(core, model, "1 again", (first, greedy(10, logprobs=1))) == 64


@pytest.mark.parametrize("index", INDEXES)
def test_a_prefix_that_prompts_share_is_found_from_the_third_on(saved, sparse, index):
    """The first does not know it; the second keeps the state where the two part."""
    _, path = saved
    model = load_model(path)
    core, shared = make_core(model, prefix_index=index), [3 + i % 150 for i in range(50)]
    found = [
        is_as_without_the_cache(
            core, model, str(i), (shared + [160 + i] * (30 + 9 * i), greedy(6, logprobs=1))
        )
        for i in range(5)
    ]
    assert found == [0, 0, 48, 48, 48]


def test_samples_start_from_the_state_at_the_end_of_their_prompt(saved, sparse):
    _, path = saved
    core = make_core(load_model(path))
    params = SamplingParams(max_tokens=5, seed=1, temperature=1.0, n=3)
    answers = run(core, {"x": ([3 + i % 150 for i in range(40)], params)})
    assert [answers[name].last.num_cached for name in sorted(answers)] == [0, 32, 32]


def test_large_states_have_large_pages(tmp_path):
    """Qwen3-Next-80B: a state of 75 MiB would take 101 page tables with pages of 16 tokens."""
    shape = {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048,
        "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
        "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "intermediate_size": 5120, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    checkpoint = open_checkpoint(tmp_path)
    model = model_class(checkpoint).read_config(checkpoint)
    machine = replace(detect(), available_bytes=2**40, memory_bytes=2**40)
    resolved = config.resolve(
        config.EngineOptions(model=str(tmp_path), device="cpu", dtype="float32"), model, machine
    )
    assert model.state_bytes > 75 * 2**20
    assert (resolved.page_size, len(resolved.layout.groups)) == (64, 27)
    asked = config.EngineOptions(model=str(tmp_path), device="cpu", dtype="float32", page_size=16)
    assert len(config.resolve(asked, model, machine).layout.groups) == 102


def write_gguf(name: str, reference, path) -> None:
    """As llama.cpp's converter writes these families."""
    import gguf

    arch = {"Mamba": "mamba", "Mamba2": "mamba2", "Qwen3Next": "qwen3next"}[name]
    shape, writer = reference.config, gguf.GGUFWriter(path, arch)
    writer.add_context_length(256)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_hidden_layers)
    ssm = {
        "Mamba": lambda: (shape.conv_kernel, shape.intermediate_size, shape.state_size, shape.time_step_rank, None),
        "Mamba2": lambda: (shape.conv_kernel, 2 * shape.hidden_size, shape.state_size, shape.num_heads, shape.n_groups),
        "Qwen3Next": lambda: (
            shape.linear_conv_kernel_dim, shape.linear_value_head_dim * shape.linear_num_value_heads, shape.linear_key_head_dim,
            shape.linear_num_value_heads, shape.linear_num_key_heads,
        ),
    }[name]()  # fmt: skip
    for add, value in zip(
        (writer.add_ssm_conv_kernel, writer.add_ssm_inner_size, writer.add_ssm_state_size, writer.add_ssm_time_step_rank,
         writer.add_ssm_group_count), ssm, strict=True,
    ):  # fmt: skip
        if value is not None:
            add(value)
    writer.add_layer_norm_rms_eps(
        shape.rms_norm_eps if name == "Qwen3Next" else shape.layer_norm_epsilon
    )
    if name == "Qwen3Next":
        writer.add_feed_forward_length(shape.intermediate_size)
        writer.add_head_count(shape.num_attention_heads)
        writer.add_head_count_kv(shape.num_key_value_heads)
        writer.add_key_length(shape.head_dim)
        writer.add_rope_dimension_count(
            int(shape.head_dim * shape.rope_parameters["partial_rotary_factor"])
        )
        writer.add_rope_freq_base(shape.rope_parameters["rope_theta"])
        writer.add_expert_count(shape.num_experts)
        writer.add_expert_used_count(shape.num_experts_per_tok)
        writer.add_expert_feed_forward_length(shape.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(shape.shared_expert_intermediate_size)
        writer.add_full_attention_interval(2)
    names = gguf.get_tensor_name_map(
        getattr(gguf.MODEL_ARCH, arch.upper()), shape.num_hidden_layers
    )
    for key, value in reference.state_dict().items():
        if key == "lm_head.weight" and shape.tie_word_embeddings:
            continue
        stored = key.replace("dt_bias", "dt_proj.bias") if name != "Mamba" else key
        for target, values in converted(
            names.get_name(stored, (".weight", ".bias")), key, value, name, shape
        ):
            writer.add_tensor(target, np.ascontiguousarray(values.float().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def converted(target, key, value, name, shape):
    if key.endswith("A_log"):
        value = -torch.exp(value)
    if "conv1d.weight" in key:
        value = value.squeeze()
    if name == "Mamba2" and key.endswith(("A_log", ".D")):
        value = value[:, None]
    if name == "Mamba2" and key.endswith("mixer.norm.weight"):
        value = value.view(shape.n_groups, -1)
    if name == "Qwen3Next" and "norm" in key and "linear_attn" not in key:
        value = value + 1
    if name == "Qwen3Next" and "in_proj_qkvz" in key:
        keys, per_key = (
            shape.linear_key_head_dim,
            shape.linear_num_value_heads // shape.linear_num_key_heads,
        )
        values = per_key * shape.linear_value_head_dim
        q, k, v, z = value.view(shape.linear_num_key_heads, -1, value.shape[1]).split(
            [keys, keys, values, values], 1
        )
        layer = key.split(".")[2]
        return [
            (f"blk.{layer}.attn_qkv.weight", torch.cat([part.flatten(0, 1) for part in (q, k, v)])),
            (f"blk.{layer}.attn_gate.weight", z.flatten(0, 1)),
        ]
    if key.endswith("experts.gate_up_proj"):
        gate, up = value.chunk(2, 1)
        layer = key.split(".")[2]
        return [
            (f"blk.{layer}.ffn_gate_exps.weight", gate),
            (f"blk.{layer}.ffn_up_exps.weight", up),
        ]
    if key.endswith("experts.down_proj"):
        return [(f"blk.{key.split('.')[2]}.ffn_down_exps.weight", value)]
    assert target is not None, key
    return [(target, value)]


@pytest.mark.parametrize("name", ["Mamba", "Mamba2", "Qwen3Next"])
def test_gguf_files_give_the_same_logits(name, tmp_path, monkeypatch):
    changed = {}
    if name == "Qwen3Next":
        changed = {"mlp_only_layers": [], "layer_types": ["linear_attention", "full_attention"] * 2}
    monkeypatch.setitem(FAMILIES, name, FAMILIES[name] | changed)
    reference, prompt = make_reference(name), prompts(1)[0]
    write_gguf(name, reference, tmp_path / "model.gguf")
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
    assert (
        Harness(load_model(tmp_path / "model.gguf")).step((0, 0, prompt)) - expected
    ).abs().max() < 1e-3
