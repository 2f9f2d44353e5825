"""AsyncLLM, as a program with an event loop uses it: one real engine process for most tests."""

import asyncio
import os

import pytest

from tidemill import LLM, AsyncLLM, RequestOutputKind, SamplingParams
from tidemill.errors import EngineDead, InvalidRequest

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def engine(tiny_folder, loop):
    made = AsyncLLM(str(tiny_folder), threads=1, max_context=256, seed=1)
    loop.run(made.start())
    yield made
    loop.run(made._close())


@pytest.fixture(scope="module")
def llm(tiny_folder):
    with LLM(str(tiny_folder), progress=False, threads=1, max_context=256) as made:
        yield made


async def whole(outputs):
    return [output async for output in outputs]


def test_the_same_texts_as_llm(engine, llm, loop):
    (expected,) = llm.generate("hello", GREEDY)
    outputs = loop.run(whole(engine.generate("hello", GREEDY, "mine")))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert all(outputs[-1].text.startswith(output.text) for output in outputs)
    assert (outputs[-1].text, outputs[-1].prompt, outputs[-1].request_id) == (
        expected.text,
        "hello",
        "mine",
    )
    assert outputs[-1].prompt_token_ids == expected.prompt_token_ids
    conversation = [{"role": "user", "content": "hi"}]
    assert (
        loop.run(whole(engine.chat(conversation, GREEDY)))[-1].text
        == llm.chat(conversation, GREEDY)[0].text
    )


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, "delta", "final_only"], ids=str)
def test_kinds_of_output(engine, llm, loop, kind):
    params = {
        "temperature": 1.0,
        "max_tokens": 12,
        "ignore_eos": True,
        "n": 2,
        "seed": 3,
        "logprobs": 1,
    }
    (expected,) = llm.generate("hello", SamplingParams(**params))
    outputs = loop.run(whole(engine.generate("hello", SamplingParams(**params, output_kind=kind))))
    for i, sample in enumerate(expected.outputs):
        parts = [output.outputs[i] for output in outputs]
        assert "".join(part.text for part in parts) == sample.text
        assert [token for part in parts for token in part.token_ids] == sample.token_ids
        assert [one for part in parts for one in part.logprobs] == sample.logprobs
    assert outputs[-1].finished
    assert (len(outputs) == 1) == (kind == "final_only")


def test_requests_are_batched_and_ids_are_unique(engine, loop):
    async def test():
        first = engine.generate("hello", LONG, "first")
        await anext(first)
        others = await asyncio.gather(*(whole(engine.generate("hello", GREEDY)) for _ in range(4)))
        with pytest.raises(InvalidRequest, match="There is a request 'first' already"):
            await anext(engine.generate("x", GREEDY, "first"))
        assert {outputs[-1].text for outputs in others} == {
            (await whole(engine.generate("hello", GREEDY)))[-1].text
        }
        assert not [output async for output in first][-1].error

    loop.run(test())
    value = {metric.name: metric for metric in engine.get_metrics()}
    assert value["tidemill_engine_up"].value == value["tidemill_model_loaded"].value == 1
    assert value["tidemill_step_seconds"].count < value["tidemill_output_tokens_total"].value


def test_abort_and_leaving_end_a_request(engine, loop):
    async def test():
        outputs = engine.generate("hello", LONG, "long")
        seen = [await anext(outputs)]
        await engine.abort(["long", "unknown"])
        seen += [output async for output in outputs]
        assert seen[-1].finished
        assert seen[-1].outputs[0].finish_reason == "abort"
        assert len(seen[-1].outputs[0].token_ids) < 200
        other = engine.generate("hello", LONG, "long")  # the id is free again
        await anext(other)
        await other.aclose()
        assert engine._engine.client.num_pending == 0
        stopped = await whole(
            engine.generate(
                "hello",
                SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=seen[0].text),
            )
        )
        assert (stopped[-1].text, stopped[-1].outputs[0].finish_reason) == ("", "stop")

    loop.run(test())


def test_errors_are_typed_and_alone(engine, loop):
    async def test():
        for wrong in ([], [10**6], 7, "long " * 200):
            with pytest.raises(InvalidRequest):
                await whole(engine.generate(wrong, GREEDY))
        with pytest.raises(InvalidRequest, match="The regex can"):
            await whole(engine.generate("x", SamplingParams(structured_outputs={"regex": "[a-"})))
        with pytest.raises(InvalidRequest, match=r"There is no adapter 'no'\. Loaded are: none"):
            await whole(engine.generate("x", GREEDY, lora="no"))
        await engine.check_health()
        assert (await whole(engine.generate("x", GREEDY)))[-1].finished

    loop.run(test())


def test_shutdown_ends_the_process_and_what_is_under_way(engine, loop):
    """The last test: nothing can be asked afterwards."""

    async def test():
        async with engine:
            pid = engine._engine.client.link.pid
            sampled = SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.5)
            one, other = [
                (await whole(engine.generate("hello", sampled)))[-1].text for _ in range(2)
            ]
            assert one != other
            under_way = engine.generate("hello", LONG)
            await anext(under_way)
            engine.shutdown()
            with pytest.raises(EngineDead):
                await whole(under_way)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        with pytest.raises(EngineDead, match="is shut down"):
            await whole(engine.generate("x", GREEDY))
        with pytest.raises(EngineDead):
            await engine.check_health()

    loop.run(test())
