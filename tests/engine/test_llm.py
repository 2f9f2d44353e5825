"""The offline API, as a script uses it."""

import gc
import re
import signal
import weakref

import msgspec
import pytest

from tidemill import LLM, BeamSearchParams, Grammar, SamplingParams
from tidemill.errors import ConfigError, EngineDead, InvalidRequest
from tidemill.types.events import Finished


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
    params = SamplingParams(
        temperature=0.8, seed=1, max_tokens=5, n=2, logprobs=2, prompt_logprobs=1
    )
    (output,) = llm.generate(["abcdef"], params)
    assert len(output.outputs) == 2
    assert output.prompt_logprobs[0] is None
    assert [entry.token_id for entry in output.prompt_logprobs[1:]] == output.prompt_token_ids[1:]
    for sample in output.outputs:
        assert len(sample.token_ids) == len(sample.logprobs) == 5
        assert sample.finish_reason == "length"
        assert sample.timings.queue_s + sample.timings.prefill_s + sample.timings.decode_s > 0


def test_beam_search(llm):
    params = BeamSearchParams(beam_width=3, max_tokens=6, length_penalty=0.5, logprobs=2)
    one, other = llm.beam_search(["hello", llm.tokenizer.encode("there")], params)
    for output, prompt in ((one, "hello"), (other, "there")):
        assert [one.score for one in output.sequences] == sorted(
            (one.score for one in output.sequences), reverse=True
        )
        for made in output.sequences:
            assert made.tokens == llm.tokenizer.encode(prompt) + made.token_ids
            assert made.text == llm.tokenizer.decode(made.tokens, skip_special=False)
            assert made.cum_logprob / len(made.logprobs) ** 0.5 == pytest.approx(made.score)
            assert len(made.logprobs) == len(made.token_ids) + (made.finish_reason == "stop")
    greedy = llm.generate(
        "hello", SamplingParams(temperature=0, max_tokens=6, logprobs=0, ignore_eos=True)
    )[0].outputs[0]
    best = llm.beam_search("hello", BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True))[
        0
    ].sequences[0]
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
    llm.core.scheduler.table.check_integrity()


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
    llm.core.scheduler.table.check_integrity()
    assert llm.generate("hello", GREEDY)[0].text


def test_a_script_may_queue_more_than_a_server_would(llm):
    many = llm.generate([[5, 6]] * 5000, SamplingParams(temperature=0, max_tokens=1))
    assert len(many) == 5000


def test_stop_string_ends_one_sample(llm):
    free = llm.generate("hello", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))[
        0
    ].text
    stop = free[4:6]
    output = llm.generate(
        "hello", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=stop)
    )[0].outputs[0]
    assert output.text == free[: free.index(stop)]
    assert output.finish_reason == "stop"
    assert output.timings.decode_s > 0
    assert [event.reason for event in llm.events if isinstance(event, Finished)] == ["stop"]
    assert not llm.core.has_work


@pytest.mark.parametrize(
    "wrong", [[], [1.5], None, 7, {"text": "x"}, {"prompt": 7}, "long " * 200, [10**6]], ids=repr
)
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


@pytest.mark.parametrize(
    "wrong", ["text", None, [], [{"content": "no role"}], {"role": "user"}], ids=repr
)
def test_chat_wants_messages(llm, wrong):
    with pytest.raises(
        InvalidRequest, match=r'chat\(\) takes a list of messages.* \[\{"role": "user"'
    ):
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
    forms = [
        {"prompt": "hello"},
        {"prompt_token_ids": ids},
        {"prompt": "other", "prompt_token_ids": ids},
    ]
    for outputs in (
        llm.generate(forms, sampling_params=GREEDY, use_tqdm=False),
        *(llm.generate(one, GREEDY) for one in forms),
    ):
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
    asked = {
        "max_model_len": 128,
        "max_num_seqs": 3,
        "block_size": 8,
        "enable_prefix_caching": False,
        "dtype": "float",
    }
    asked |= {
        "tensor_parallel_size": 1,
        "quantization": "gptq",
        "tokenizer": str(tiny_folder),
        "kv_cache_memory_bytes": 2**24,
    }
    with (
        pytest.warns(UserWarning, match=r"without effect: enforce_eager\."),
        pytest.warns(UserWarning, match="gpu_memory_utilization has no effect on a CPU"),
    ):
        llm = LLM(
            str(tiny_folder),
            progress=False,
            gpu_memory_utilization=0.9,
            enforce_eager=True,
            seed=5,
            **asked,
        )
    config = llm.config
    assert (config.max_context, config.max_requests, config.page_size, config.prefix_caching) == (
        128,
        3,
        8,
        False,
    )
    sampled = SamplingParams(max_tokens=8, temperature=1.5)
    first = [output.text for output in llm.generate(["hello"] * 2, sampled)]
    assert first[0] != first[1]
    again = LLM(str(tiny_folder), progress=False, seed=5)
    assert [output.text for output in again.generate(["hello"] * 2, sampled)] == first


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"temprature": 1},
            "There is no sampling parameter 'temprature'. Did you mean temperature?",
        ),
        ({"repeat_penalty": 1}, "Did you mean repetition_penalty?"),
        ({"best_of": 2}, "best_of is not supported"),
    ],
)
def test_a_wrong_parameter_is_named(given, words):
    with pytest.raises(InvalidRequest, match=re.escape(words)):
        SamplingParams(**given)


def test_parameters_as_vllm_takes_them(llm):
    assert (
        SamplingParams(temperature=None, stop=None, best_of=None, detokenize=True)
        == SamplingParams()
    )
    with pytest.raises(InvalidRequest, match="sampling_params is a SamplingParams"):
        llm.generate("x", {"temperature": 0})


def test_logprobs_are_read_as_vllm_has_them(llm):
    params = SamplingParams(
        temperature=0, max_tokens=3, ignore_eos=True, logprobs=2, prompt_logprobs=1
    )
    (output,) = llm.generate(["abcdef"], params)
    first, *others = output.prompt_logprobs
    assert first is None
    for token, entry in zip(output.prompt_token_ids[1:], others, strict=True):
        assert next(iter(entry)) == token
        assert entry[token].decoded_token == llm.tokenizer.token_text(token)
        assert min(one.rank or 1 for one in entry.values()) == 1
        assert len(entry) == 1 + (entry[token].rank is None)
    (sample,) = output.outputs
    for token, entry in zip(sample.token_ids, sample.logprobs, strict=True):
        assert entry[token].rank == 1  # greedy
        assert [one.rank for one in entry.values()] == [1, 2]
        assert (entry.token_id, entry.logprob) == (token, entry[token].logprob)
    assert sample.cumulative_logprob == sum(
        entry[entry.token_id].logprob for entry in sample.logprobs
    )
    assert llm.generate([[5]], params)[0].prompt_logprobs == [None]
    later = msgspec.structs.replace(params, prompt_logprobs_start=3)
    assert (
        llm.generate(["abcdef"], later)[0].prompt_logprobs
        == [None] * 3 + output.prompt_logprobs[3:]
    )


def test_a_closed_llm_takes_nothing_more(tiny_folder):
    with LLM(str(tiny_folder), progress=False) as closing:
        assert closing.generate("hello", GREEDY)[0].text
    closing.close()
    with pytest.raises(EngineDead, match="This LLM is closed"):
        closing.generate("hello", GREEDY)


def test_a_chat_template_gives_the_prompt_of_a_chat(llm):
    messages = [{"role": "user", "content": "hi"}]
    chat = llm.chat(messages, GREEDY)[0]
    text = llm.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|>hi<|end|><|assistant|>"
    assert llm.generate(text, GREEDY)[0].prompt_token_ids == chat.prompt_token_ids
    ids = llm.get_tokenizer().apply_chat_template(messages, add_generation_prompt=True)
    assert ids == chat.prompt_token_ids
    assert llm.get_tokenizer().apply_chat_template(messages, tokenize=False) == "<|user|>hi<|end|>"


def test_metrics_count_what_was_done(llm):
    def value(name):
        return next(metric.value for metric in llm.get_metrics() if metric.name == name)

    assert value("tidemill_engine_up") == value("tidemill_model_loaded") == 1
    before = value("tidemill_requests_submitted_total"), value("tidemill_output_tokens_total")
    llm.generate("hello", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert value("tidemill_requests_submitted_total") - before[0] == 1
    assert value("tidemill_output_tokens_total") - before[1] == 8
    (first_token,) = [
        metric
        for metric in llm.get_metrics()
        if metric.name == "tidemill_time_to_first_token_seconds"
    ]
    assert (first_token.kind, first_token.value) == ("histogram", None)
    assert first_token.count == first_token.buckets["+Inf"] >= 1
    assert first_token.sum > 0


def test_states_of_prompts(llm):
    whole, each = (
        llm.encode(["hello", [5, 6, 7]], pooling_task=task) for task in ("embed", "token_embed")
    )
    assert whole[0].outputs.data.tolist() == pytest.approx(
        llm.embed("hello")[0].embedding, rel=1e-6
    )
    assert each[1].outputs.data.shape == (3, whole[1].outputs.data.shape[0])
    assert llm.encode("hello")[0].outputs.data.tolist() == whole[0].outputs.data.tolist()
    with pytest.raises(InvalidRequest, match="There is no pooling_task 'embedding'"):
        llm.encode("hello", pooling_task="embedding")
    with pytest.raises(InvalidRequest, match="not a cross-encoder"):
        llm.classify("hello")


class Params:
    """Stands for vLLM's StructuredOutputsParams and GuidedDecodingParams."""

    def __init__(self, **given):
        for name in (
            "json",
            "regex",
            "choice",
            "grammar",
            "json_object",
            "structural_tag",
            "whitespace_pattern",
        ):
            setattr(self, name, given.get(name))
        self.disable_fallback, self._backend = False, "auto"


@pytest.mark.parametrize("name", ["structured_outputs", "guided_decoding"])
@pytest.mark.parametrize(
    ("asked", "grammar"),
    [
        ({"json": {"type": "integer"}}, Grammar("json_schema", '{"type": "integer"}')),
        ({"json": '{"type": "integer"}'}, Grammar("json_schema", '{"type": "integer"}')),
        ({"regex": "[ab]+"}, Grammar("regex", "[ab]+")),
        ({"choice": ["one", "two"]}, Grammar("choice", '["one", "two"]')),
        ({"grammar": 'start: "x"'}, Grammar("grammar", 'start: "x"')),
        ({"json_object": True}, Grammar("json_schema", '{"type": "object"}')),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_structured_output_as_vllm_asks_for_it(name, asked, grammar):
    assert SamplingParams(**{name: asked}).grammar == grammar
    assert SamplingParams(**{name: Params(**asked)}) == SamplingParams(grammar=grammar)


def test_grammars_of_other_types(llm):
    params = SamplingParams(
        temperature=0, max_tokens=40, structured_outputs={"choice": ["left", "right"]}
    )
    assert llm.generate("which?", params)[0].text in ("left", "right")
    params = SamplingParams(temperature=0, max_tokens=40, grammar={"type": "boolean"})
    assert llm.generate("which?", params)[0].text in ("true", "false")
    assert SamplingParams(grammar='start: "x"').grammar == Grammar("grammar", 'start: "x"')


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"grammar": 7}, "grammar is '7' (int). Give a Grammar("),
        ({"grammar": {"type": object()}}, "The json_schema of grammar cannot be written as JSON"),
        (
            {"structured_outputs": {"json": {}, "regex": "x"}},
            "structured_outputs has json and regex. Give one of json, regex,",
        ),
        ({"guided_decoding": {}}, "guided_decoding has nothing that the output must match"),
        ({"guided_decoding": "x"}, "guided_decoding is 'x'; it must be a dict"),
        (
            {"structured_outputs": {"regex": "x", "whitespace_pattern": "y"}},
            "'whitespace_pattern', which is not supported",
        ),
        (
            {"structured_outputs": {"regex": "x"}, "grammar": {}},
            "structured_outputs does not go with grammar",
        ),
        (
            {"output_kind": "all"},
            "There is no output_kind 'all'. Choose CUMULATIVE, DELTA, FINAL_ONLY",
        ),
    ],
)
def test_what_the_output_must_match_is_said_right(given, words):
    with pytest.raises(InvalidRequest, match=re.escape(words)):
        SamplingParams(**given)


def test_parameters_show_what_applies(llm):
    text = repr(SamplingParams(max_tokens=5, top_p=1.0, stop="x"))
    assert text.startswith(
        "SamplingParams(temperature=<the model's>, top_k=<the model's>, top_p=1.0, "
    )
    assert text.endswith("max_tokens=5, stop=('x',))")
    assert "256" not in repr(SamplingParams())
    assert "<" not in repr(llm.get_default_sampling_params())


@pytest.mark.parametrize("how", ["close", "del"])
@pytest.mark.parametrize(
    "options", [{}, {"speculate": "ngram"}, {"kv_disk": "disk:4M", "max_loras": 2}], ids=str
)
def test_the_memory_of_an_llm_is_free_when_it_is_closed_without_a_collection(
    tiny_folder, tmp_path, how, options
):
    if "kv_disk" in options:
        options = options | {"kv_disk": f"{tmp_path}/{options['kv_disk']}"}
    gc.collect()
    gc.disable()
    try:
        llm = LLM(str(tiny_folder), progress=False, **options)
        many = [
            SamplingParams(max_tokens=5),
            SamplingParams(max_tokens=5, n=2, temperature=1.0, seed=1),
        ]
        llm.generate([[1, 2, 3]] * 2, many)
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=5, grammar=Grammar("regex", "[ab]{4}")))
        llm.beam_search([[1, 2, 3]], BeamSearchParams(beam_width=2, max_tokens=4))
        core = llm.core
        held = [
            weakref.ref(one)
            for one in (core, core.runner, core.runner.cache, core.runner.model, core.scheduler)
        ]
        stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=50, ignore_eos=True))
        next(stream)
        del core
        if how == "close":
            llm.close()
            llm.close()
            with pytest.raises(EngineDead, match="closed"):
                llm.generate([1, 2, 3])
            assert list(stream) == []
        del llm, stream
        assert [one() for one in held] == [None] * len(held)
    finally:
        gc.enable()
