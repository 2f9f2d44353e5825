"""The offline API, as a script uses it."""

import re
import signal

import msgspec
import pytest

from tidemill import LLM, BeamSearchParams, SamplingParams
from tidemill.errors import ConfigError, InvalidRequest
from tidemill.events import Finished
from tidemill.sampling import Grammar


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


def test_beam_search(llm):
    params = BeamSearchParams(beam_width=3, max_tokens=6, length_penalty=0.5, logprobs=2)
    one, other = llm.beam_search(["hello", llm.tokenizer.encode("there")], params)
    for output, prompt in ((one, "hello"), (other, "there")):
        assert [one.score for one in output.sequences] == sorted((one.score for one in output.sequences), reverse=True)
        for made in output.sequences:
            assert made.tokens == llm.tokenizer.encode(prompt) + made.token_ids
            assert made.text == llm.tokenizer.decode(made.tokens, skip_special=False)
            assert made.cum_logprob / len(made.logprobs) ** 0.5 == pytest.approx(made.score)
            assert len(made.logprobs) == len(made.token_ids) + (made.finish_reason == "stop")
    greedy = llm.generate("hello", SamplingParams(temperature=0, max_tokens=6, logprobs=0, ignore_eos=True))[0].outputs[0]
    best = llm.beam_search("hello", BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True))[0].sequences[0]
    assert best.cum_logprob >= sum(entry.logprob for entry in greedy.logprobs)
    assert len(best.token_ids) == 6
    with pytest.warns(UserWarning, match="1 of 2 prompts failed"):
        failed = llm.beam_search(["hello", []], params)[1]
    with pytest.raises(InvalidRequest, match="Prompt 1: The prompt is empty"):
        _ = failed.sequences
    with pytest.raises(InvalidRequest, match="takes BeamSearchParams"):
        llm.beam_search("hello", GREEDY)


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


@pytest.mark.parametrize("wrong", [[], [1.5], None, 7, {"text": "x"}, {"prompt": 7}, "long " * 200, [10**6]], ids=repr)
def test_a_wrong_prompt_of_a_list_fails_alone(llm, wrong):
    with pytest.warns(UserWarning, match=r"1 of 3 prompts failed \(1\)"):
        first, failed, last = llm.generate(["fine", wrong, "fine"], GREEDY)
    assert first.text == last.text == llm.generate("fine", GREEDY)[0].text
    assert first.error is None
    assert isinstance(failed.error, InvalidRequest)
    assert "Prompt 1: " in str(failed.error)
    with pytest.raises(InvalidRequest, match="Prompt 1: "):
        _ = failed.outputs[0].text
    with pytest.raises(InvalidRequest, match="Prompt 1: "):
        _ = failed.text
    assert not llm.core.has_work


def test_what_the_engine_refuses_later_fails_alone(llm):
    params = [GREEDY, msgspec.structs.replace(GREEDY, grammar=Grammar("regex", "[a-")), GREEDY]
    with pytest.warns(UserWarning, match="prompts failed"):
        first, failed, last = llm.generate(["fine"] * 3, params)
    assert first.text == last.text
    assert "Prompt 1: " in str(failed.error)
    assert not llm.core.has_work


def test_a_single_wrong_prompt_is_raised(llm):
    for wrong in ("long " * 200, [10**6], {"prompt_token_ids": ["a"]}):
        with pytest.raises(InvalidRequest):
            llm.generate(wrong, GREEDY)
    assert not llm.core.has_work


@pytest.mark.parametrize("wrong", [None, 7, object()], ids=["None", "7", "object"])
def test_no_prompt_at_all(llm, wrong):
    with pytest.raises(InvalidRequest, match=r"generate\(\) takes a prompt or a list of prompts"):
        llm.generate(wrong)


@pytest.mark.parametrize("wrong", ["text", None, [], [{"content": "no role"}], {"role": "user"}], ids=repr)
def test_chat_wants_messages(llm, wrong):
    with pytest.raises(InvalidRequest, match=r'chat\(\) takes a list of messages.* \[\{"role": "user"'):
        llm.chat(wrong)


def test_one_wrong_conversation_fails_alone(llm):
    one = [{"role": "user", "content": "hi"}]
    with pytest.warns(UserWarning, match="prompts failed"):
        first, failed = llm.chat([one, "text"], GREEDY)
    assert first.text == llm.chat(one, GREEDY)[0].text
    assert "chat() takes a list of messages" in str(failed.error)


def test_prompts_as_vllm_takes_them(llm):
    ids = llm.tokenizer.encode("hello")
    plain = llm.generate("hello", GREEDY)[0].text
    forms = [{"prompt": "hello"}, {"prompt_token_ids": ids}, {"prompt": "other", "prompt_token_ids": ids}]
    for outputs in (llm.generate(forms, sampling_params=GREEDY, use_tqdm=False), *(llm.generate(one, GREEDY) for one in forms)):
        assert {output.text for output in outputs} == {plain}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_contxt": 5}, "no option 'max_contxt'. Did you mean max_context?"),
        ({"max_model_length": 5}, "Did you mean max_model_len?"),
        ({"data_parallel_size": 2}, "data_parallel_size=2 is not supported"),
        ({"quantization": "int5"}, "quantization"),
        ({"max_model_len": 5, "max_context": 5}, "max_context is given twice"),
        ({"sampling_defaults": "mine"}, "Choose model or neutral"),
        ({"default_max_tokens": -1}, "default_max_tokens is -1"),
    ],
)
def test_a_wrong_option_is_named(tiny_folder, options, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        LLM(str(tiny_folder), progress=False, **options)


def test_vllm_options(tiny_folder):
    asked = {"max_model_len": 128, "max_num_seqs": 3, "block_size": 8, "enable_prefix_caching": False, "dtype": "float"}
    asked |= {"tensor_parallel_size": 1, "quantization": "gptq", "tokenizer": str(tiny_folder), "kv_cache_memory_bytes": 2**24}
    with (
        pytest.warns(UserWarning, match=r"without effect: enforce_eager\."),
        pytest.warns(UserWarning, match="gpu_memory_utilization has no effect on a CPU"),
    ):
        llm = LLM(str(tiny_folder), progress=False, gpu_memory_utilization=0.9, enforce_eager=True, seed=5, **asked)
    config = llm.config
    assert (config.max_context, config.max_requests, config.page_size, config.prefix_caching) == (128, 3, 8, False)
    sampled = SamplingParams(max_tokens=8, temperature=1.5)
    first = [output.text for output in llm.generate(["hello"] * 2, sampled)]
    assert first[0] != first[1]
    again = LLM(str(tiny_folder), progress=False, seed=5)
    assert [output.text for output in again.generate(["hello"] * 2, sampled)] == first


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"temprature": 1}, "There is no sampling parameter 'temprature'. Did you mean temperature?"),
        ({"repeat_penalty": 1}, "Did you mean repetition_penalty?"),
        ({"best_of": 2}, "best_of is not supported"),
    ],
)
def test_a_wrong_parameter_is_named(given, words):
    with pytest.raises(InvalidRequest, match=re.escape(words)):
        SamplingParams(**given)


def test_parameters_as_vllm_takes_them(llm):
    assert SamplingParams(temperature=None, stop=None, best_of=None, detokenize=True) == SamplingParams()
    with pytest.raises(InvalidRequest, match="sampling_params is a SamplingParams"):
        llm.generate("x", {"temperature": 0})
