"""LoRA adapters in the engine: each request computes with its own, as if it had been merged into
the model."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers import Answer, greedy, load_model, make_core, make_llama, run, take, watch
from tidemill.engine.core import EngineCore
from tidemill.engine.parts.adapters import AdapterStore
from tidemill.errors import AdapterError, InvalidRequest
from tidemill.types import events
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Abort, Hold, LoadAdapter, Submit

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 92,
    "vocab_size": 128,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
}
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
PARAMS = {
    "greedy": greedy(8, logprobs=2),
    "seeded": SamplingParams(temperature=0.9, seed=7, max_tokens=8, logprobs=2),
}


def make_lora(
    path: Path,
    base: torch.nn.Module,
    seed: int,
    rank: int = 8,
    targets: tuple[str, ...] = ATTENTION + MLP,
    dtype: torch.dtype = torch.float32,
    **settings: object,
) -> Path:
    """A random adapter as PEFT saves it, large enough to change most tokens."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in base.named_modules():
        if name.rpartition(".")[2] in targets and getattr(module, "weight", None) is not None:
            # Conv1D
            num_out, num_in = (
                module.weight.shape
                if isinstance(module, torch.nn.Linear)
                else module.weight.shape[::-1]
            )
            for half, shape in (("A", (rank, num_in)), ("B", (num_out, rank))):
                values = torch.randn(shape, generator=generator) * (0.3 / rank**0.25)
                tensors[f"base_model.model.{name}.lora_{half}.weight"] = values.to(dtype)
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    stated = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(targets),
        "bias": "none",
    } | settings
    (path / "adapter_config.json").write_text(json.dumps(stated))
    return path


def merged(base: torch.nn.Module, path: Path, target: Path) -> Path:
    """The base with the adapter's product added to its weights, saved as a checkpoint of its own."""
    stated, tensors = (
        json.loads((path / "adapter_config.json").read_text()),
        load_file(path / "adapter_model.safetensors"),
    )
    weights = {name: value.clone() for name, value in base.state_dict().items()}
    for name, down in tensors.items():
        if name.endswith("lora_A.weight"):
            up = tensors[name.replace("lora_A", "lora_B")].double()
            scale = stated["lora_alpha"] / (
                down.shape[0] ** (0.5 if stated.get("use_rslora") else 1)
            )
            stored = name.removeprefix("base_model.model.").replace("lora_A.", "")
            added = scale * up @ down.double()
            weights[stored] = (
                weights[stored].double() + (added.T if stated.get("fan_in_fan_out") else added)
            ).float()
    whole = type(base)(base.config)
    whole.load_state_dict(weights)
    whole.save_pretrained(target)
    return target


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    return make_llama(folder, **SHAPE), folder


def ids(num: int, seed: int) -> list[int]:
    return torch.randint(0, 128, (num,), generator=torch.Generator().manual_seed(seed)).tolist()


def with_loras(folder: Path, *paths: Path, **options: object) -> EngineCore:
    core = make_core(load_model(folder), **{"max_loras": max(len(paths), 1)} | options)
    for number, path in enumerate(paths, 1):
        core.part(AdapterStore).load_now(number, f"a{number}", str(path))
    return core


def ask(
    core: EngineCore, requests: dict[str, tuple[list[int], SamplingParams, int]]
) -> dict[str, Answer]:
    answers = {name: Answer() for name in requests}
    for name, (prompt, params, adapter) in requests.items():
        core.submit(Submit(name, prompt, params, adapter=adapter))
    while core.has_work:
        take(core, answers)
    core.scheduler.table.check_integrity()
    return answers


KINDS = [
    {"rank": 8},
    {"rank": 1, "targets": ("q_proj", "v_proj")},
    {"rank": 64, "targets": MLP, "lora_alpha": 16},
    {"rank": 16, "use_rslora": True, "lora_alpha": 4},
    {"rank": 5, "targets": ("k_proj", "up_proj")},
    {"rank": 24, "targets": ("o_proj",), "dtype": torch.bfloat16},
    {"rank": 256, "lora_alpha": 64, "targets": ("q_proj", "down_proj")},
    {"rank": 12, "targets": ("gate_proj",), "dtype": torch.float16},
]


@pytest.mark.parametrize(
    "backend", ["compiled", pytest.param("torch", marks=pytest.mark.slow)], indirect=True
)
def test_eight_of_a_hundred_in_one_batch_equal_their_merged_models(base, tmp_path, backend):
    """A hundred are loaded; eight of other ranks and targets answer together, beside a request
    without one."""
    reference, folder = base
    paths = [
        make_lora(tmp_path / f"l{i}", reference, 10 + i, **kind) for i, kind in enumerate(KINDS)
    ]
    small = make_lora(tmp_path / "small", reference, 99, rank=2, targets=("v_proj",))
    core = with_loras(folder, *[small] * 92, *paths, max_lora_rank=256, max_loras=100)
    assert sum(adapter.slot >= 0 for adapter in core.part(AdapterStore)) == 100
    requests = {f"r{i}": (ids(20 + 9 * i, i), greedy(10, logprobs=1), 93 + i) for i in range(8)}
    requests["none"] = (ids(30, 50), greedy(10, logprobs=1), 0)
    together = ask(core, requests)
    plain = run(
        make_core(load_model(folder)), {name: request[:2] for name, request in requests.items()}
    )
    assert together["none"] == plain["none"]
    for i, path in enumerate(paths):
        model = load_model(merged(reference, path, tmp_path / f"m{i}"))
        expected = run(make_core(model), {"x": requests[f"r{i}"][:2]})["x"]
        assert together[f"r{i}"].tokens == expected.tokens, KINDS[i]
        assert together[f"r{i}"].tokens != plain[f"r{i}"].tokens
    for name, request in list(requests.items())[:3]:
        assert ask(core, {"again": request})["again"].tokens == together[name].tokens  # cached
    core = with_loras(folder, *paths, max_lora_rank=256)
    for i in range(8):
        prompt, params, _ = requests[f"r{i}"]
        assert ask(core, {"x": (prompt, params, i + 1)})["x"] == together[f"r{i}"]  # bit for bit


@pytest.fixture(scope="module")
def loras(base, tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("loras")
    ranks = (8, 16, 3, 8)
    return [make_lora(folder / f"l{i}", base[0], i, rank=rank) for i, rank in enumerate(ranks)]


@pytest.mark.parametrize("kind", PARAMS)
def test_a_request_with_an_adapter_depends_on_nothing_else(base, loras, kind):
    """Alone; among others with and without adapters; in chunks; cached; preempted; in other slots:
    bit for bit."""
    _, folder = base
    prompt, params = ids(70, 1), PARAMS[kind]
    alone = ask(with_loras(folder, *loras), {"x": (prompt, params, 2)})["x"]
    crowd = {f"o{i}": (ids(1 + 13 * i, 100 + i), params, i % 5) for i in range(9)}
    core = with_loras(folder, *loras)
    assert core.runner.whole.passes.adapted.program is not None
    assert ask(core, crowd | {"x": (prompt, params, 2)})["x"] == alone
    again = ask(core, {"x": (prompt, params, 2)})["x"]
    assert again.last is not None
    assert again.last.num_cached == 64
    assert again == alone
    for chunk in (1, 7):
        assert (
            ask(
                with_loras(folder, *loras, token_budget=chunk, max_requests=1),
                {"x": (prompt, params, 2)},
            )["x"]
            == alone
        )
    swapped = with_loras(folder, loras[1], loras[0])
    assert ask(swapped, {"x": (prompt, params, 1)})["x"] == alone
    small = with_loras(folder, *loras, kv_memory_bytes=13 * 8192, max_context=160)
    seen, answers = watch(small), {"x": Answer(), "u": Answer()}
    small.submit(Submit("x", prompt, params, adapter=2))
    for _ in range(4):
        take(small, answers)
    small.submit(Submit("u", ids(130, 5), params, adapter=1, priority=-1))
    while small.has_work:
        take(small, answers)
    assert answers["x"] == alone
    assert any(isinstance(event, events.Preempted) for event in seen)


def test_the_prefix_cache_never_crosses_adapters(base, loras, tmp_path):
    """Nor does it after another adapter came under the same name and number of slot; the same
    content is found again."""
    reference, folder = base
    prompt, params = ids(50, 3), greedy(2)
    core = with_loras(folder, loras[0], loras[1])

    def cached(adapter: int, salt: str = "") -> int:
        answers = {"x": Answer()}
        core.submit(Submit("x", prompt, params, adapter=adapter, salt=salt))
        while core.has_work:
            take(core, answers)
        assert answers["x"].last is not None
        return answers["x"].last.num_cached

    assert [cached(0), cached(0), cached(1), cached(1), cached(2), cached(2)] == [
        0,
        48,
        0,
        48,
        0,
        48,
    ]
    digest = core.part(AdapterStore).get(1).digest
    # a request cannot name another's pages
    assert cached(0, digest) == cached(0, f"{digest}\n") == 0
    core.part(AdapterStore).unload(1)
    core.part(AdapterStore).load_now(3, "a1", str(make_lora(tmp_path / "other", reference, 77)))
    assert core.part(AdapterStore).get(3).slot == 0
    assert cached(3) == 0
    core.part(AdapterStore).unload(3)
    core.part(AdapterStore).load_now(4, "a1", str(loras[0]))
    assert cached(4) == 48


def test_slots_go_to_the_least_recently_used_and_are_held_meanwhile(base, loras):
    _, folder = base
    alone = {
        i: ask(with_loras(folder, loras[i - 1]), {"x": (ids(9, i), greedy(6), 1)})["x"]
        for i in (1, 2, 3, 4)
    }
    core = with_loras(folder, *loras, max_loras=2)
    assert [adapter.slot for adapter in core.part(AdapterStore)] == [-1, -1, 0, 1]
    core.submit(Submit("held", ids(9, 4), greedy(6), adapter=4))
    answers = {name: Answer() for name in ("held", "r1", "r2", "r3", "again")}
    for i in (1, 2, 3):  # one slot for three adapters: in turn, while the other is held
        core.submit(Submit(f"r{i}", ids(9, i), greedy(6), adapter=i))
    core.submit(Submit("again", ids(9, 4), greedy(6), adapter=4))
    for _ in range(3):
        take(core, answers)
    assert core.part(AdapterStore).get(4).num_users == 1
    assert core.part(AdapterStore).get(4).slot == 1
    while core.has_work:
        take(core, answers)
    assert {i: answers[f"r{i}"].tokens for i in (1, 2, 3)} == {
        i: alone[i].tokens for i in (1, 2, 3)
    }
    assert answers["held"].tokens == answers["again"].tokens == alone[4].tokens
    assert sum(adapter.slot >= 0 for adapter in core.part(AdapterStore)) == 2
    assert not any(adapter.num_users for adapter in core.part(AdapterStore))


def test_an_unloaded_adapter_stays_until_its_requests_are_done(base, loras):
    _, folder = base
    request = (ids(9, 1), greedy(12), 1)
    alone = ask(with_loras(folder, loras[0]), {"x": request})["x"]
    core = with_loras(folder, loras[0])
    answers = {"x": Answer()}
    core.submit(Submit("x", *request[:2], adapter=1))
    take(core, answers)
    core.part(AdapterStore).unload(1)
    with pytest.raises(InvalidRequest, match="not loaded"):
        core.submit(Submit("late", *request[:2], adapter=1))
    core.part(AdapterStore).load(LoadAdapter(2, "a1", str(loras[1])))  # there is no slot for it yet
    while core.has_work:
        take(core, answers)
        core.part(AdapterStore).answers()
    assert answers["x"] == alone
    assert ask(core, {"x": (ids(9, 1), greedy(12), 2)})["x"].tokens != alone.tokens
    assert core.part(AdapterStore).get(2).slot == 0


def test_what_is_held_of_an_adapter_ends_when_it_is_unloaded(base, loras):
    """Once no request has it; also if it is in no slot. The same content under another name holds
    by itself."""
    _, folder = base
    core = with_loras(folder, loras[0], loras[0], max_loras=1)
    held, prompt = core.scheduler.kv.held, ids(40, 1)
    held_by = {"base": 0, "first": 1, "second": 2, "session": 1, "key": 1}
    for name, adapter in [*held_by.items(), ("key", 2)]:
        num_tokens, is_pinned = (32, True) if name != "session" else (0, False)
        core.submit(
            Submit(
                name,
                prompt,
                greedy(2),
                adapter=adapter,
                prefix_leases=[Hold(name, num_tokens, 600.0, is_pinned)],
            )
        )
        while core.has_work:
            core.step()
    assert {*held_by} == {name for name in held_by if name in held}
    core.take_events()

    def ended() -> dict[str, str]:
        core.scheduler.table.check_integrity()
        return {
            one.name: one.reason for one in core.take_events() if isinstance(one, events.HoldEnded)
        }

    core.submit(Submit("x", prompt, greedy(12), adapter=1, prefix_leases=[Hold("late", 0, 600.0)]))
    while not core.part(AdapterStore).get(1).num_users:
        core.step()
    core.part(AdapterStore).unload(1)
    assert (ended(), "first" in held) == ({}, True)
    happened = []
    while core.has_work:
        happened += core.step()[0].events
    assert {one.name for one in happened if isinstance(one, events.HoldEnded)} == {
        "first",
        "session",
        "late",
    }
    assert [name for name in held_by if name in held] == ["base", "second", "key"]
    assert held.num_pinned == 2 * (32 // core.config.page_size)
    core.submit(Submit("y", prompt, greedy(2), adapter=2))
    while core.has_work:
        core.step()
    core.part(AdapterStore).load_now(3, "a3", str(loras[1]))
    assert core.part(AdapterStore).get(2).slot == -1
    core.part(AdapterStore).unload(2)
    assert ended() == dict.fromkeys(("second", "key"), "the adapter a2 was unloaded")
    core.part(AdapterStore).unload(3)
    assert (ended(), "base" in held) == ({}, True)


def test_requests_that_wait_for_an_adapter_can_be_aborted_and_fail_alone(base, loras, tmp_path):
    _, folder = base
    gone = tmp_path / "gone"
    shutil.copytree(loras[2], gone)
    core = with_loras(folder, loras[0], gone, loras[1], max_loras=1)
    core.submit(Submit("a", ids(9, 1), greedy(5), adapter=3))
    (gone / "adapter_config.json").unlink()
    core.submit(Submit("b", ids(9, 1), greedy(5), adapter=2))
    core.submit(Submit("c", ids(9, 1), greedy(5), adapter=1))
    core.submit(Submit("d", ids(9, 1), greedy(5), adapter=1))
    core.abort(Abort("d", "test"))
    finished, failed = set(), {}
    while core.has_work:
        output, refused = core.step()
        finished |= {delta.request_id for delta in output.deltas if delta.finish_reason}
        failed |= {one.request_id: one for one in refused}
    assert finished == {"a", "c"}
    assert list(failed) == ["b"]
    assert "holds no adapter_config.json" in failed["b"].message
    shutil.copytree(loras[3], gone, dirs_exist_ok=True)  # another adapter under the same path
    core.submit(Submit("e", ids(9, 1), greedy(5), adapter=2))
    refused = []
    while core.has_work:
        refused += core.step()[1]
    assert "have changed" in refused[0].message


@pytest.mark.parametrize("leaves", ["request", "adapter"])
def test_an_adapter_that_was_read_for_nobody_is_no_work(base, loras, leaves):
    _, folder = base
    core = with_loras(folder, loras[0], loras[1], max_loras=1)
    core.submit(Submit("a", ids(9, 1), greedy(5), adapter=1))
    if leaves == "request":
        core.abort(Abort("a", "test"))
    else:
        core.part(AdapterStore).unload(1)
    while core.part(AdapterStore).is_reading:
        wait([one.reading for one in core.part(AdapterStore)._reading])
        core.step()
        assert not core.part(AdapterStore).is_reading
    assert not core.has_work


def test_two_engines_cannot_have_adapters_in_one_model(base):
    model = load_model(base[1])
    make_core(model)
    make_core(model, max_loras=1)
    make_core(model)
    with pytest.raises(AssertionError, match="another engine"):
        make_core(model, max_loras=1)


def test_without_memory_for_adapters_there_are_none(base, loras):
    _, folder = base
    core = make_core(load_model(folder))
    assert core.runner.loras is None
    with pytest.raises(InvalidRequest, match="no memory for adapters"):
        core.part(AdapterStore).load_now(1, "a", str(loras[0]))
    assert not list(core.part(AdapterStore))


def fused_model(kind: str, folder: Path) -> torch.nn.Module:
    """An adapter of a family whose files hold q, k and v in one matrix."""
    from transformers import (
        BloomConfig,
        BloomForCausalLM,
        GPT2Config,
        GPT2LMHeadModel,
        Phi3Config,
        Phi3ForCausalLM,
    )

    torch.manual_seed(0)
    if kind == "phi3":
        config = Phi3Config(
            **SHAPE,
            num_attention_heads=4,
            num_key_value_heads=2,
            pad_token_id=0,
            initializer_range=0.2,
        )
        made = Phi3ForCausalLM(config)
    elif kind == "gpt2":
        made = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=128,
                n_embd=64,
                n_layer=2,
                n_head=4,
                n_positions=256,
                initializer_range=0.2,
            )
        )
    else:
        made = BloomForCausalLM(
            BloomConfig(vocab_size=128, hidden_size=64, n_layer=2, n_head=4, initializer_range=0.2)
        )
    made.eval().save_pretrained(folder)
    return made


FUSED = {
    "phi3": (("qkv_proj", "gate_up_proj", "o_proj", "down_proj"), {}),
    "gpt2": (("c_attn", "c_fc", "c_proj"), {"fan_in_fan_out": True}),
    "bloom": (("query_key_value", "dense", "dense_h_to_4h"), {}),
}


@pytest.mark.parametrize("kind", FUSED)
def test_fused_and_transposed_matrices_are_adapted(tmp_path, kind):
    """The tokens of Transformers' model with merged weights."""
    base, (targets, settings) = fused_model(kind, tmp_path / "base"), FUSED[kind]
    path = make_lora(tmp_path / "lora", base, 5, rank=6, targets=targets, **settings)
    whole = type(base).from_pretrained(merged(base, path, tmp_path / "merged")).eval()
    prompt = ids(25, 2)
    with torch.inference_mode():
        expected = whole.generate(
            torch.tensor([prompt]),
            max_new_tokens=10,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    core = with_loras(tmp_path / "base", path)
    answers = ask(core, {"x": (prompt, greedy(10), 1), "plain": (prompt, greedy(10), 0)})
    assert answers["x"].tokens == expected[0, 25:].tolist()
    assert answers["plain"].tokens != answers["x"].tokens


def test_experts_and_routers_are_refused_by_name(tmp_path):
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = SHAPE | {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    base = MixtralForCausalLM(MixtralConfig(**sizes))
    base.save_pretrained(tmp_path / "base")
    core = with_loras(
        tmp_path / "base", make_lora(tmp_path / "attention", base, 1, targets=("q_proj", "v_proj"))
    )
    layer = "base_model.model.model.layers.0.block_sparse_moe."
    for module, what in (("experts.0.w1", "adapts an expert"), ("gate", "adapts a router")):
        path = make_lora(tmp_path / module, base, 1, targets=("q_proj",))
        tensors = load_file(path / "adapter_model.safetensors")
        tensors |= {
            f"{layer}{module}.lora_A.weight": torch.zeros(8, 64),
            f"{layer}{module}.lora_B.weight": torch.zeros(4, 8),
        }
        save_file(tensors, path / "adapter_model.safetensors")
        with pytest.raises(AdapterError, match=what):
            core.part(AdapterStore).load_now(2, "b", str(path))
