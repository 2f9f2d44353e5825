"""Prefill and decode engines behind one interface: the answers of one engine, whatever a request
asks for and whichever engine dies."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from types import SimpleNamespace

import pytest
from transformers import LlamaForCausalLM

from tests.core_link import CoreLink
from tests.engine.test_lora import make_lora
from tests.waiting import until_async
from tidemill.capabilities import asked, check
from tidemill.config import EngineOptions
from tidemill.engine import replicas as replicas_module
from tidemill.engine import roles
from tidemill.engine.client import EngineClient
from tidemill.engine.inbox import Inbox
from tidemill.engine.llm import LLM
from tidemill.engine.pending import Pending
from tidemill.engine.replicas import Replicas
from tidemill.engine.roles import Roles, routing_of
from tidemill.errors import Cancelled, ConfigError, InvalidRequest, QueueFull
from tidemill.types.events import (
    Admitted,
    Deferred,
    EngineRestarted,
    Finished,
    FirstToken,
    Placed,
    TakenOver,
)
from tidemill.types.sampling import Beams, Grammar, SamplingParams
from tidemill.types.wire import Delta, Hold, StepOutput, Submit

LONG = [2 + (7 * i) % 90 for i in range(70)]  # more than a decode engine takes at once


@pytest.fixture
def in_process(monkeypatch):
    monkeypatch.setattr(replicas_module, "EngineLink", CoreLink)


async def answer(client, name, prompt=LONG, eos=(), **given):
    """Everything that is told of a request, by sample."""
    params = SamplingParams(
        **{"max_tokens": 8, "temperature": 0.0, "ignore_eos": not eos} | given.pop("params", {})
    )
    samples = [{"tokens": [], "logprobs": [], "prompt": None, "end": None} for _ in range(params.n)]
    async with aclosing(
        client.submit(Submit(name, list(prompt), params, list(eos), **given))
    ) as deltas:
        async for delta in deltas:
            sample = samples[delta.index]
            assert sample["end"] is None
            sample["tokens"] += delta.token_ids
            sample["logprobs"] += delta.logprobs or []
            sample["prompt"] = delta.prompt_logprobs or sample["prompt"]
            sample["end"], sample["cached"], sample["score"] = (
                delta.finish_reason,
                delta.num_cached,
                delta.score,
            )
            sample["embedding"] = delta.embedding
            if delta.finish_reason:
                assert (
                    min(delta.timings.queue_s, delta.timings.prefill_s, delta.timings.decode_s) >= 0
                )
    return samples


def options(folder, **given):
    return EngineOptions(
        **{"model": str(folder), "threads": 1, "prefill_engines": 1, "decode_engines": 1} | given
    )


async def started(given, seen=None):
    client = Replicas(
        given.num_engines, None if seen is None else seen.extend, routing=routing_of(given)
    )
    await client.start(given)
    return client


def run(test, folder, **given):
    async def whole():
        seen = []
        client = await started(options(folder, **given), seen)
        try:
            await test(client, seen)
            await until_async(lambda: client.is_idle)
            for one in client.clients:
                if one.link is not None:
                    one.link.core.scheduler.table.check_integrity()
            roles = client.routing
            assert (roles.routes, roles._at_gate, roles._let_in) == ({}, {}, {})
            assert not any(room.num_promised for room in client.routing._rooms.values())
        finally:
            await client.close()

    asyncio.run(whole())


KINDS = {
    "greedy": {},
    "samples": {"params": {"n": 3, "temperature": 1.0, "seed": 5}},
    "logprobs": {"params": {"logprobs": 2, "temperature": 0.8, "seed": 1}},
    "prompt logprobs": {
        "params": {"prompt_logprobs": 1, "logprobs": 0, "n": 2, "seed": 3, "temperature": 1.0}
    },
    "penalties": {
        "params": {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "max_tokens": 20}
    },
    "bias and min_tokens": {
        "params": {"logit_bias": {1: 100.0}, "min_tokens": 4, "ignore_eos": False},
        "eos": (1,),
    },
    "ends at once": {"params": {"logit_bias": {1: 100.0}, "ignore_eos": False}, "eos": (1,)},
    "one token": {"params": {"max_tokens": 1}},
    "to the end of the context": {"params": {"max_tokens": None}, "prompt": [*LONG, *LONG, *LONG]},
    "grammar": {"params": {"grammar": Grammar("regex", "[a-f ]{6}")}},
    "grammar of one token": {"params": {"grammar": Grammar("regex", "[a-f]")}},
    "beams": {"params": {"beams": Beams(3), "n": 2, "logprobs": 0}},
    "embedding": {"params": {"pooling": "mean"}},
    "adapter": {"adapter": 1, "params": {"logprobs": 1}},
    "short": {"prompt": [5, 6, 7]},
    "held": {
        "prefix_leases": [
            Hold("pin", 64, 100.0, True, "a prompt cache"),
            Hold("session", 0, 100.0, False, "a session"),
        ]
    },
}


def test_answers_are_those_of_one_engine(tiny_folder, tmp_path, in_process):
    lora = make_lora(tmp_path / "lora", LlamaForCausalLM.from_pretrained(tiny_folder), 1)

    async def test(client, seen):
        alone = EngineClient(new_link=CoreLink)
        try:
            await alone.start(options(tiny_folder, loras=(f"one={lora}",)))
            for name, given in KINDS.items():
                expected = await answer(alone, name, **{"salt": name} | given)
                assert await answer(client, name, **{"salt": name} | given) == expected, name
            placed = [
                (one.request_id, one.part, one.replica) for one in seen if isinstance(one, Placed)
            ]
            whole = {"one token": 0, "embedding": 0, "beams": 1, "short": 1}
            for name in KINDS:
                both = [(name, "prefill", 0), (name, "decode", 1)]
                ends_at_once = name in ("ends at once", "grammar of one token")
                parts = (
                    [(name, "whole", whole[name])]
                    if name in whole
                    else both[: 1 if ends_at_once else 2]
                )
                assert [one for one in placed if one[0] == name] == parts
            again = [
                one for one in seen if isinstance(one, TakenOver) and one.request_id == "greedy"
            ]
            assert [
                (one.replica, one.source, one.num_found + one.num_computed) for one in again
            ] == [(1, 0, len(LONG) + 1)]
            ends = [
                one.reason
                for one in seen
                if isinstance(one, Finished) and one.request_id == "greedy"
            ]
            assert ends == ["handed over", "length"]
            assert (await answer(alone, "a", adapter=1))[0]["tokens"] != (await answer(alone, "b"))[
                0
            ]["tokens"]
        finally:
            await alone.close()

    run(test, tiny_folder, loras=(f"one={lora}",))


def test_a_sample_that_reached_a_stop_string_does_not_go_on(tiny_folder, in_process):
    """As the server does it: it says so when it has read the text, here after the first token of
    the first sample."""

    async def test(client, seen):
        params = {"n": 2, "temperature": 1.0, "seed": 4, "max_tokens": 6}
        expected = await answer(client, "whole", params=params)
        request = Submit("r", LONG, SamplingParams(ignore_eos=True, **params), salt="other")
        tokens = [[], []]
        async with aclosing(client.submit(request)) as deltas:
            async for delta in deltas:
                tokens[delta.index] += delta.token_ids
                if delta.index == 0:
                    client.finish("r", 0)
                if delta.finish_reason:
                    break
        assert tokens == [expected[0]["tokens"][:1], expected[1]["tokens"]]
        assert {one.request_id for one in seen if isinstance(one, TakenOver)} == {
            "whole:0",
            "whole:1",
            "r:1",
        }

    run(test, tiny_folder)


def test_a_prompt_begins_when_a_decode_engine_has_room(tiny_folder, in_process):
    """The decode engine stands still with both of its slots promised: others wait, within the
    queue's limit, and can be cancelled; tenants take turns."""

    async def test(client, seen):
        expected = await answer(client, "before", salt="b")
        decoder = client.clients[1].link
        decoder.pause(True)
        going = [asyncio.create_task(answer(client, f"r{i}", salt=f"{i}")) for i in range(2)]
        await until_async(
            lambda: (
                sum(isinstance(one, Finished) and one.reason == "handed over" for one in seen) == 3
            )
        )
        going += [
            asyncio.create_task(answer(client, f"r{i}", salt=f"{i}", tenant="b" if i == 4 else ""))
            for i in (2, 3, 4)
        ]
        await until_async(lambda: client.routing._at_gate.keys() == {"r2", "r3", "r4"})
        with pytest.raises(QueueFull):
            await answer(client, "too many")
        with pytest.raises(InvalidRequest):
            await answer(client, "wrong", prompt=[*LONG, 10_000])
        why = {one.request_id: one.reason for one in seen if isinstance(one, Deferred)}
        assert why["r2"] == "no decode engine has room: 2 of 2 slots are taken or promised"
        assert why["r3"] == "1 requests wait for room in the decode engines"
        assert not any(isinstance(one, Admitted) and one.request_id in why for one in seen)
        client.cancel("r3", Cancelled("no"))
        with pytest.raises(Cancelled):
            await going[3]
        decoder.pause(False)
        assert [(await one)[0]["tokens"] for at, one in enumerate(going) if at != 3] == [
            expected[0]["tokens"]
        ] * 4
        begun = [one.request_id for one in seen if isinstance(one, Admitted) and one.replica == 0]
        assert begun.index("r4") < begun.index("r2")  # its tenant has nothing under way

    run(test, tiny_folder, max_requests=2, max_waiting=3)


def test_a_killed_engine_loses_no_request(tiny_folder, in_process):
    async def test(client, seen):
        prompts = [LONG[i:] for i in range(3)]
        params = {"max_tokens": 60, "n": 2, "temperature": 1.0, "seed": 3}

        def begin(name):
            return [
                asyncio.create_task(answer(client, f"{name}{i}", one, params=params, salt=name))
                for i, one in enumerate(prompts)
            ]

        async def ends(going):
            return [[(sample["tokens"], sample["end"]) for sample in await one] for one in going]

        expected = await ends(begin("a"))

        async def kill(number, role):
            link = client.clients[number].link
            link.pause(True)
            going = begin(role)
            await until_async(
                lambda: sum(one.replica == number for one in of(Placed, role)) == len(prompts)
            )
            link.pause(False)
            num = 1 if number == 0 else 3  # tokens, the first of which came from the other one
            await until_async(
                lambda: any(len(one.outputs[0]) >= num for one in client.routing.routes.values())
            )
            link.kill()
            assert await ends(going) == expected, role
            await until_async(
                lambda: any(
                    isinstance(one, EngineRestarted) and one.replica == number for one in seen
                )
            )

        def of(kind, name):
            return [
                one for one in seen if isinstance(one, kind) and one.request_id.startswith(name)
            ]

        await kill(1, "decode")
        await kill(0, "prefill")
        assert await ends(begin("again")) == expected
        assert client.num_restarts == 2
        whole = [one for one in seen if isinstance(one, Placed) and "engine works" in one.reason]
        assert {one.reason.partition(" engine")[0] for one in whole} <= {"no decode", "no prefill"}
        assert any(one.part == "decode" and one.replica == 0 for one in whole)

    run(test, tiny_folder)


def test_what_a_decode_engine_has_goes_on_there(tiny_folder, in_process):
    async def test(client, seen):
        first = (await answer(client, "first"))[0]["tokens"]
        await answer(client, "next", prompt=[*LONG, *first, 4, 5, 6])
        placed = [one for one in seen if isinstance(one, Placed) and one.request_id == "next"]
        assert [(one.part, one.replica) for one in placed] == [("whole", 1)]
        assert placed[0].reason == "all but 17 of 81 prompt tokens are known to it"
        assert (
            next(
                one for one in seen if isinstance(one, Admitted) and one.request_id == "next"
            ).num_cached
            == 64
        )

    run(test, tiny_folder, token_budget=512)


def test_kv_pages_are_moved_and_not_computed_again(tiny_folder, in_process):
    """What a decode engine cannot have heard of when the request comes is computed: here it has
    heard of all whole pages."""

    async def test(client, seen):
        expected = await answer(client, "before", salt="b")
        decoder = client.clients[1].link
        decoder.pause(True)
        going = asyncio.create_task(answer(client, "r"))
        importer = decoder.core.runner.mover.outside.importer
        await until_async(
            lambda: sum(bool(key) for key in importer._changed.values()) >= len(LONG) // 16
        )
        await until_async(
            lambda: any(
                isinstance(one, Placed) and one.request_id == "r" and one.part == "decode"
                for one in seen
            )
        )
        decoder.pause(False)
        assert await going == expected
        taken = next(one for one in seen if isinstance(one, TakenOver) and one.request_id == "r")
        assert (taken.num_found, taken.num_computed) == (64, len(LONG) + 1 - 64)

    run(test, tiny_folder)


def test_of_several_decode_engines_the_one_that_decodes_fetches(tiny_folder, in_process):
    async def test(client, seen):
        prompts = {
            name: [(seed + 7 * i) % 90 + 2 for i in range(70)] for seed, name in enumerate("abcd")
        }
        await asyncio.gather(
            *(answer(client, name, prompt=prompt) for name, prompt in prompts.items())
        )
        placed = [one for one in seen if isinstance(one, Placed) and one.part == "decode"]
        assert len(placed) == len(prompts)
        kvs = [one.link.core.scheduler.kv for one in client.clients[1:]]
        # each knows of all pages
        await until_async(
            lambda: all(len(kv.offload.tiers.peers) == 4 * len(prompts) for kv in kvs)
        )
        expected = [set(kv.behind._expected) for kv in kvs]
        assert min(map(len, expected)) >= 4
        assert not expected[0] & expected[1]
        for kv, own in zip(kvs, expected, strict=True):
            assert not {kv.index.key_of(page) for page in kv.behind.fetched} - own

    run(test, tiny_folder, decode_engines=2)


def test_a_request_is_handed_over_while_other_prompts_are_computed(tiny_folder, in_process):
    """Its pages are exported, those of the next prompt are being exported all the time."""

    async def test(client, seen):
        going = [
            asyncio.create_task(answer(client, "a")),
            asyncio.create_task(answer(client, "b", prompt=LONG[::-1] * 3)),
        ]
        await asyncio.gather(*going)
        order = [
            (type(one), one.request_id, getattr(one, "part", ""))
            for one in seen
            if isinstance(one, Placed | FirstToken)
        ]
        assert order.index((Placed, "a", "decode")) < order.index((FirstToken, "b", ""))

    run(test, tiny_folder, token_budget=16, max_requests=8)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"decode_engines": 0}, "--prefill needs --decode"),
        ({"prefill_engines": 0}, "--decode needs --prefill"),
        ({"data_parallel": 2}, "engines are either alike or have roles"),
        ({"remote_workers": 1}, "cannot share workers"),
        (
            {"prefix_caching": False},
            "with --no-prefix-caching: KV pages cannot go from prefill engines",
        ),
        ({"prefix_index": "radix"}, "with --prefix-index radix: KV pages cannot go"),
        ({"kv_layout": "virtual"}, "with --kv-layout virtual: KV pages cannot go"),
        (
            {"prefill_engines": 0, "decode_engines": 0, "kv_transfer_bytes": 2**20},
            "is of prefill engines",
        ),
    ],
)
def test_options_that_do_not_go_together(given, what):
    with pytest.raises(ConfigError, match=what):
        check(asked(options("/nowhere", **given)))


def test_an_llm_is_one_engine(tiny_folder):
    with pytest.raises(ConfigError, match="one engine in this process"):
        LLM(str(tiny_folder), prefill_engines=1, decode_engines=1)


# ---- the gate, without engines: what they say is made up


@pytest.fixture
def gate(monkeypatch):
    """One prefill and one decode engine that has a single slot, and what was sent to them."""
    monkeypatch.setattr(EngineClient, "working", True)
    monkeypatch.setattr(EngineClient, "alive", True)
    sizes = {
        "max_requests": 1,
        "num_pages": 100,
        "page_size": 16,
        "token_budget": 512,
        "max_waiting": 1000,
    }
    config = SimpleNamespace(
        **sizes,
        layout=SimpleNamespace(groups=[0]),
        context_of=lambda _: 100_000,
        policy_of=lambda _: None,
    )
    ready, sent = (
        SimpleNamespace(config=config, model=SimpleNamespace(vocab_size=1000, pooler=None)),
        [],
    )

    def make() -> Replicas:
        made = Replicas(2, routing=Roles(1, 1))
        for client in made.clients:
            client.ready, client._is_held, client.link = (
                ready,
                False,
                SimpleNamespace(send=sent.append),
            )
        return made

    return make, sent


async def never_mind(client, name):
    async for _ in client.submit(Submit(name, [1] * 1000, SamplingParams(max_tokens=10))):
        pass


async def rest():
    for _ in range(20):
        await asyncio.sleep(0)


def test_what_was_kept_for_a_request_that_ended_early_is_given_to_the_next(gate):
    make, sent = gate

    async def ask():
        client = make()
        tasks = [asyncio.create_task(never_mind(client, name)) for name in "ab"]
        await rest()
        assert [one.request_id for one in sent] == ["a"]
        client.clients[0]._take(StepOutput([Delta("a", 0, [5], finish_reason="stop")], []))
        await rest()
        assert [one.request_id for one in sent] == ["a", "b"]
        for task in tasks:
            task.cancel()

    asyncio.run(ask())


def test_nobody_waits_for_room_for_ever(gate, monkeypatch):
    make, sent = gate

    async def ask():
        client = make()
        client.routing._room("1").observe(1, 0, 50)  # and more that need no prefill keep coming
        tasks = [asyncio.create_task(never_mind(client, name)) for name in "abc"]
        await rest()
        assert not sent
        monkeypatch.setattr(roles, "_PATIENCE_S", -1.0)
        client.routing.changed()
        assert [one.request_id for one in sent] == ["a"]  # and no other until it is admitted
        client.routing.take(1, [Admitted(0.0, "a", 0, 0, 1000, 0.0, "first")])
        assert [one.request_id for one in sent] == ["a", "b"]
        for task in tasks:
            task.cancel()

    asyncio.run(ask())


def test_a_crowd_at_the_gate_of_an_engine_that_dies_goes_on(gate, monkeypatch):
    make, _ = gate

    async def ask():
        client = make()
        first, second = client.clients
        monkeypatch.setattr(EngineClient, "working", property(lambda one: one is second))
        for i in range(1000):
            request = Submit(f"r{i}", [1, 2, 3], SamplingParams())
            first.pending[f"r{i}"] = Pending(request, Inbox(), [[]])
        first._hand_over(False)
        assert not first.pending

    asyncio.run(ask())
