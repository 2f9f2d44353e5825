"""Groups of real processes: models of every kind, cut in every way."""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from itertools import count

import pytest

from bench.ports import reserved_port
from tests.helpers import LONG_S, Answer, greedy, make_llama, run
from tests.models.test_families import LAYERS, SIZES
from tests.models.test_llama import prompts
from tests.models.test_moe import make
from tests.models.test_state_models import make_reference
from tests.parallel.near_ties import excused
from tidemill.config import EngineOptions
from tidemill.engine.client import EngineClient
from tidemill.engine.load import inspect, load_core
from tidemill.engine.replicas import Replicas
from tidemill.engine.roles import routing_of
from tidemill.errors import ConfigError
from tidemill.types.events import Admitted, EngineRestarted, PagesMoved, TierNotUsed
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit

pytestmark = pytest.mark.slow


# ---- every layout


def dense(path):
    make_llama(
        path,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )


def window(path):
    import transformers

    sizes = SIZES | {"num_attention_heads": 8, "num_key_value_heads": 4}
    config = transformers.Gemma3TextConfig(
        **sizes, head_dim=24, sliding_window=20, layer_types=LAYERS
    )
    transformers.Gemma3ForCausalLM(config).save_pretrained(path)


def moe(path):
    make("Qwen3Moe", num_attention_heads=8, num_key_value_heads=4).save_pretrained(path)


def state(path):
    make_reference("Mamba2", path, hidden_size=64, num_hidden_layers=4, num_heads=8, n_groups=4)


MODELS = {"dense": dense, "window": window, "moe": moe, "state": state}
LAYOUTS = {
    "tp2": {"tensor_parallel": 2},
    "tp4": {"tensor_parallel": 4},
    "pp2": {"pipeline_parallel": 2},
    "tp2 pp2": {"tensor_parallel": 2, "pipeline_parallel": 2},
    "gathered2": {"tensor_parallel": 2, "tensor_layout": "gathered"},
    "gathered4": {"tensor_parallel": 4, "tensor_layout": "gathered"},
    "phased2": {"tensor_parallel": 2, "tensor_layout": "phased"},
    "phased4": {"tensor_parallel": 4, "tensor_layout": "phased"},
    "2d": {"tensor_parallel": 4, "tensor_layout": "2d"},
    "ep2": {"tensor_parallel": 2, "expert_parallel": True},
    "ep4": {"tensor_parallel": 4, "expert_parallel": True},
    "ep2 pp2": {"tensor_parallel": 2, "pipeline_parallel": 2, "expert_parallel": True},
}
ALL = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
EXACT = ("pp2", "gathered2", "gathered4")  # nothing is summed in another order than in one process


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    """A folder, requests, and their answers by one process."""
    folder = tmp_path_factory.mktemp(request.param)
    MODELS[request.param](folder)
    vocab_size = inspect(str(folder))[2].vocab_size
    asked = {
        name: (prompt, greedy(12, logprobs=2)) for name, prompt in prompts(6, vocab_size).items()
    }
    return (
        folder,
        asked,
        run(load_core(EngineOptions(model=str(folder), threads=1, kv_memory_bytes=2**25)), asked),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(model, layout):
    folder, asked, expected = model
    options = EngineOptions(model=str(folder), threads=1, kv_memory_bytes=2**25, **LAYOUTS[layout])
    kind = folder.name[:-1]
    refused = {
        "2d": kind in ("moe", "state"),
        "ph": kind in ("moe", "state"),
        "ep": kind != "moe",
    }.get(layout[:2], False)
    if refused:
        with pytest.raises(
            ConfigError, match=r"cannot be combined with (experts|states)|the model has no experts"
        ):
            load_core(options)
        return
    core = load_core(options)
    try:
        answers = run(core, asked)
        assert excused(answers, expected) <= 1
        if layout in EXACT:
            assert answers == expected
        for name, request in asked.items():  # batch-invariant, and with a cached prefix
            assert run(core, {name: request})[name] == answers[name]
    finally:
        core.close()


@pytest.mark.parametrize("ranks", [{}, {"tensor_parallel": 2}], ids=["dp2", "dp2 tp2"])
def test_replicas(model, ranks):
    """Behind one client: whichever takes a request, alone or among others, it has the tokens of one
    process."""
    folder, asked, expected = model
    given = EngineOptions(
        model=str(folder), threads=1, kv_memory_bytes=2**25, data_parallel=2, **ranks
    )

    async def main():
        client = Replicas(given.num_engines, lambda events: None)
        await client.start(given)
        try:
            turns = [
                (f"{turn}-{name}", *request) for turn in range(2) for name, request in asked.items()
            ]
            return await asyncio.gather(*(answered(client, *turn) for turn in turns))
        finally:
            await client.close()

    answers = asyncio.run(main())
    first, second = (
        dict(zip(asked, made, strict=True))
        for made in (answers[: len(asked)], answers[len(asked) :])
    )
    assert first == second
    assert excused(first, expected) <= (1 if ranks else 0)


# ---- roles


async def answered(client, name, prompt, params=ALL):
    answer = Answer()
    async with aclosing(client.submit(Submit(name, prompt, params))) as deltas:
        async for delta in deltas:
            answer.tokens += delta.token_ids
            answer.logprobs += delta.logprobs or []
    return answer


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_roles_whose_engines_have_several_ranks(tmp_path, layout):
    """Every rank of the prefill engine hands its parts of pages to the same rank of the decode
    engine. What comes late on a busy machine is computed again, so several rounds may be needed
    until pages were fetched."""
    dense(tmp_path)
    given = EngineOptions(model=str(tmp_path), threads=1, **LAYOUTS[layout])
    happened = []

    def num_loaded():
        loads = [
            event
            for event in happened
            if isinstance(event, PagesMoved) and event.tier == "peer" and event.is_load
        ]
        return sum(event.num_pages for event in loads)

    async def answers(client, number):
        asked = {
            f"{number}.{k}": [2 + (7 + k + 4 * number) * i % 89 for i in range(70 + 9 * k)]
            for k in range(4)
        }
        return await asyncio.gather(
            *(answered(client, name, prompt) for name, prompt in asked.items())
        )

    async def whole():
        options = replace(given, prefill_engines=1, decode_engines=1)
        one, roles = Replicas(1), Replicas(2, happened.extend, routing=routing_of(options))
        try:
            await one.start(given)
            await roles.start(options)
            async with asyncio.timeout(LONG_S):
                for number in count():
                    assert await answers(roles, number) == await answers(one, number)
                    if num_loaded() >= 6:
                        break
        finally:
            await one.close()
            await roles.close()

    asyncio.run(whole())
    assert not [event for event in happened if isinstance(event, EngineRestarted)]


def test_ranks_exchange_their_parts_of_pages_between_hosts(tmp_path):
    """By TCP: each at a port of its own, after that of the first."""
    dense(tmp_path)
    (tmp_path / "key").write_text("0123456789abcdef")
    prompt, happened = [2 + 7 * i % 90 for i in range(100)], []

    async def whole(port):
        first, second = EngineClient(), EngineClient(on_events=happened.extend)
        how = {
            "model": str(tmp_path),
            "threads": 1,
            "tensor_parallel": 2,
            "kv_key_file": str(tmp_path / "key"),
        }
        try:
            await first.start(EngineOptions(**how, kv_export=f"tcp:127.0.0.1:{port}:4M"))
            expected = await answered(first, "one", prompt)
            await second.start(EngineOptions(**how, kv_import=f"tcp:127.0.0.1:{port}"))
            async with asyncio.timeout(LONG_S):
                for number in count():
                    assert (
                        await answered(second, f"two {number}", [*prompt, *range(2, 3 + number)])
                        is not None
                    )
                    if sum(event.num_peer for event in happened if isinstance(event, Admitted)):
                        break
            assert await answered(second, "the same", prompt) == expected
        finally:
            await second.close()
            await first.close()

    with reserved_port(2) as port:
        asyncio.run(whole(port))
    assert not [event for event in happened if isinstance(event, TierNotUsed)]
