"""SGLang's own API against `tidemill serve`, as its clients send it."""

import itertools
import math
import re

import httpx
import pytest

from tests.server.test_other_engines import chunks, post

GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
TIDE = {"text": "The tide", "sampling_params": GREEDY}


def of_openai(server, **more):
    body = {
        "prompt": "The tide",
        "temperature": 0,
        "max_tokens": 6,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return post(server, "/v1/completions", body | more)["choices"][0]


def test_generated_text_is_that_of_the_other_apis(roomy):
    made, known = post(roomy, "/generate", TIDE), of_openai(roomy)
    assert (made["text"], made["output_ids"]) == (known["text"], known["token_ids"])
    meta = made["meta_info"]
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len("The tide"), 6)
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    by_ids = {"input_ids": known["prompt_token_ids"], "sampling_params": GREEDY}
    assert post(roomy, "/generate", by_ids)["output_ids"] == made["output_ids"]
    ended = post(
        roomy,
        "/generate",
        TIDE | {"sampling_params": GREEDY | {"stop_token_ids": [known["token_ids"][2]]}},
    )
    assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": known["token_ids"][2]}


def test_several_prompts_and_samples_are_a_list(roomy):
    made = post(
        roomy, "/generate", {"text": ["The tide", "A mill"], "sampling_params": GREEDY | {"n": 2}}
    )
    assert [one["meta_info"]["prompt_tokens"] for one in made] == [8, 8, 6, 6]
    assert made[0]["text"] == made[1]["text"] == of_openai(roomy)["text"]
    each = {
        "text": ["The tide", "A mill"],
        "sampling_params": [GREEDY, GREEDY | {"max_new_tokens": 2}],
    }
    assert [len(one["output_ids"]) for one in post(roomy, "/generate", each)] == [6, 2]


def test_events_of_a_stream_have_all_of_the_text_so_far(roomy):
    whole, parts = post(roomy, "/generate", TIDE), chunks(roomy, "/generate", TIDE)
    assert parts[-1]["output_ids"] == whole["output_ids"]
    assert parts[-1]["text"] == whole["text"]
    for before, after in itertools.pairwise(parts):
        assert after["text"].startswith(before["text"])
        assert before["meta_info"]["finish_reason"] is None
    several = chunks(roomy, "/generate", TIDE | {"text": ["The tide", "A mill"]})
    assert {part["index"] for part in several} == {0, 1}


def test_logprobs_of_prompt_and_output(roomy):
    asked = TIDE | {"return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    meta = post(roomy, "/generate", asked | {"logprob_start_len": 0})["meta_info"]
    known = of_openai(roomy, logprobs=2, echo=True, return_token_ids=True)["logprobs"][
        "token_logprobs"
    ]
    assert [
        cell[0] for cell in meta["input_token_logprobs"] + meta["output_token_logprobs"]
    ] == known
    assert "".join(cell[2] for cell in meta["input_token_logprobs"]) == "The tide"
    assert meta["input_top_logprobs"][0] is None
    assert [top[0] for top in meta["output_top_logprobs"]] == meta["output_token_logprobs"]
    later = post(roomy, "/generate", asked | {"logprob_start_len": 3})["meta_info"]
    assert later["input_token_logprobs"] == meta["input_token_logprobs"][3:]
    assert post(roomy, "/generate", asked)["meta_info"]["input_token_logprobs"] == []


def test_logprobs_of_named_tokens(roomy):
    asked = TIDE | {"return_logprob": True, "token_ids_logprob": [7, 9]}
    (first, *_) = post(roomy, "/generate", asked)["meta_info"]["output_token_ids_logprobs"]
    assert sorted(token for _, token, _ in first) == [7, 9]
    for wrong, words in (
        ([[7]], "flat list of integers"),
        ([-1], "out-of-vocabulary"),
        ([10**9], "out-of-vocabulary"),
    ):
        assert (
            words
            in post(roomy, "/generate", asked | {"token_ids_logprob": wrong}, 400)["error"][
                "message"
            ]
        )


def test_logprobs_of_named_tokens_of_the_prompt(roomy):
    """In each place of the prompt, its own token among them has the logprob that it has without a
    list."""
    asked = {
        "input_ids": [5, 6, 7, 8],
        "sampling_params": GREEDY,
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    meta = post(roomy, "/generate", asked | {"token_ids_logprob": [6, 8, 9]})["meta_info"]
    assert (
        meta["input_token_logprobs"]
        == post(roomy, "/generate", asked)["meta_info"]["input_token_logprobs"]
    )
    first, *places = meta["input_token_ids_logprobs"]
    assert first is None
    assert [sorted(token for _, token, _ in place) for place in places] == [[6, 8, 9]] * 3
    own = {token: value for value, token, _ in meta["input_token_logprobs"]}
    assert {token: value for value, token, _ in places[0]}[6] == pytest.approx(own[6], abs=1e-5)
    assert {token: value for value, token, _ in places[2]}[8] == pytest.approx(own[8], abs=1e-5)
    assert sum(math.exp(value) for value, _, _ in places[1]) < 1


def test_a_flushed_cache_is_not_used(roomy):
    def num_cached() -> int:
        return post(roomy, "/generate", {"text": "flushed " * 20, "sampling_params": GREEDY})[
            "meta_info"
        ]["cached_tokens"]

    assert num_cached() == 0
    assert num_cached() > 100
    assert httpx.post(f"{roomy.url}/flush_cache").status_code == 200
    assert num_cached() == 0
    assert num_cached() > 100


def test_an_output_ends_with_what_a_pattern_matches(roomy):
    whole = post(roomy, "/generate", TIDE | {"sampling_params": GREEDY | {"max_new_tokens": 60}})[
        "text"
    ]
    pattern = f"[{re.escape(whole[3])}{re.escape(whole[7])}].."
    expected = whole[: re.search(pattern, whole, re.DOTALL).end()]
    ended = {"stop_regex": f"(?s){pattern}", "max_new_tokens": 60}
    made = post(roomy, "/generate", TIDE | {"sampling_params": GREEDY | ended})
    assert made["text"] == expected
    assert made["meta_info"]["finish_reason"] == {"type": "stop", "matched": ended["stop_regex"]}
    asked = {
        "prompt": "The tide",
        "temperature": 0,
        "max_tokens": 60,
        "ignore_eos": True,
        "stop_regex": [ended["stop_regex"]],
    }
    assert post(roomy, "/v1/completions", asked)["choices"][0]["text"] == expected
    assert (
        "".join(part["choices"][0]["text"] for part in chunks(roomy, "/v1/completions", asked))
        == expected
    )


def test_only_the_prompt_is_computed(roomy):
    asked = {
        "text": "The tide",
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    made = post(roomy, "/generate", asked)
    assert (made["text"], made["output_ids"], made["meta_info"]["completion_tokens"]) == ("", [], 0)
    assert len(made["meta_info"]["input_token_logprobs"]) == 8


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"text": None}, "text"),
        ({"input_ids": [1]}, "text"),
        ({"text": []}, "text"),
        ({"sampling_params": {"stop_regex": "(a)\\1"}}, "stop_regex"),
        ({"custom_logit_processor": "x"}, "custom_logit_processor"),
        ({"return_logprob": True, "logprob_start_len": 99}, "logprob_start_len"),
        ({"text": ["a", "b"], "top_logprobs_num": [1]}, "top_logprobs_num"),
        (
            {"stream": True, "return_logprob": True, "sampling_params": {"max_new_tokens": 4000}},
            "return_logprob",
        ),
    ],
)
def test_what_is_wrong_is_named(roomy, more, param):
    assert post(roomy, "/generate", TIDE | more, 400)["error"]["param"] == param


def test_what_clients_ask_about_the_server(roomy):
    info = httpx.get(f"{roomy.url}/server_info").json()
    assert info["max_total_num_tokens"] >= info["context_length"]
    assert httpx.get(f"{roomy.url}/get_model_info").json()["is_generation"] is True
    assert httpx.get(f"{roomy.url}/health_generate").status_code == 200
    assert post(roomy, "/v1/tokenize", {"prompt": ["ab", "c"], "add_special_tokens": False})[
        "count"
    ] == [2, 1]
    ids = post(roomy, "/tokenize", {"prompt": "tide"})["tokens"]
    assert (
        post(roomy, "/detokenize", {"tokens": ids, "skip_special_tokens": True})["text"] == "tide"
    )
