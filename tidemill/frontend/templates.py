"""Chat templates that are known by name, for --chat-template. The names are llama.cpp's."""

from __future__ import annotations


def _turns(turn: str, prompt: str, begin: str = "") -> str:
    """Every message is written alike."""
    return f"{begin}{{% for message in messages %}}{turn}{{% endfor %}}{{% if add_generation_prompt %}}{prompt}{{% endif %}}"


def _folded(
    user: str,
    assistant: str,
    prompt: str = "",
    begin: str = "{{ bos_token }}",
    system: str = "{{ ns.system }}\n\n",
) -> str:
    """System messages are part of the next message of the user, where `user` has it as `text`."""
    return (
        "{{ bos_token }}{% set ns = namespace(system='') %}{% for message in messages %}"
        "{% if message.role == 'system' %}{% set ns.system = message.content %}"
        f"{{% elif message.role == 'assistant' %}}{assistant}"
        "{% else %}"
        f"{{% set text %}}{{% if ns.system %}}{system}{{% endif %}}{{{{ message.content }}}}{{% endset %}}"
        f"{{% set ns.system = '' %}}{user}"
        "{% endif %}{% endfor %}"
        f"{{% if add_generation_prompt %}}{prompt}{{% endif %}}"
    )


_SYS = "<<SYS>>\n{{ ns.system }}\n<</SYS>>\n\n"
_DEEPSEEK = (
    "{% if message.role == 'user' %}<｜User｜>{{ message.content }}"
    "{% elif message.role == 'assistant' %}<｜Assistant｜>{{ message.content }}<｜end▁of▁sentence｜>"
    "{% else %}{{ message.content }}\n\n{% endif %}"
)
_VICUNA = (
    "{% if message.role == 'user' %}USER: {{ message.content }}\n"
    "{% elif message.role == 'assistant' %}ASSISTANT: {{ message.content }}{{ eos_token }}\n"
    "{% else %}{{ message.content }}\n\n{% endif %}"
)
_COMMAND_R = (
    "<|START_OF_TURN_TOKEN|>{% if message.role == 'user' %}<|USER_TOKEN|>{% elif message.role == 'assistant' %}<|CHATBOT_TOKEN|>"
    "{% else %}<|SYSTEM_TOKEN|>{% endif %}{{ message.content }}<|END_OF_TURN_TOKEN|>"
)
_MISTRAL_V7 = (
    "{% if message.role == 'system' %}[SYSTEM_PROMPT] {{ message.content }}[/SYSTEM_PROMPT]"
    "{% elif message.role == 'assistant' %} {{ message.content }}{{ eos_token }}"
    "{% else %}[INST] {{ message.content }}[/INST]{% endif %}"
)

NAMED = {
    "chatml": _turns(
        "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n",
        "<|im_start|>assistant\n",
    ),
    "command-r": _turns(_COMMAND_R, "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "{{ bos_token }}"),
    "deepseek3": _turns(_DEEPSEEK, "<｜Assistant｜>", "{{ bos_token }}"),
    "gemma": _folded(
        "<start_of_turn>user\n{{ text }}<end_of_turn>\n",
        "<start_of_turn>model\n{{ message.content }}<end_of_turn>\n",
        "<start_of_turn>model\n",
    ),
    "granite": _turns(
        "<|start_of_role|>{{ message.role }}<|end_of_role|>{{ message.content }}<|end_of_text|>\n",
        "<|start_of_role|>assistant<|end_of_role|>",
    ),
    "llama2": _folded(
        "[INST] {{ text }} [/INST]",
        " {{ message.content }} {{ eos_token }}{{ bos_token }}",
        system=_SYS,
    ),
    "llama3": _turns(
        "<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n{{ message.content }}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "{{ bos_token }}",
    ),
    "mistral-v1": _folded(" [INST] {{ text }} [/INST]", " {{ message.content }}{{ eos_token }}"),
    "mistral-v3": _folded("[INST] {{ text }}[/INST]", " {{ message.content }}{{ eos_token }}"),
    "mistral-v7": _turns(_MISTRAL_V7, "", "{{ bos_token }}"),
    "phi3": _turns("<|{{ message.role }}|>\n{{ message.content }}<|end|>\n", "<|assistant|>\n"),
    "phi4": _turns(
        "<|im_start|>{{ message.role }}<|im_sep|>{{ message.content }}<|im_end|>",
        "<|im_start|>assistant<|im_sep|>",
    ),
    "vicuna": _turns(_VICUNA, "ASSISTANT:", "{{ bos_token }}"),
    "zephyr": _turns(
        "<|{{ message.role }}|>\n{{ message.content }}{{ eos_token }}\n", "<|assistant|>\n"
    ),
}
