"""What programs written for vLLM's and SGLang's servers read from a response, or ask for."""

from __future__ import annotations

import base64
import json
import math
import struct

import httpx
import pytest

from tests.server.conftest import Server

MESSAGES = [{"role": "user", "content": "tide"}]
GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 8, "ignore_eos": True}
ROUTES = {"/v1/completions": {"prompt": "The tide"}, "/v1/chat/completions": {"messages": MESSAGES}}


def post(server, path: str, body: dict, status: int = 200) -> dict:
    reply = httpx.post(f"{server.url}{path}", json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


def chunks(server, path: str, body: dict) -> list[dict]:
    text = httpx.post(f"{server.url}{path}", json=body | {"stream": True}).text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize(("path", "prompt"), ROUTES.items())
def test_what_ended_the_output_is_told(roomy, path, prompt):
    whole = post(roomy, path, GREEDY | prompt | {"return_token_ids": True})["choices"][0]
    assert (whole["finish_reason"], whole["stop_reason"], whole["matched_stop"]) == (
        "length",
        None,
        None,
    )
    token = whole["token_ids"][3]
    for more, stop in (
        ({"stop_token_ids": [token]}, token),
        ({"stop": ["x" * 9, *"abcdefgh "]}, None),
    ):
        choice = post(roomy, path, GREEDY | prompt | more | {"max_tokens": 400})["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert choice["stop_reason"] == choice["matched_stop"] == (stop or choice["matched_stop"])
        assert stop is not None or choice["stop_reason"] in more["stop"]
        last = chunks(roomy, path, GREEDY | prompt | more | {"max_tokens": 400})[-1]["choices"][0]
        assert (last["finish_reason"], last["stop_reason"], last["matched_stop"]) == (
            "stop",
            *[choice["stop_reason"]] * 2,
        )


def test_end_of_text_is_a_matched_stop_but_no_stop_reason(scripted):
    choice = post(
        scripted,
        "/v1/chat/completions",
        {"messages": MESSAGES, "temperature": 0, "return_token_ids": True},
    )["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert (choice["stop_reason"], choice["matched_stop"]) == (None, choice["token_ids"][-1])


def test_members_that_were_not_asked_for_are_null(roomy):
    chat = post(roomy, "/v1/chat/completions", GREEDY | {"messages": MESSAGES})
    assert (chat["prompt_logprobs"], chat["prompt_token_ids"], chat["choices"][0]["token_ids"]) == (
        None,
        None,
        None,
    )
    message = chat["choices"][0]["message"]
    assert (message["reasoning"], message["reasoning_content"], message["refusal"]) == (
        None,
        None,
        None,
    )
    choice = post(roomy, "/v1/completions", GREEDY | {"prompt": "The tide"})["choices"][0]
    assert (choice["prompt_logprobs"], choice["prompt_token_ids"], choice["token_ids"]) == (
        None,
        None,
        None,
    )
    assert post(roomy, "/tokenize", {"prompt": "tide"})["token_strs"] is None


def test_a_chat_has_its_prompt_logprobs_beside_the_choices(roomy):
    body = GREEDY | {"messages": MESSAGES, "prompt_logprobs": 1, "return_token_ids": True, "n": 2}
    made = post(roomy, "/v1/chat/completions", body)
    first, *others = made["prompt_logprobs"]
    assert first is None
    assert all(
        str(token) in entry
        for token, entry in zip(made["prompt_token_ids"][1:], others, strict=True)
    )
    assert all("prompt_logprobs" not in choice for choice in made["choices"])


@pytest.mark.parametrize("num", [0, 2])
def test_the_token_itself_is_first_among_the_top_logprobs(roomy, num):
    body = GREEDY | {
        "prompt": "The tide",
        "logprobs": num,
        "temperature": 2,
        "seed": 3,
        "return_tokens_as_token_ids": True,
    }
    lists = post(roomy, "/v1/completions", body)["choices"][0]["logprobs"]
    assert [next(iter(top)) for top in lists["top_logprobs"]] == lists["tokens"]
    assert [
        top[token] for top, token in zip(lists["top_logprobs"], lists["tokens"], strict=True)
    ] == lists["token_logprobs"]
    assert {len(top) for top in lists["top_logprobs"]} <= {max(num, 1), num + 1}


@pytest.mark.parametrize(
    ("side", "kept"), [("left", [6, 7, 8]), ("right", [5, 6, 7]), (None, [6, 7, 8])]
)
def test_the_side_that_is_cut_off(roomy, side, kept):
    body = GREEDY | {
        "prompt": [5, 6, 7, 8],
        "truncate_prompt_tokens": 3,
        "truncation_side": side,
        "return_token_ids": True,
    }
    assert post(roomy, "/v1/completions", body)["choices"][0]["prompt_token_ids"] == kept


def test_the_message_that_is_continued_is_echoed(roomy):
    begun = [*MESSAGES, {"role": "assistant", "content": "High water"}]
    body = GREEDY | {
        "messages": begun,
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    plain, echoed = (
        post(roomy, "/v1/chat/completions", body | {"echo": echo})["choices"][0]["message"][
            "content"
        ]
        for echo in (False, True)
    )
    assert echoed == "High water" + plain
    streamed = [
        chunk["choices"][0]["delta"].get("content", "")
        for chunk in chunks(roomy, "/v1/chat/completions", body | {"echo": True})
    ]
    assert "".join(streamed) == echoed


def test_usage_in_each_chunk_needs_include_usage(roomy):
    body = GREEDY | {"prompt": "The tide"}
    for is_included in (False, True):
        options = {"include_usage": is_included, "continuous_usage_stats": True}
        got = chunks(roomy, "/v1/completions", body | {"stream_options": options})
        # one at least: tokens that wait together are sent together
        assert any(chunk["choices"] for chunk in got)
        assert all(("usage" in chunk) == is_included for chunk in got)


def test_invocations_are_told_apart_by_what_they_ask_for(roomy):
    for path, body in (*ROUTES.items(), ("/v1/embeddings", {"input": "tide"})):
        body = body if path == "/v1/embeddings" else body | GREEDY
        direct, invoked = post(roomy, path, body), post(roomy, "/invocations", body)
        name = "data" if path == "/v1/embeddings" else "choices"
        assert (invoked["object"], invoked[name]) == (direct["object"], direct[name])
    assert {
        one["object"] for one in chunks(roomy, "/invocations", GREEDY | ROUTES["/v1/completions"])
    } == {"text_completion"}
    assert "JSON object" in post(roomy, "/invocations", [1], 400)["error"]["message"]
    assert "messages" in post(roomy, "/invocations", {}, 400)["error"]["message"]


def test_supervisors_routes(roomy):
    assert (
        httpx.get(f"{roomy.url}/ping").status_code
        == httpx.post(f"{roomy.url}/ping").status_code
        == 200
    )
    assert httpx.get(f"{roomy.url}/load").json() == {"server_load": 0}


def test_tokenizer_info(roomy):
    told = httpx.get(f"{roomy.url}/tokenizer_info").json()
    assert (told["bos_token"], told["eos_token"], told["model_max_length"]) == ("<s>", "</s>", 4096)
    assert "messages" in told["chat_template"]


def test_token_strs_are_as_in_the_vocabulary(roomy):
    assert post(roomy, "/tokenize", {"prompt": "a b", "return_token_strs": True})["token_strs"] == [
        "a",
        "Ġ",
        "b",
    ]


def test_a_conversation_is_embedded(roomy):
    made = post(roomy, "/v1/embeddings", {"messages": MESSAGES})
    prompt = post(
        roomy, "/v1/chat/completions/render", {"messages": MESSAGES, "add_generation_prompt": False}
    )
    assert (
        made["data"] == post(roomy, "/v1/embeddings", {"input": prompt["prompt_token_ids"]})["data"]
    )
    assert made["id"]
    assert made["created"]
    assert made["usage"]["completion_tokens"] == 0
    for wrong in ({}, {"messages": MESSAGES, "input": "x"}):
        assert (
            "one of input and messages"
            in post(roomy, "/v1/embeddings", wrong, 400)["error"]["message"]
        )


def test_a_token_out_of_vocabulary(roomy):
    assert (
        "out of vocabulary"
        in post(roomy, "/v1/completions", {"prompt": [999999]}, 400)["error"]["message"]
    )


def test_reasoning_is_left_out_if_it_is_not_wanted(scripted):
    body = {"messages": MESSAGES, "temperature": 0}
    with_it, without = (
        post(scripted, "/v1/chat/completions", body | {"include_reasoning": wanted})["choices"][0][
            "message"
        ]
        for wanted in (True, False)
    )
    assert with_it["reasoning"]
    assert without == with_it | {"reasoning": None, "reasoning_content": None}
    deltas = [
        chunk["choices"][0]["delta"]
        for chunk in chunks(scripted, "/v1/chat/completions", body | {"include_reasoning": False})
    ]
    assert not any(delta.get("reasoning_content") or delta.get("reasoning") for delta in deltas)
    assert "".join(delta.get("content", "") for delta in deltas) == with_it["content"]


def test_all_wrong_keys_of_logit_bias_are_named(roomy):
    message = post(
        roomy, "/v1/completions", {"prompt": "x", "logit_bias": {"low": 1, "5": 1, "high": 1}}, 400
    )["error"]["message"]
    assert "'low', 'high'" in message


def test_what_is_no_id_of_a_response(roomy):
    refused = post(roomy, "/v1/responses", {"input": "tide", "previous_response_id": "bad"}, 400)
    assert refused["error"]["param"] == "previous_response_id"


@pytest.mark.parametrize("length", [5000, 500_000])
def test_clients_see_that_the_context_is_too_short(roomy, length):
    error = post(roomy, "/v1/completions", {"prompt": "x" * length}, 400)["error"]
    assert error["code"] == "context_length_exceeded"
    assert "This model's maximum context length is 4096 tokens" in error["message"]


def test_several_chats_in_one_request(roomy):
    chats = [MESSAGES, [{"role": "user", "content": "mill"}]]
    asked = GREEDY | {"max_tokens": 3}
    made = post(roomy, "/v1/chat/completions/batch", asked | {"messages": chats, "n": 2})
    alone = [
        post(roomy, "/v1/chat/completions", asked | {"messages": chat, "n": 2}) for chat in chats
    ]
    assert [choice["index"] for choice in made["choices"]] == [0, 1, 2, 3]
    texts = [choice["message"]["content"] for one in alone for choice in one["choices"]]
    assert [choice["message"]["content"] for choice in made["choices"]] == texts
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert made["usage"][name] == sum(one["usage"][name] for one in alone)
    for wrong, param in (
        ({"messages": [[]]}, "messages"),
        ({"messages": chats, "stream": True}, "stream"),
        ({"n": 128}, "n"),
    ):
        body = {"messages": chats * 2} | wrong
        assert post(roomy, "/v1/chat/completions/batch", body, 400)["error"]["param"] == param
    body = {"messages": chats * 100, "logprobs": True, "top_logprobs": 20, "max_tokens": 1000}
    # of all together
    assert post(roomy, "/v1/chat/completions/batch", body, 400)["error"]["param"] == "logprobs"


def test_logprobs_of_named_tokens(roomy):
    named = GREEDY | {"logprob_token_ids": [40, 41], "max_tokens": 2}
    chat = {"messages": MESSAGES, "logprobs": True, "return_tokens_as_token_ids": True}
    for entry in post(roomy, "/v1/chat/completions", named | chat)["choices"][0]["logprobs"][
        "content"
    ]:
        assert {one["token"] for one in entry["top_logprobs"]} == {
            "token_id:40",
            "token_id:41",
            entry["token"],
        }
    lists = post(roomy, "/v1/completions", named | {"prompt": "a", "logprobs": 0})["choices"][0][
        "logprobs"
    ]
    assert all({"G", "H"} <= top.keys() for top in lists["top_logprobs"]), lists
    for more in ({"prompt": "a"}, {"prompt": "a", "echo": True, "max_tokens": 0, "logprobs": 1}):
        assert (
            post(roomy, "/v1/completions", named | more, 400)["error"]["param"]
            == "logprob_token_ids"
        )


def test_a_structural_tag(roomy):
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "high water"}}
    body = {"messages": MESSAGES, "max_tokens": 60}
    made = post(roomy, "/v1/chat/completions", body | {"response_format": tag})
    assert made["choices"][0]["message"]["content"] == "high water"
    wrong = {"type": "structural_tag", "format": {"type": "picture"}}
    assert (
        "picture"
        in post(roomy, "/v1/chat/completions", body | {"response_format": wrong}, 400)["error"][
            "message"
        ]
    )


def test_an_echo_of_token_ids_has_their_special_tokens(roomy):
    ids = post(roomy, "/tokenize", {"prompt": "<|im_end|>a"})["tokens"]
    body = {"prompt": ids, "echo": True, "max_tokens": 0}
    assert post(roomy, "/v1/completions", body)["choices"][0]["text"].endswith("<|im_end|>a")


@pytest.mark.parametrize(("path", "prompt"), ROUTES.items())
def test_every_chunk_after_the_first_has_its_token_ids(roomy, path, prompt):
    body = GREEDY | prompt | {"return_token_ids": True}
    ids = [
        choice["token_ids"]
        for chunk in chunks(roomy, path, body)[1:]
        for choice in chunk["choices"]
    ]
    whole = post(roomy, path, body)["choices"][0]["token_ids"]
    assert [token for some in ids for token in some] == whole[len(whole) - sum(map(len, ids)) :]
    assert "chat" not in path or ids[-1] == []  # a chat's last chunk has the finish reason alone


def test_a_message_is_begun_or_continued(roomy):
    message = {"role": "assistant", "content": "Hi"}
    body = {
        "messages": [*MESSAGES, message],
        "continue_final_message": True,
        "max_tokens": 1,
        "ignore_eos": True,
    }
    assert post(roomy, "/v1/chat/completions", body)["choices"][0]["finish_reason"] == "length"
    both = body | {"add_generation_prompt": True}
    assert (
        post(roomy, "/v1/chat/completions", both, 400)["error"]["param"] == "continue_final_message"
    )


def test_every_delta_has_content_or_names_the_reasoning(roomy):
    for more in ({}, {"logprobs": True, "top_logprobs": 1}):
        parts = chunks(roomy, "/v1/chat/completions", GREEDY | {"messages": MESSAGES} | more)
        assert all(
            part["choices"][0]["delta"].keys() & {"content", "reasoning_content"} for part in parts
        )
        assert parts[-1]["choices"][0]["delta"] == {"reasoning_content": None}


@pytest.mark.slow
def test_options_that_change_every_response(tiny_folder):
    running = Server(
        tiny_folder, "--enable-force-include-usage", "--return-tokens-as-token-ids", "--no-slots"
    ).wait()
    try:
        parts = chunks(
            running, "/v1/chat/completions", GREEDY | {"messages": MESSAGES, "logprobs": True}
        )
        assert [part["usage"]["completion_tokens"] for part in parts][-1] == 8
        assert all("usage" in part for part in parts)
        choice = post(running, "/v1/completions", GREEDY | {"prompt": "The tide", "logprobs": 1})[
            "choices"
        ][0]
        assert all(token.startswith("token_id:") for token in choice["logprobs"]["tokens"])
        assert httpx.get(f"{running.url}/slots").status_code == 501
    finally:
        assert running.stop() == 0


@pytest.mark.parametrize(("path", "prompt"), ROUTES.items())
def test_names_of_other_engines_for_the_same(roomy, path, prompt):
    """SGLang's rid and extra_key, llama.cpp's n_cmpl; and what changes nothing here is named in the
    header."""
    body = GREEDY | prompt | {"max_tokens": 1}
    more = {
        "rid": "mine-7",
        "extra_key": "own",
        "n_cmpl": 2,
        "session_id": "s",
        "vllm_xargs": {},
        "xtc_threshold": 0.1,
    }
    reply = httpx.post(f"{roomy.url}{path}", json=body | more)
    assert (reply.status_code, len(reply.json()["choices"])) == (200, 2)
    assert reply.headers["x-request-id"] == "mine-7"
    assert reply.headers["x-tidemill-ignored"] == "session_id, vllm_xargs, xtc_threshold"
    assert (
        "differ"
        in post(roomy, path, body | {"rid": "a", "request_id": "b"}, 400)["error"]["message"]
    )
    assert post(roomy, path, body | {"vllm_xargs": {"a": 1}}, 400)["error"]["param"] == "vllm_xargs"


def test_vllms_parameters_of_responses(roomy):
    body = {"input": "tide", "max_output_tokens": 3, "ignore_eos": True, "temperature": 0}
    plain = post(roomy, "/v1/responses", body | {"cache_salt": "a"})
    token = post(roomy, "/tokenize", {"prompt": "Z", "add_special_tokens": False})["tokens"][0]
    more = {
        "logit_bias": {str(token): 100},
        "cache_salt": "a",
        "priority": 5,
        "skip_special_tokens": True,
        "session_id": "s",
    }
    reply = httpx.post(f"{roomy.url}/v1/responses", json=body | more | {"request_id": "mine-8"})
    assert reply.headers["x-request-id"] == "mine-8"
    assert (
        reply.json()["output"][0]["content"][0]["text"]
        == "ZZZ"
        != plain["output"][0]["content"][0]["text"]
    )
    assert (
        post(roomy, "/v1/responses", body | {"logit_bias": {"x": 1}}, 400)["error"]["param"]
        == "logit_bias"
    )


def test_probabilities_of_labels_after_items(roomy):
    """vLLM's /generative_scoring and SGLang's /v1/score: as a completion's logprobs of these tokens
    have them."""
    labels = post(roomy, "/tokenize", {"prompt": "ab", "add_special_tokens": False})["tokens"]
    query, items = "Is it? ", ["Paris", "London is a long item"]
    asked = {"query": query, "items": items, "label_token_ids": labels}
    plain = post(roomy, "/v1/score", asked)
    assert (plain["object"], plain["usage"]["completion_tokens"]) == ("scoring", 0)
    for item, scores in zip(items, plain["scores"], strict=True):
        body = {
            "prompt": query + item,
            "max_tokens": 1,
            "logprobs": 2,
            "logprob_token_ids": labels,
            "temperature": 0,
        }
        top = post(roomy, "/v1/completions", body)["choices"][0]["logprobs"]["top_logprobs"][0]
        assert scores == pytest.approx([math.exp(top["a"]), math.exp(top["b"])])
    soft = post(roomy, "/v1/score", asked | {"apply_softmax": True})["scores"]
    assert [sum(scores) for scores in soft] == pytest.approx([1.0, 1.0])
    for wrong in (
        {"query": [2**70], "items": [[5]]},
        {"query": [5] * 10**5, "items": [[5]] * 2000},
        {"query": [5]},
    ):
        assert (
            post(roomy, "/generative_scoring", asked | wrong, 400)["error"]["type"]
            == "invalid_request_error"
        )
    made = post(roomy, "/generative_scoring", asked)
    assert made["id"].startswith("generative-scoring-")
    assert [one["score"] for one in made["data"]] == [scores[0] for scores in soft]
    ids = [
        post(roomy, "/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
        for text in items
    ]
    begin = post(roomy, "/tokenize", {"prompt": query})["tokens"]
    assert (
        post(roomy, "/v1/score", asked | {"query": begin, "items": ids})["scores"]
        == plain["scores"]
    )
    assert post(roomy, "/v1/score", asked | {"items": []})["scores"] == []
    for wrong in (
        {"items": 42},
        {"label_token_ids": [10**9]},
        {"label_token_ids": []},
        {"query": begin},
        {"text_1": "a"},
    ):
        assert post(roomy, "/v1/score", asked | wrong, 400)["error"]["param"].endswith(
            ("items", "token_ids")
        )
    assert post(roomy, "/v1/score", {"text_1": "a"}, 400)["error"]["param"] == "text_2"


def test_coheres_embeddings(roomy):
    texts = ["the tide", "turns " * 5000]
    made = post(
        roomy,
        "/v2/embed",
        {"texts": texts, "embedding_types": ["float", "base64", "binary", "ubinary"]},
    )
    (first, _), units = made["embeddings"]["float"], made["meta"]["billed_units"]
    same = post(roomy, "/v1/embeddings", {"input": texts[0]})
    assert first == same["data"][0]["embedding"]
    assert units["input_tokens"] > same["usage"]["prompt_tokens"]
    assert struct.unpack(
        f"<{len(first)}f", base64.b64decode(made["embeddings"]["base64"][0])
    ) == pytest.approx(first)
    bits = "".join(f"{value:08b}" for value in made["embeddings"]["ubinary"][0])
    assert [bit == "1" for bit in bits] == [value >= 0 for value in first]
    assert made["embeddings"]["binary"][0] == [
        value - 128 for value in made["embeddings"]["ubinary"][0]
    ]
    (short,) = post(roomy, "/v2/embed", {"texts": texts[:1], "output_dimension": 8})["embeddings"][
        "float"
    ]
    assert (len(short), sum(value * value for value in short)) == (8, pytest.approx(1.0))
    for wrong in (
        {"texts": texts, "truncate": "NONE"},
        {"texts": []},
        {},
        {"texts": ["a"], "input_type": "query"},
    ):
        post(roomy, "/v2/embed", wrong, 400)


def test_errors_have_the_words_that_programs_look_for(roomy):
    wrong = post(
        roomy,
        "/v1/chat/completions",
        GREEDY | {"messages": MESSAGES, "logit_bias": {"320": 1}},
        400,
    )
    assert "the model has 320 tokens" in wrong["error"]["message"]
    wrong = post(roomy, "/v1/embeddings", {"input": "tide " * 60_000}, 400)
    # llama.cpp, SGLang, vLLM
    for words in (
        "too large",
        "is longer than the model's context length",
        "maximum context length",
    ):
        assert words in wrong["error"]["message"]
