"""llama.cpp's own API against `tidemill serve`, as its clients send it."""

import json
import math
import re

import httpx
import pytest

HI = [{"role": "user", "content": "Hi"}]
GREEDY = {"temperature": 0, "n_predict": 12}


def ask(server, path, status=200, **body):
    reply = httpx.post(f"{server.url}{path}", json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


def events(server, path="/completion", **body):
    with httpx.stream("POST", f"{server.url}{path}", json=body | {"stream": True}) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        return [
            json.loads(line.removeprefix("data: "))
            for line in reply.iter_lines()
            if line.startswith("data: {")
        ]


def openai_text(server, prompt, **more):
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 12} | more
    return ask(server, "/v1/completions", **body)["choices"][0]["text"]


@pytest.mark.parametrize("path", ["/completion", "/completions"])
def test_a_completion_is_that_of_the_other_apis(roomy, path):
    whole = ask(roomy, path, prompt="The tide", **GREEDY)
    assert whole["content"] == openai_text(roomy, "The tide")
    assert whole["stop"] is True
    assert whole["tokens"] == []
    assert whole["tokens_predicted"] == 12
    assert whole["tokens_evaluated"] == len("The tide")
    assert (whole["stop_type"], whole["stopping_word"], whole["truncated"]) == ("limit", "", False)
    assert whole["prompt"] == "The tide"
    assert whole["model"] == "tiny"
    assert whole["generation_settings"]["temperature"] == 0
    assert whole["generation_settings"]["n_predict"] == 12
    timings = whole["timings"]
    assert timings["predicted_n"] == 12
    assert timings["prompt_n"] + timings["cache_n"] == len("The tide")
    assert timings["predicted_ms"] >= 0
    assert timings["predicted_per_second"] == pytest.approx(
        1000 * 11 / max(timings["predicted_ms"], 1e-6)
    )


def test_a_streamed_completion_adds_up(roomy):
    whole = ask(roomy, "/completion", prompt="The tide", return_tokens=True, n_probs=2, **GREEDY)
    parts = events(roomy, prompt="The tide", n_probs=2, timings_per_token=True, **GREEDY)
    assert [part["stop"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    assert len(whole["tokens"]) == 12
    streamed = [entry for part in parts for entry in part.get("completion_probabilities", [])]
    assert (
        [entry["id"] for entry in streamed]
        == [entry["id"] for entry in whole["completion_probabilities"]]
        == whole["tokens"]
    )
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] <= 0 for entry in streamed)
    assert all("timings" in part for part in parts)
    assert parts[-1]["stop_type"] == "limit"


def test_prompts_of_all_kinds(roomy):
    ids = ask(roomy, "/tokenize", prompt="The tide", add_special_tokens=False)["tokens"]
    expected = ask(roomy, "/completion", prompt="The tide", **GREEDY)["content"]
    for prompt in (ids, ["The ", *ids[4:]], [*ids[:4], "tide"]):
        assert ask(roomy, "/completion", prompt=prompt, **GREEDY)["content"] == expected
    assert (
        ask(roomy, "/completion", prompt={"prompt_string": "The tide"}, **GREEDY)["content"]
        == expected
    )
    assert openai_text(roomy, ["The ", *ids[4:]]) == expected
    several = ask(roomy, "/completion", prompt=["The tide", ids, [*ids[:4], "tide"], "x"], **GREEDY)
    assert [one["content"] for one in several[:3]] == [expected] * 3
    assert [one["index"] for one in several] == [0, 1, 2, 3]
    parts = events(roomy, prompt=["The tide", "x"], **GREEDY)
    for i, text in enumerate((expected, several[3]["content"])):
        assert "".join(part["content"] for part in parts if part["index"] == i) == text
    assert sum(part["stop"] for part in parts) == 2


def test_how_it_ends(roomy, scripted):
    text = openai_text(roomy, "The tide")
    cut = ask(roomy, "/completion", prompt="The tide", stop=[text[3]], **GREEDY)
    assert (cut["stop_type"], cut["stopping_word"], cut["content"]) == (
        "word",
        text[3],
        text.partition(text[3])[0],
    )
    ended = ask(scripted, "/completion", prompt="<|assistant|>", temperature=0)
    assert (ended["stop_type"], ended["tokens_predicted"]) == ("eos", 7)
    goes_on = ask(
        scripted,
        "/completion",
        prompt="<|assistant|>",
        temperature=0,
        ignore_eos=True,
        n_predict=20,
    )
    assert goes_on["tokens_predicted"] == 20
    nothing = ask(roomy, "/completion", prompt="The tide", n_predict=0)
    assert (nothing["content"], nothing["tokens_predicted"], nothing["stop_type"]) == (
        "",
        0,
        "limit",
    )


def test_the_output_ends_with_the_context(scripted):
    body = {"prompt": "<|assistant|>", "ignore_eos": True, "temperature": 0}
    for n_predict in (-1, 10**6):
        made = ask(scripted, "/completion", n_predict=n_predict, **body)
        assert (made["tokens_predicted"], made["stop_type"], made["truncated"]) == (
            511,
            "limit",
            True,
        )
        assert made["generation_settings"]["n_predict"] == n_predict
    assert (
        ask(scripted, "/v1/completions", n_predict=10**6, **body)["usage"]["completion_tokens"]
        == 511
    )
    assert ask(scripted, "/completion", n_predict=3, **body)["truncated"] is False
    error = ask(scripted, "/completion", 400, prompt="x" * 600)["error"]
    assert (error["code"], error["n_prompt_tokens"], error["n_ctx"]) == (
        "context_length_exceeded",
        600,
        512,
    )


def test_settings_are_those_that_were_used(roomy):
    made = ask(roomy, "/completion", prompt="x", ignore_eos=True, top_p=0.5, n_predict=2)[
        "generation_settings"
    ]
    assert (made["top_p"], made["top_k"], made["temperature"], made["mirostat"]) == (0.5, 0, 1, 0)
    assert made["logit_bias"] == [
        {"bias": None, "token": token} for token in ask(roomy, "/tokenize", prompt="</s>")["tokens"]
    ]


def test_openai_routes_without_v1(roomy):
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0}
    made, same = ask(roomy, "/chat/completions", **chat), ask(roomy, "/v1/chat/completions", **chat)
    assert made["id"].startswith("chatcmpl-")
    assert made["choices"] == same["choices"]
    assert made["system_fingerprint"].startswith("b")
    assert httpx.get(f"{roomy.url}/models").json() == httpx.get(f"{roomy.url}/v1/models").json()
    assert ask(roomy, "/responses", input="Hi", max_output_tokens=3)["object"] == "response"
    for path in ("/chat/completions/input_tokens", "/v1/chat/completions/input_tokens"):
        assert ask(roomy, path, **chat)["input_tokens"] == same["usage"]["prompt_tokens"]


def test_the_finish_reason_of_a_chat_has_a_chunk_of_its_own(roomy):
    parts = events(
        roomy, "/v1/chat/completions", max_tokens=5, temperature=0, logprobs=True, messages=HI
    )
    *texts, last = [part["choices"][0] for part in parts]
    assert (last["finish_reason"], last["delta"]) == ("length", {"reasoning_content": None})
    assert [one["finish_reason"] for one in texts] == [None] * len(texts)
    assert sum(len(one["logprobs"]["content"]) for one in (*texts, last) if one["logprobs"]) == 5


@pytest.mark.parametrize(
    ("path", "more"),
    [("/v1/completions", {"prompt": "Hi"}), ("/v1/chat/completions", {"messages": HI})],
)
def test_timings_per_token(roomy, path, more):
    how = {
        "max_tokens": 5,
        "temperature": 0,
        "timings_per_token": True,
        "stream_options": {"include_usage": True},
    }
    parts = events(roomy, path, **how, **more)
    assert "timings" not in parts[0]
    assert all(part["timings"]["predicted_per_second"] >= 0 for part in parts[1:])
    last = parts[-1]
    assert last["choices"] == []
    assert last["timings"]["predicted_n"] == 5
    assert (
        last["timings"]["prompt_n"] + last["timings"]["cache_n"] == last["usage"]["prompt_tokens"]
    )
    assert (
        ask(roomy, path, max_tokens=5, timings_per_token=True, **more)["timings"]["predicted_n"]
        <= 5
    )


def test_timings_before_the_first_token_are_not_negative(roomy):
    """The second sample's first chunk is written before either has a token."""
    how = {"messages": HI, "n": 2, "max_tokens": 2}
    chunks = events(roomy, "/v1/chat/completions", timings_per_token=True, **how)
    first, second, *_ = (chunk.get("timings") for chunk in chunks)
    assert first is None
    assert second["predicted_n"] == 0
    assert second["prompt_ms"] >= 0


def test_the_first_chunk_and_a_long_prompt_as_the_clients_of_each_path_know_them(roomy):
    """Programs that ask OpenAI want a text, also in the first chunk; those that ask llama.cpp's own
    path know its null."""
    for path, content, kind in (
        ("/v1/chat/completions", "", "invalid_request_error"),
        ("/chat/completions", None, "exceed_context_size_error"),
    ):
        first, second, *_ = events(roomy, path, messages=HI, max_tokens=3, temperature=0)
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": content}
        assert "role" not in second["choices"][0]["delta"]
        told = ask(roomy, path, 400, messages=[HI[0] | {"content": "long " * 2000}])["error"]
        assert (told["type"], told["code"]) == (kind, "context_length_exceeded")


def test_sampling_under_its_names(roomy):
    same = {
        "temperature": 0.9,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.01,
        "seed": 5,
        "presence_penalty": 0.4,
    }
    expected = openai_text(roomy, "The tide", **same, repetition_penalty=0.05, max_tokens=24)
    assert (
        ask(roomy, "/completion", prompt="The tide", n_predict=24, repeat_penalty=0.05, **same)[
            "content"
        ]
        == expected
    )
    assert openai_text(roomy, "The tide", **same, max_tokens=24) != expected


def test_logit_bias_in_both_shapes(roomy):
    (a,) = ask(roomy, "/tokenize", prompt="a", add_special_tokens=False)["tokens"]
    for bias in ([[a, 100]], [["a", 100.0]], {str(a): 100}, {"a": 100}):
        assert (
            ask(roomy, "/completion", prompt="x", logit_bias=bias, **GREEDY)["content"] == "a" * 12
        )
    text = openai_text(roomy, "The tide")
    without = ask(roomy, "/completion", prompt="The tide", logit_bias=[[text[0], False]], **GREEDY)[
        "content"
    ]
    assert text[0] not in without


def test_grammars(roomy):
    made = ask(
        roomy, "/completion", prompt="x", grammar='root ::= ("yes" | "no") [0-9]{2}', seed=3
    )["content"]
    assert re.fullmatch(r"(yes|no)\d\d", made)
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    assert json.loads(ask(roomy, "/completion", prompt="x", json_schema=schema, seed=3)["content"])[
        "n"
    ] in (1, 2)
    assert (
        "grammar"
        in ask(roomy, "/completion", 400, prompt="x", grammar="root ::= (")["error"]["message"]
    )


def test_fields_of_the_response(roomy):
    names = ["content", "generation_settings/n_predict", "nothing"]
    made = ask(roomy, "/completion", prompt="The tide", response_fields=names, **GREEDY)
    assert made == {"content": openai_text(roomy, "The tide"), "generation_settings/n_predict": 12}


BAD = [
    ({"mirostat": 1}, "mirostat"),
    ({"dry_multiplier": 0.8}, "dry_multiplier"),
    ({"xtc_probability": 0.5}, "xtc_probability"),
    ({"samplers": ["top_k"]}, "samplers"),
    ({"repeat_last_n": 2**40}, "penalty_window"),
    ({"n_probs": 500}, "n_probs"),
    ({"logit_bias": [["x" * 1000, 1]]}, "logit_bias"),
    ({"logit_bias": {"x" * 250 + "y": 1e9}}, "logit_bias"),
    ({"grammar": "root ::= [a]", "json_schema": {}}, "grammar"),
    ({"seed": 2**70}, "seed"),
    ({"n_predict": 10**30}, "n_predict"),
    ({"logit_bias": [[10**30, 1]]}, "logit_bias"),
    ({"logit_bias": {f"x{i}": 1 for i in range(2000)}}, "logit_bias"),
    ({"temprature": 1}, "temprature"),
    ({"prompt": [[1, "a"], 5]}, "prompt"),
    ({"prompt": {"prompt_string": "x", "multimodal_data": ["aGk="]}}, "prompt"),
    ({"prompt": [{"text": "x"}]}, "prompt"),
    ({"prompt": ["x"] * 1000}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [10**6]}, None),
    ({"prompt": [1, *["x"] * 10_000]}, "prompt"),
    ({"model": "other"}, "model"),
]


def test_bad_requests_are_refused_by_name(roomy):
    for body, param in BAD:
        for stream in (False, True):
            reply = httpx.post(
                f"{roomy.url}/completion", json={"prompt": "x", "stream": stream} | body
            )
            assert reply.status_code in (400, 404), (str(body)[:100], reply.text)
            assert param is None or reply.json()["error"]["param"] == param, (
                str(body)[:100],
                reply.text,
            )


def test_what_has_no_effect_is_named(roomy):
    body = {
        "prompt": "x",
        "n_predict": 1,
        "cache_prompt": True,
        "id_slot": 0,
        "n_keep": 5,
        "mirostat": 0,
        "grammar": None,
    }
    reply = httpx.post(f"{roomy.url}/completion", json=body)
    assert reply.status_code == 200
    assert reply.headers["x-tidemill-ignored"] == "cache_prompt, id_slot, n_keep"


def test_infill(roomy, scripted):
    ends = {"input_prefix": "def f(", "input_suffix": "return 1"}
    made = ask(scripted, "/infill", **ends, temperature=0)
    assert (made["content"], made["stop_type"]) == ("xyz", "eos")
    assert made["prompt"] == "<|fim_prefix|>def f(<|fim_suffix|>return 1<|fim_middle|>"
    assert (
        "".join(part["content"] for part in events(scripted, "/infill", **ends, temperature=0))
        == "xyz"
    )
    more = ask(
        scripted,
        "/infill",
        **ends,
        prompt="x",
        input_extra=[{"filename": "a.py", "text": "A = 1"}],
        temperature=0,
    )
    assert more["content"] == "yz"
    repository = "<|repo_name|>repository\n<|file_sep|>a.py\nA = 1\n<|file_sep|>filename\n"
    assert (
        more["prompt"] == f"{repository}<|fim_prefix|>def f(<|fim_suffix|>return 1<|fim_middle|>x"
    )
    assert "fill in the middle" in ask(roomy, "/infill", 400, **ends)["error"]["message"]
    assert ask(scripted, "/infill", 400, input_prefix="x")["error"]["param"] == "input_suffix"
    assert (
        ask(scripted, "/infill", 400, **ends, input_extra=[{"filename": "a.py"}])["error"]["param"]
        == "input_extra"
    )


def test_suffix_of_openai_completions(roomy, scripted):
    body = {"prompt": "def f(", "suffix": "return 1", "temperature": 0}
    made = ask(scripted, "/v1/completions", **body)
    assert (made["choices"][0]["text"], made["choices"][0]["finish_reason"]) == ("xyz", "stop")
    both = ask(scripted, "/v1/completions", **body | {"prompt": ["a", "b"]})
    assert [choice["text"] for choice in both["choices"]] == ["xyz", "xyz"]
    for wrong, param in (({"prompt": [5, 6]}, "prompt"), ({"echo": True}, "echo")):
        assert ask(scripted, "/v1/completions", 400, **body | wrong)["error"]["param"] == param
    assert ask(roomy, "/v1/completions", 400, **body)["error"]["param"] == "suffix"


def test_embedding(roomy):
    ours = ask(roomy, "/v1/embeddings", input=["one", "two"])["data"]
    for path in ("/embedding", "/embeddings"):
        assert ask(roomy, path, content=["one", "two"]) == [
            {"index": i, "embedding": [ours[i]["embedding"]]} for i in (0, 1)
        ]
    ids = ask(roomy, "/tokenize", prompt="two", add_special_tokens=False)["tokens"]
    mixed = ask(roomy, "/v1/embeddings", input=["one", [*ids[:1], "wo"]])["data"]
    assert [one["embedding"] for one in mixed] == [one["embedding"] for one in ours]
    assert ask(roomy, "/embedding", input=[*ids[:1], "wo"]) == [
        {"index": 0, "embedding": [ours[1]["embedding"]]}
    ]
    assert ask(roomy, "/embedding", 400)["error"]["param"] == "content"
    assert (
        ask(roomy, "/embedding", 400, content="x", embd_normalize=-1)["error"]["param"]
        == "embd_normalize"
    )


def test_templates_and_properties(roomy):
    made = ask(roomy, "/apply-template", messages=[{"role": "user", "content": "Hi"}])
    assert made == {"prompt": "<|user|>Hi<|end|><|assistant|>"}
    props = httpx.get(f"{roomy.url}/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 4096
    assert props["default_generation_settings"]["params"]["repeat_penalty"] == 1
    assert props["total_slots"] >= 1
    assert props["eos_token"] == "</s>"
    assert "m['content']" in props["chat_template"]
    assert httpx.get(f"{roomy.url}/health").json() == {"status": "ok"}


def test_penalties_of_a_window(roomy):
    """A window of everything is no window; one of nothing, no penalty. Below 1 it is a reward,
    which a short text shows."""
    asked = {
        "prompt": "The tide, the tide",
        "n_predict": 12,
        "temperature": 0,
        "repeat_penalty": 0.2,
    }
    texts = {
        last: ask(roomy, "/completion", **asked, repeat_last_n=last)["content"]
        for last in (-1, 0, 1, 500)
    }
    plain = ask(roomy, "/completion", **asked | {"repeat_penalty": 1.0})["content"]
    assert texts[-1] == texts[500] == openai_text(roomy, asked["prompt"], repetition_penalty=0.2)
    assert texts[0] == plain
    assert texts[1] == openai_text(roomy, asked["prompt"], repetition_penalty=0.2, repeat_last_n=1)
    assert len({texts[-1], texts[0], texts[1]}) == 3
    assert (
        ask(roomy, "/completion", **asked, repeat_last_n=64)["generation_settings"]["repeat_last_n"]
        == 64
    )


def test_probabilities_that_tokens_are_drawn_with(roomy):
    asked = {
        "prompt": "The tide",
        "n_predict": 4,
        "n_probs": 5,
        "seed": 3,
        "temperature": 0.5,
        "top_k": 3,
    }
    own = ask(roomy, "/completion", **asked)["completion_probabilities"]
    drawn = ask(roomy, "/completion", **asked, post_sampling_probs=True)["completion_probabilities"]
    for before, after in zip(own, drawn, strict=True):
        kept = before["top_logprobs"][:3]
        weights = [math.exp(one["logprob"] / 0.5) for one in kept]
        assert [one["id"] for one in after["top_probs"]] == [one["id"] for one in kept]
        assert [one["prob"] for one in after["top_probs"]] == pytest.approx(
            [one / sum(weights) for one in weights], rel=1e-4
        )
        assert after["id"] == before["id"]
    greedy = ask(roomy, "/completion", **asked | {"temperature": 0}, post_sampling_probs=True)[
        "completion_probabilities"
    ]
    assert [[one["prob"] for one in entry["top_probs"]] for entry in greedy] == [[1.0]] * 4


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/completion", {"prompt": "tide " * 60}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "mill " * 60}]}),
        ("/v1/responses", {"input": "wave " * 60}),
    ],
)
def test_progress_of_the_prompt(server, path, more):
    """The second time, most of it is cached."""
    asked = more | {"return_progress": True}
    limit = {"max_output_tokens" if "responses" in path else "max_tokens": 2}
    for is_cached in (False, True):
        parts = events(server, path, **asked, **limit)
        told = [part["prompt_progress"] for part in parts if "prompt_progress" in part]
        assert told[0]["processed"] == told[0]["cache"]
        assert (told[0]["cache"] > 0) is is_cached
        done = [one["processed"] for one in told]
        assert done == sorted(set(done))
        assert done[-1] == told[-1]["total"] >= 300
        last = max(i for i, part in enumerate(parts) if "prompt_progress" in part)
        assert not any(_says(part) for part in parts[:last])
    assert not any("prompt_progress" in part for part in events(server, path, **more, **limit))


def _says(part):
    choices = part.get("choices", ())
    return (
        part.get("content")
        or "delta" in part
        or any(choice["delta"].get("content") for choice in choices)
    )


def test_verbose_returns_the_prompt(roomy):
    made = ask(roomy, "/v1/chat/completions", messages=HI, max_tokens=1, verbose=True)
    assert made["__verbose"]["prompt"] == ask(roomy, "/apply-template", messages=HI)["prompt"]
    first, *others = events(roomy, "/v1/chat/completions", messages=HI, max_tokens=2, verbose=True)
    assert first["__verbose"] == made["__verbose"]
    assert not any("__verbose" in part for part in others)
    assert "__verbose" not in ask(
        roomy, "/v1/chat/completions", messages=HI, max_tokens=1, verbose=False
    )


def test_a_prompt_that_is_too_long_is_refused_in_its_words(roomy):
    error = ask(roomy, "/completion", 400, prompt="x" * 5000)["error"]
    assert "exceeds the available context size" in error["message"]
    assert (error["n_prompt_tokens"], error["n_ctx"], error["code"]) == (
        5000,
        4096,
        "context_length_exceeded",
    )
