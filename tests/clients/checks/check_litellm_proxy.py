"""litellm's proxy before the server: OpenAI's and Anthropic's clients talk to it, by each of two
providers."""

import json
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import anthropic
import httpx
import openai
import pytest
from asked import ANSWER, LIMITS, MESSAGES, PARAMETERS, ROOM, TOOL

KEY = "sk-of-the-proxy"
PROVIDERS = ["hosted_vllm", "anthropic"]
STARTS_WITHIN_S = 300


@pytest.fixture(scope="module")
def proxy(url, tmp_path_factory):
    places = {"hosted_vllm": f"{url}/v1", "anthropic": url}
    models = [
        {
            "model_name": f"by-{name}",
            "litellm_params": {"model": f"{name}/tiny", "api_base": place, "api_key": "none"},
        }
        for name, place in places.items()
    ]
    path = tmp_path_factory.mktemp("proxy") / "config.yaml"
    # JSON is YAML, too
    path.write_text(json.dumps({"model_list": models, "general_settings": {"master_key": KEY}}))
    with socket.socket() as reserved:  # it does not listen: the proxy does, at the same port
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield from started(path, reserved.getsockname()[1])


def started(path, port):
    command = [
        str(Path(sys.executable).with_name("litellm")),
        "--config",
        str(path),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    process = subprocess.Popen([*command, "--telemetry", "False"])
    try:
        end = time.monotonic() + STARTS_WITHIN_S
        while time.monotonic() < end and process.poll() is None:
            with suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/health/liveliness").status_code == 200:
                    break
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


@pytest.mark.parametrize("provider", PROVIDERS)
def test_openais_client(proxy, provider):
    client = openai.OpenAI(base_url=f"{proxy}/v1", api_key=KEY, max_retries=0)
    asked = {"model": f"by-{provider}", "messages": MESSAGES}
    whole = client.chat.completions.create(**asked, **LIMITS)
    assert whole.usage.completion_tokens == 20
    streamed = client.chat.completions.create(**asked, **LIMITS, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
    assert text == whole.choices[0].message.content
    choice = {"type": "function", "function": {"name": "high_water"}}
    message = (
        client.chat.completions.create(**asked, **ROOM, tools=[TOOL], tool_choice=choice)
        .choices[0]
        .message
    )
    assert json.loads(message.tool_calls[0].function.arguments) == {"port": "Brest"}
    shaped = client.chat.completions.create(**asked, **ROOM, response_format=ANSWER)
    assert json.loads(shaped.choices[0].message.content) == {"port": "Brest"}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_anthropics_client(proxy, provider):
    client = anthropic.Anthropic(base_url=proxy, api_key=KEY, max_retries=0)
    asked = {
        "model": f"by-{provider}",
        "messages": MESSAGES,
        "max_tokens": 400,
        "extra_body": {"temperature": 0},
    }
    tool = {"name": "high_water", "description": "Says when.", "input_schema": PARAMETERS}
    reply = client.messages.create(
        **asked, tools=[tool], tool_choice={"type": "tool", "name": "high_water"}
    )
    assert [block.input for block in reply.content if block.type == "tool_use"] == [
        {"port": "Brest"}
    ]
    with client.messages.stream(**asked | {"max_tokens": 20}) as stream:
        assert "".join(stream.text_stream)


def test_errors(proxy):
    client = openai.OpenAI(base_url=f"{proxy}/v1", api_key=KEY, max_retries=0)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="by-hosted_vllm", messages=MESSAGES, temperature=-3)
