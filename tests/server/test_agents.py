"""Programs that work in a loop of tool calls: requests in the shapes of Claude Code and Codex."""

import json

import httpx
import openai
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.helpers import make_llama
from tests.server import recorded
from tests.server.conftest import Server
from tests.server.recorded import CLAUDE_CODE_HEADERS, CODEX_HEADERS

CONTEXT = 8192
SPECIAL = ["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"]
TEMPLATE = (
    "{% if tools %}<|system|>{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and not enable_thinking %}/no_think {% endif %}"
    "{% if reasoning_effort %}{{ 'effort ' + reasoning_effort * 20 }}{% endif %}{% endif %}"
)


def word_tokenizer(path) -> None:
    """Trained on the requests themselves, whose size in tokens is then about that of a real
    model's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        [json.dumps(recorded.claude_code()), json.dumps(recorded.codex())], trainer
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"eos_token": "</s>", "bos_token": "<s>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    path = tmp_path_factory.mktemp("large")
    make_llama(path, vocab_size=1024, max_position_embeddings=CONTEXT)
    word_tokenizer(path)
    # a random model that opens its reasoning does not end it
    running = Server(path, "--reasoning-parser", "none").wait()
    yield running
    assert running.stop() == 0


def events_of(reply):
    assert reply.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: ")]


def messages(server, body):
    url = f"{server.url}/v1/messages?beta=true"
    with httpx.stream("POST", url, json=body, headers=CLAUDE_CODE_HEADERS) as reply:
        assert reply.status_code == 200, reply.read()
        return events_of(reply), reply.headers["x-tidemill-ignored"].split(", ")


def count(server, body):
    names = (
        "model",
        "messages",
        "system",
        "tools",
        "thinking",
        "output_config",
        "context_management",
    )
    body = {name: body[name] for name in names if name in body}
    reply = httpx.post(
        f"{server.url}/v1/messages/count_tokens?beta=true", json=body, headers=CLAUDE_CODE_HEADERS
    )
    assert reply.status_code == 200, reply.text
    return reply.json()["input_tokens"]


def filled(server, body):
    """The request with a last message that leaves little of the context for the answer: it would be
    long."""
    while (left := CONTEXT - count(server, body)) > 60:
        content = body["messages"][-1]["content"]
        body["messages"][-1]["content"] = [
            *content,
            {"type": "text", "text": " the" * max((left - 40) // 2, 1)},
        ]
    return body


def test_claude_code(large):
    """Twice its main request: max_tokens is more than fits, and the second finds the prefix of the
    first."""
    body = filled(large, recorded.claude_code(recorded.claude_code_second_turn()))
    events, ignored = messages(large, body)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop")
    assert events[-2]["delta"]["stop_reason"] in (
        "model_context_window_exceeded",
        "end_turn",
        "tool_use",
    )
    usage = events[-2]["usage"]
    assert (
        usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["output_tokens"] <= CONTEXT
    )
    # The budget: of reasoning, which the server is told not to look for.
    assert ignored == ["budget_tokens", "caller", "context_management.clear_thinking", "metadata"]
    body["system"][0] = recorded.claude_code(build="2b7")["system"][0]
    again, _ = messages(large, body)
    assert again[-2]["usage"]["cache_read_input_tokens"] > 0.9 * count(large, body)


def test_what_claude_code_asks_reaches_the_template(large):
    plain = recorded.claude_code() | {"thinking": None, "output_config": None}
    num = count(large, plain)
    assert count(large, plain | {"thinking": {"type": "disabled"}}) > num
    assert count(large, plain | {"thinking": {"type": "adaptive"}}) == num
    assert count(large, plain | {"output_config": {"effort": "max"}}) > num
    assert count(large, plain | {"tools": []}) < num - 1000


def test_claude_codes_title(large):
    events, _ = messages(large, recorded.claude_code_title())
    text = "".join(
        event["delta"]["text"] for event in events if event["type"] == "content_block_delta"
    )
    assert json.loads(text) == {"title": "Fix a test"}


def test_codex(large):
    body = recorded.codex(recorded.codex_second_turn())
    shorter = {
        name: body[name]
        for name in ("model", "input", "instructions", "tools", "tool_choice", "reasoning")
    }
    count = httpx.post(f"{large.url}/v1/responses/input_tokens", json=shorter).json()[
        "input_tokens"
    ]
    body["max_output_tokens"] = 40  # Codex leaves it out; the answer of a random model is long
    with httpx.stream(
        "POST", f"{large.url}/v1/responses", json=body, headers=CODEX_HEADERS
    ) as reply:
        assert reply.status_code == 200, reply.read()
        events = events_of(reply)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"]["usage"]["input_tokens"] == count
    assert reply.headers["x-tidemill-ignored"].split(", ") == [
        "client_metadata", "defer_loading", "summary", "tools.local_shell", "tools.web_search", "verbosity",
    ]  # fmt: skip


def test_effort_reaches_the_template(large):
    client = openai.OpenAI(base_url=f"{large.url}/v1", api_key="none", max_retries=0)
    num = client.responses.input_tokens.count(input="x").input_tokens
    whole = {
        "max_output_tokens": 9,
        "stream": True,
        "temperature": 0.5,
        "metadata": {},
        "store": False,
    }
    assert client.responses.input_tokens.count(input="x", extra_body=whole).input_tokens == num
    longer = [
        client.responses.input_tokens.count(input="x", reasoning={"effort": effort}).input_tokens
        - num
        for effort in ("none", "low", "high", "xhigh")
    ]
    assert all(more > 0 for more in longer)
    assert longer[3] == longer[2]  # the nearest that templates know
    by_hand = client.responses.input_tokens.count(
        input="x", extra_body={"chat_template_kwargs": {"enable_thinking": False}}
    )
    assert by_hand.input_tokens > num
