"""google-genai: contents, streams, functions, structured output, reasoning, token counts, errors."""

import pytest
from asked import PARAMETERS
from google import genai
from google.genai import errors, types

WORDS = "How high is the water?"
SHORT = {"max_output_tokens": 20, "temperature": 0}
FUNCTION = {"name": "high_water", "description": "Says when.", "parameters_json_schema": PARAMETERS}
FORCED = {"function_calling_config": {"mode": "ANY", "allowed_function_names": ["high_water"]}}


@pytest.fixture(scope="module")
def client(url):
    with genai.Client(api_key="none", http_options=types.HttpOptions(base_url=url)) as client:
        yield client


def test_contents_whole_and_streamed(client):
    whole = client.models.generate_content(model="tiny", contents=WORDS, config=SHORT)
    usage = whole.usage_metadata
    assert (whole.candidates[0].finish_reason, usage.candidates_token_count) == ("MAX_TOKENS", 20)
    chunks = list(client.models.generate_content_stream(model="tiny", contents=WORDS, config=SHORT))
    assert "".join(chunk.text or "" for chunk in chunks) == whole.text
    assert chunks[-1].usage_metadata.prompt_token_count == usage.prompt_token_count


def test_a_forced_call_and_its_response(client):
    tools = [types.Tool(function_declarations=[FUNCTION])]
    config = {"tools": tools, "tool_config": FORCED, "max_output_tokens": 200, "temperature": 0}
    response = client.models.generate_content(model="tiny", contents=WORDS, config=config)
    call = response.function_calls[0]
    assert (call.name, call.args) == ("high_water", {"port": "Brest"})
    result = types.Part.from_function_response(name=call.name, response={"result": "at noon"})
    turns = [
        types.Content(role="user", parts=[types.Part(text=WORDS)]),
        response.candidates[0].content,
        types.Content(role="user", parts=[result]),
    ]
    again = client.models.generate_content(
        model="tiny", contents=turns, config=SHORT | {"tools": tools}
    )
    assert again.usage_metadata.prompt_token_count > response.usage_metadata.prompt_token_count


def test_a_function_that_the_client_runs(client):
    asked = []

    def high_water(is_spring: bool) -> str:
        """Says when."""
        asked.append(is_spring)
        return "at noon"

    config = types.GenerateContentConfig(
        tools=[high_water],
        tool_config=FORCED,
        max_output_tokens=200,
        temperature=0,
        automatic_function_calling=types.AutomaticFunctionCallingConfig(maximum_remote_calls=2),
    )
    client.chats.create(model="tiny", config=config).send_message(WORDS)
    assert set(asked) <= {True, False}
    assert asked


def test_structured_output_and_counts(client):
    config = {"response_mime_type": "application/json", "response_json_schema": PARAMETERS}
    response = client.models.generate_content(model="tiny", contents=WORDS, config=config)
    assert response.parsed == {"port": "Brest"}
    counted = client.models.count_tokens(model="tiny", contents=WORDS)
    assert counted.total_tokens == response.usage_metadata.prompt_token_count


def test_a_chat_that_thinks(client):
    config = {"thinking_config": {"include_thoughts": True}, "temperature": 0}
    chat = client.chats.create(model="scripted", config=config)
    first = chat.send_message("Is it?")
    thought, said = first.candidates[0].content.parts
    assert (thought.thought, thought.text, said.text) == (True, "hm", "ok")
    assert first.usage_metadata.thoughts_token_count
    assert chat.send_message("And now?").text == "ok"


def test_models_and_refusals(client, url):
    beta = types.HttpOptions(base_url=url, api_version="v1beta")  # /v1/models is OpenAI's list
    with genai.Client(api_key="none", http_options=beta) as listing:
        assert "models/tiny" in [model.name for model in listing.models.list()]
    with pytest.raises(errors.ClientError) as caught:
        client.models.generate_content(model="nonesuch", contents=WORDS)
    assert (caught.value.code, caught.value.status) == (404, "NOT_FOUND")
    picture = types.Part.from_bytes(data=b"x", mime_type="image/png")
    with pytest.raises(errors.ClientError, match="image/png"):
        client.models.generate_content(model="tiny", contents=[WORDS, picture])
