"""Google's API as its documentation and its clients write requests."""

from __future__ import annotations

import json

import httpx
import pytest

USER = [{"role": "user", "parts": [{"text": "hi"}]}]
LETTERS = {"type": "STRING", "enum": ["a", "b"]}


def generate(server, body, method="generateContent"):
    url = f"{server.url}/v1beta/models/tiny:{method}"
    content = body if isinstance(body, bytes) else json.dumps(body)
    return httpx.post(url, content=content, headers={"content-type": "application/json"})


def count(server, **body):
    response = generate(server, {"contents": USER} | body, "countTokens")
    assert response.status_code == 200, response.text
    return response.json()["totalTokens"]


def text_of(server, config):
    response = generate(server, {"contents": USER, "generationConfig": config})
    assert response.status_code == 200, response.text
    (part,) = response.json()["candidates"][0]["content"]["parts"]
    return part["text"]


def written(server, schema):
    """What is generated for a schema of Google's."""
    config = {"responseMimeType": "application/json", "responseSchema": schema}
    return json.loads(text_of(server, config | {"maxOutputTokens": 200, "seed": 1}))


@pytest.mark.parametrize("contents", [{"parts": {"text": "hi"}}, [{"parts": {"text": "hi"}}]])
def test_one_object_stands_for_a_list_of_one(roomy, contents):
    assert count(roomy, contents=contents) == count(roomy)
    system = {"parts": {"text": "Be brief."}}
    in_list = {"role": "system", "parts": [{"text": "Be brief."}]}  # as an older client writes it
    num = count(roomy, system_instruction=system)
    assert num == count(roomy, systemInstruction=in_list) > count(roomy)


def test_text_beside_a_functions_response_is_part_of_the_prompt(roomy):
    call = {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {}}}]}
    result = {"functionResponse": {"name": "f", "response": {"result": 1}}}

    def num_with(*parts):
        return count(roomy, contents=[*USER, call, {"role": "user", "parts": parts}])

    assert num_with(result, {"text": "word " * 20}) >= num_with(result) + 100


def test_names_of_enumerations_are_taken_in_any_case(roomy):
    tools = {"functionDeclarations": [{"name": "f", "parameters": {"type": "OBJECT"}}]}
    body = {
        "contents": USER,
        "tools": [tools],
        "toolConfig": {"functionCallingConfig": {"mode": "any", "allowedFunctionNames": []}},
        "generationConfig": {"thinkingConfig": {"thinkingLevel": "low"}, "maxOutputTokens": 60},
    }
    response = generate(roomy, body)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("number", [b"1e999", b"NaN", b"-1e999"])
def test_a_number_without_an_integer_is_refused(roomy, number):
    body = b'{"contents": {"parts": {"text": "x"}}, "generationConfig": {"topK": %b}}' % number
    assert generate(roomy, body).status_code == 400


def test_properties_have_googles_order_and_no_others_are_written(roomy):
    flag = {"type": "BOOLEAN"}
    properties = {"b": flag, "a": flag, "c": flag}
    schema = {"type": "OBJECT", "properties": properties, "required": ["a", "b", "c"]}
    assert list(written(roomy, schema)) == ["b", "a", "c"]
    assert list(written(roomy, schema | {"propertyOrdering": ["a", "x", [], "b"]})) == [*"abc"]


@pytest.mark.parametrize("name", ["minItems", "min_items"])
def test_schemas_have_members_in_camel_case_and_in_snake_case(roomy, name):
    item = LETTERS | {"format": "enum"}
    exactly = {name: "3", name.replace("min", "max"): 3}
    assert len(written(roomy, {"type": "ARRAY", "items": item, **exactly})) == 3


def test_a_choice_is_written_without_quotes(roomy):
    config = {"responseMimeType": "text/x.enum", "responseSchema": LETTERS}
    assert text_of(roomy, config) in ("a", "b")


def test_a_schema_that_would_have_no_effect_is_refused(roomy):
    body = {"contents": USER, "generationConfig": {"responseSchema": LETTERS}}
    response = generate(roomy, body)
    assert response.status_code == 400
    assert "application/json" in response.json()["error"]["message"]


def test_a_limit_of_a_schema_with_thousands_of_digits_is_refused(roomy):
    schema = {"type": "ARRAY", "items": LETTERS, "minItems": "9" * 5000}
    config = {"responseMimeType": "application/json", "responseSchema": schema}
    body = {"contents": USER, "generationConfig": config}
    assert generate(roomy, body).status_code == 400
