"""Chat templates get messages in the form that they take: small templates that are written as
published ones are."""

import json

import pytest

from tests.helpers import byte_tokenizer
from tidemill.errors import InvalidRequest
from tidemill.frontend.chat import ChatTemplate, joined_templates
from tidemill.frontend.control import MARK
from tidemill.frontend.tokenizer import Tokenizer

TURN = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
ONLY_PARTS = (
    "{% for message in messages %}[{{ message.role }}]"
    "{% for part in message.content %}{% if part.type == 'text' %}({{ part.text }}){% endif %}{% endfor %}{% endfor %}"
)
EITHER = (
    "{% for message in messages %}[{{ message.role }}]{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}({{ part.text }}){% endfor %}{% endif %}{% endfor %}"
)
WITH_CALLS = (
    "{% for message in messages %}[{{ message.role }}]{% if message.content is not none %}{{ '=' + message.content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}<call>{{ call.function.name }}{{ ARGUMENTS }}</call>{% endfor %}[end]{% endfor %}"
)
OBJECTS = WITH_CALLS.replace("ARGUMENTS", "call.function.arguments | tojson")
TEXTS = WITH_CALLS.replace("ARGUMENTS", "'|' + call.function.arguments")
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}[{{ message.role }}]{{ message.content }}{% endfor %}"
)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
USER = {"role": "user", "content": "hi"}
RESULT = {"role": "tool", "tool_call_id": "call00001", "content": "clear"}


def caller(content=None, num=1):
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    calls = [{"id": f"call0000{i}", "type": "function", "function": function} for i in range(num)]
    return {"role": "assistant", "content": content, "tool_calls": calls}


@pytest.mark.parametrize(
    ("source", "texts", "parts"),
    [
        (TURN, "[user]hi", "[user]hi"),
        (ONLY_PARTS, "[user](hi)", "[user](h)(i)"),
        (EITHER, "[user]hi", "[user](h)(i)"),
    ],
)
def test_content_is_a_string_or_parts_as_the_template_takes_it(source, texts, parts):
    template = ChatTemplate(source)
    assert template.render([USER]) == texts
    content = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert template.render([{"role": "user", "content": content}]) == parts
    with pytest.raises(InvalidRequest, match="'image'"):
        template.render([{"role": "user", "content": [{"type": "image"}]}])


@pytest.mark.parametrize(
    ("source", "call"),
    [
        (OBJECTS, '<call>weather{"city": "Rome"}</call>'),
        (TEXTS, '<call>weather|{"city": "Rome"}</call>'),
    ],
)
@pytest.mark.parametrize("content", [None, "", "so"])
def test_arguments_are_an_object_or_text_as_the_template_takes_them(source, call, content):
    text = f"={content}" if content else ""  # beside calls, content that is empty may be null
    assert (
        ChatTemplate(source).render([USER, caller(content)])
        == f"[user]=hi[end][assistant]{text}{call}[end]"
    )


def test_a_template_that_writes_calls_but_knows_no_tools_keeps_its_own_way_of_calls():
    text = ChatTemplate(OBJECTS).render([USER, caller(), RESULT], TOOLS)
    assert text.endswith(
        '[user]=hi[end][assistant]<call>weather{"city": "Rome"}</call>[end][tool]=clear[end]'
    )
    assert text.startswith(
        "[system]=You may call these functions:\n" + json.dumps(TOOLS[0]["function"])
    )
    assert 'To call one, answer with <call>NAME{"key": "value"}</call>[end]' in text


def test_a_template_that_refuses_system_messages_gets_them_before_the_first_of_the_user():
    template = ChatTemplate(NO_SYSTEM)
    assert (
        template.render([{"role": "system", "content": "Be brief."}, USER])
        == "[user]Be brief.\n\nhi"
    )
    text = template.render([USER, caller(num=2), RESULT, RESULT], TOOLS)
    assert text.startswith("[user]You may call these functions:")
    assert text.endswith(
        "</tool_call>[user]<tool_response>clear</tool_response>\n<tool_response>clear</tool_response>"
    )


def test_a_template_that_refuses_more_than_system_messages_says_why():
    with pytest.raises(InvalidRequest, match="Roles must alternate"):
        ChatTemplate(NO_SYSTEM).render([USER, USER])


def test_calls_in_the_history_become_turns_also_without_tools():
    asked = [USER, caller(), RESULT]
    calls = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    written = f"[user]hi[assistant]{calls}[user]<tool_response>clear</tool_response>"
    template = ChatTemplate(NO_SYSTEM)
    assert template.render(asked) == written
    assert template.render([*asked, USER]) == f"{written}\nhi"  # turns alternate
    assert template.render([*asked, USER], TOOLS).endswith(
        "<tool_response>clear</tool_response>\nhi"
    )


def test_roles_of_clients_are_not_remembered():
    template = ChatTemplate(TURN)
    for i in range(50):
        template.render([{"role": f"role{i}", "content": "x"}])
    assert not template._probe._takes


def test_control_tokens_in_parts_and_arguments_are_marked():
    template = ChatTemplate(EITHER, ["<end>"])
    content = [{"type": "text", "text": "a<end>b"}]
    assert (
        template.render([{"role": "user", "content": content}], marks=True)
        == f"[user](a<{MARK}end>b)"
    )


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("", '{"b": "é<", "a": 1}'),
        ("sort_keys=true", '{"a": 1, "b": "é<"}'),
        ("separators=(',', ':')", '{"b":"é<","a":1}'),
        ("ensure_ascii=true", '{"b": "\\u00e9<", "a": 1}'),
        ("true", '{"b": "\\u00e9<", "a": 1}'),
        ("indent=1", '{\n "b": "é<",\n "a": 1\n}'),
    ],
)
def test_tojson(how, text):
    assert ChatTemplate("{{ {'b': 'é<', 'a': 1} | tojson(" + how + ") }}").render([]) == text


# ---- of a folder


def write_settings(folder, **settings):
    byte_tokenizer(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def test_the_end_token_of_a_template_is_that_of_the_tokenizer(tmp_path):
    write_settings(
        tmp_path,
        chat_template="{{ bos_token }}{{ eos_token }}{{ pad_token }}",
        pad_token={"content": "<|end|>"},
    )
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [261, 1]}')
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_token_ids == (261, 1)
    assert tokenizer.render_chat([USER]) == "<s></s><|end|>"


NAMED = {
    "default": "plain: {{ messages[0].content }}\n",
    "tool_use": "\n  tools: {{ tools | length }}  \n",
}


@pytest.mark.parametrize("is_list", [True, False])
def test_a_template_for_tools(tmp_path, is_list):
    listed = [{"name": name, "template": text} for name, text in NAMED.items()] + [
        {"name": "rag", "template": "rag"}
    ]
    write_settings(tmp_path, chat_template=listed if is_list else NAMED["default"])
    if not is_list:
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(NAMED["tool_use"])
    tokenizer = Tokenizer.load(tmp_path)
    for tools, name in ((None, "default"), (TOOLS, "tool_use")):
        assert tokenizer.render_chat([USER], tools=tools) == ChatTemplate(NAMED[name]).render(
            [USER], tools
        )


def test_templates_with_names():
    assert (
        joined_templates({"default": "a"})
        == joined_templates({"default": "a", "tool_use": "a"})
        == "a"
    )
    assert joined_templates({"tool_use": "b", "rag": "c"}) == "b"
    assert joined_templates({"rag": "c", "default": None}) is None


def test_a_message_of_parts_can_be_continued(tmp_path):
    write_settings(tmp_path, chat_template=EITHER)
    messages = [
        USER,
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
    ]
    assert (
        Tokenizer.load(tmp_path).render_chat(messages, continue_final_message=True)
        == "[user]hi[assistant](a)(b"
    )


def test_no_part_of_a_system_message_is_lost():
    source = (
        "{% for message in messages %}[{{ message.role }}]{% if message.content is string %}"
        "{{ message.content }}{% else %}{{ message.content[0].text }}{% endif %}{% endfor %}"
    )
    parts = [{"type": "text", "text": text} for text in ("one ", "two")]
    assert (
        ChatTemplate(source).render([{"role": "system", "content": parts}, USER])
        == "[system]one two[user]hi"
    )
