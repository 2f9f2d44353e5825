"""The offline API, as a script uses it."""

import signal

import pytest

from tidemill import LLM, SamplingParams
from tidemill.errors import InvalidRequest
from tidemill.events import Finished


@pytest.fixture(scope="module")
def llm(tiny_folder):
    return LLM(str(tiny_folder), progress=False)


GREEDY = SamplingParams(temperature=0, max_tokens=8)


def test_texts_and_ids_in_one_list(llm):
    ids = llm.tokenizer.encode("hello")
    text, tokens = llm.generate(["hello", ids], GREEDY)
    assert text.text == tokens.text
    assert text.prompt == "hello"
    assert tokens.prompt is None
    assert text.prompt_token_ids == ids
    assert llm.generate("hello", GREEDY)[0].text == text.text
    assert llm.generate(ids, GREEDY)[0].text == text.text


def test_results_carry_everything(llm):
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=5, n=2, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate(["abcdef"], params)
    assert len(output.outputs) == 2
    assert len(output.prompt_logprobs) == 5
    for sample in output.outputs:
        assert len(sample.token_ids) == len(sample.logprobs) == 5
        assert sample.finish_reason == "length"
        assert sample.timings.queue_s + sample.timings.prefill_s + sample.timings.decode_s > 0


def test_parameters_each(llm):
    outputs = llm.generate(["a", "b"], [GREEDY, SamplingParams(temperature=0, max_tokens=3)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [8, 3]
    with pytest.raises(InvalidRequest, match="2 prompts and 1"):
        llm.generate(["a", "b"], [GREEDY])


def test_chat_one_and_many(llm):
    one = [{"role": "user", "content": "hi"}]
    assert llm.chat(one, GREEDY)[0].text == llm.chat([one, one], GREEDY)[1].text


def test_streaming_gives_the_same_text(llm):
    assert "".join(llm.stream("hello", GREEDY)) == llm.generate("hello", GREEDY)[0].text


def test_leaving_a_stream_frees_the_request(llm):
    for _ in llm.stream("hello", SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)):
        break
    assert not llm.core.has_work
    llm.core.scheduler.check_integrity()


def test_generate_beside_an_open_stream(llm):
    """A stream left half-read does not disturb, nor is it disturbed."""
    stream = llm.stream("hello", GREEDY)
    first = next(stream)
    assert llm.generate("other", GREEDY)[0].outputs[0].finish_reason
    assert first + "".join(stream) == llm.generate("hello", GREEDY)[0].text


def test_ctrl_c_takes_effect_between_steps(llm):
    real = llm.core.runner.launch

    def interrupted(plan):
        signal.raise_signal(signal.SIGINT)
        return real(plan)

    llm.core.runner.launch = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.generate("hello", GREEDY)
    llm.core.runner.launch = real
    assert not llm.core.has_work
    llm.core.scheduler.check_integrity()
    assert llm.generate("hello", GREEDY)[0].text


def test_a_script_may_queue_more_than_a_server_would(llm):
    many = llm.generate([[5, 6]] * 5000, SamplingParams(temperature=0, max_tokens=1))
    assert len(many) == 5000


def test_stop_string_ends_one_sample(llm):
    free = llm.generate("hello", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))[0].text
    stop = free[4:6]
    output = llm.generate("hello", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=stop))[0].outputs[0]
    assert output.text == free[: free.index(stop)]
    assert output.finish_reason == "stop"
    assert output.timings.decode_s > 0
    assert [event.reason for event in llm.events if isinstance(event, Finished)] == ["stop"]
    assert not llm.core.has_work


def test_one_wrong_prompt_leaves_nothing_behind(llm):
    with pytest.raises(InvalidRequest):
        llm.generate(["fine", []], GREEDY)
    with pytest.raises(InvalidRequest):
        llm.generate(["fine", [1.5]], GREEDY)
    assert not llm.core.has_work
    assert llm.generate("fine", GREEDY)[0].text
