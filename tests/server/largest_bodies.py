"""The largest request bodies of every route, of several shapes. A route that is not here is asked
without a body."""

import json
from typing import Any

from tidemill.server.api.refused import ROUTES

NUM_ITEMS = 9600
EMOJI = "😀" * 200_000  # as long as the context lets pass
WORDS = "the tide; " * 800_000  # as long as a body may be
NUM = 2**19 - 100  # with what is around them, as many items as a body may have
IDS, TEXTS, FLOATS = [5] * NUM, ["abcdef"] * NUM, [0.5] * NUM
TOO_MANY_IDS = [5] * 2**20
SHORT = {"role": "user", "content": "x"}
LONG = {"role": "user", "content": WORDS}
TEXT_PART = {"type": "text", "text": "x"}
MESSAGES = [SHORT] * 2**14
PARTS = [{"role": "user", "content": [TEXT_PART] * 21_000}]
CALL = {"id": "x", "function": {"name": "f"}}
CALLS = [{"role": "assistant", "tool_calls": [CALL] * 200}] * 60
WRONG = [{"role": 5}] * 2**14
SCHEMA = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(200)}}
WIDE = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(21_000)}}
STRICT = {"name": "n", "strict": True, "schema": WIDE}
WITH_ENUM = {"type": "json_schema", "json_schema": {"schema": SCHEMA | {"enum": TEXTS[:60_000]}}}
TOOL = {"name": "f", "description": "d", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": TOOL | {"name": f"f{i}"}} for i in range(100)]
ANTHROPIC_TOOLS = [{"name": f"f{i}", "input_schema": SCHEMA} for i in range(100)]
STOPS = ["a" * 1000 + char * 24 for char in "bcdefghijklmnopq"]
REGEXES = [f"[\\s\\S]*[ab][\\s\\S]{{{num}}}c" for num in (200, 199, 198, 197)]
BIAS = {str(i % 320): i % 7 for i in range(320)}
ITEM = {"role": "user", "content": "x" * 100}
ITEMS = [ITEM] * NUM_ITEMS
MANY = [f"text {i}" for i in range(2048)]
STREAM = {"max_tokens": 100, "ignore_eos": True, "stream": True}


def chats(**more: object) -> list[dict[str, Any]]:
    """Bodies with messages."""
    asked: list[dict[str, Any]] = [
        *({"messages": messages} for messages in (MESSAGES, PARTS, CALLS, WRONG)),
        {"messages": [SHORT], "tools": TOOLS},
        *({"messages": [{"role": "user", "content": text}]} for text in (EMOJI, WORDS)),
    ]
    return [more | one for one in asked]


def texts(name: str, **more: object) -> list[dict[str, Any]]:
    """Bodies with a prompt under this name."""
    values = (EMOJI, WORDS, IDS, TOO_MANY_IDS, TEXTS, FLOATS, MANY, [EMOJI[:10_000]] * 20)
    return [more | {name: value} for value in values]


def generates(**more: object) -> list[dict[str, Any]]:
    """Bodies whose output is expensive."""
    return [
        STREAM | {"n": 12, "stop": STOPS} | more,
        STREAM | {"n": 12, "stop_regex": REGEXES} | more,
        STREAM | {"n": 12, "logprobs": 20, "logit_bias": BIAS} | more,
        {"n": 64, "max_tokens": 300, "logprobs": 20, "ignore_eos": True} | more,
    ]


def of_chat(body: dict[str, Any]) -> dict[str, Any]:
    """The same for a conversation, where logprobs have two parameters."""
    more = {"logprobs": True, "top_logprobs": 20} if "logprobs" in body else {}
    return {"messages": [SHORT]} | body | more


COMPLETIONS = [
    *texts("prompt", max_tokens=1),
    *generates(prompt="x"),
    {"prompt": [5] * 16_000, "max_tokens": 1, "echo": True, "logprobs": 20},
    {"prompt": [5] * 16_000, "max_tokens": 1, "prompt_logprobs": 20},
    {"prompt": [[5, 6]] * 256, "max_tokens": 2, "logprobs": 20},
    {"prompt": "x", "bad_words": ["x" * 200] * 64, "max_tokens": 1},
    {"prompt": "x", "structured_outputs": {"choice": TEXTS}, "max_tokens": 1},
    {"prompt": "x", "structured_outputs": {"regex": WORDS}, "max_tokens": 1},
    {"prompt": EMOJI[:100_000], "suffix": EMOJI[:100_000], "max_tokens": 1},
    {"prompt": "x", "response_format": WITH_ENUM},
]
CHATS = [
    *chats(max_tokens=1),
    *map(of_chat, generates()),
    {"messages": [SHORT], "response_format": {"type": "json_schema", "json_schema": STRICT}},
]
CHAT_BATCHES = [
    {"messages": [MESSAGES[:100]] * 100, "max_tokens": 1},
    {"messages": [PARTS], "max_tokens": 1},
]
LLAMACPP = [
    *texts("prompt", n_predict=1),
    {"prompt": "x", "n_predict": 100, "stream": True, "stop": STOPS, "n_probs": 20},
]
INFILL = [
    {"input_prefix": EMOJI, "input_suffix": EMOJI, "n_predict": 1},
    {"input_extra": [{"text": "x", "filename": "y"}] * 10_000},
]
TOKENIZE = [
    *texts("prompt", with_pieces=True, return_token_strs=True),
    *texts("content"),
    *chats(),
]
DETOKENIZE = [{"tokens": tokens} for tokens in (IDS[: 2**17], IDS, TEXTS)]
EMBEDDINGS = [*texts("input"), {"input": [[5] * 500] * 500}]
POOLING = [
    *EMBEDDINGS,
    *(
        {"input": [[5] * 8000], "pooling": "none", "encoding_format": kind, "embed_dtype": of}
        for kind, of in (("float", "float32"), ("base64", "fp8_e4m3"), ("bytes", "bfloat16"))
    ),
]
COHERE = [
    {"texts": MANY[:96], "embedding_types": ["float", "int8", "ubinary"]},
    {"texts": TEXTS},
]
RERANK = [
    {"query": "x", "documents": MANY[:1000]},
    {"query": EMOJI, "documents": MANY[:1000]},
    {"query": "x", "documents": TEXTS},
    {"query": "x", "documents": [EMOJI[:5000]] * 100},
]
SCORE = [
    {"text_1": "x", "text_2": MANY[:1000]},
    {"text_1": EMOJI, "text_2": EMOJI},
    {"text_1": MANY[:1000], "text_2": MANY[:1000]},
]
LABELS = [
    {"query": "x", "items": MANY[:1000], "label_token_ids": [5] * 128},
    {"query": IDS, "items": [IDS[:9]], "label_token_ids": [5]},
]
RESPONSES = [
    {"input": ITEMS, "max_output_tokens": 1},
    {"input": [ITEM | {"content": EMOJI}], "max_output_tokens": 1},
    {"input": WORDS},
    {"input": "x", "max_output_tokens": 1, "tools": [
        {"type": "function"} | one["function"] for one in TOOLS  # type: ignore[dict-item]
    ]},
    {"input": "x", "max_output_tokens": 200, "stream": True, "top_logprobs": 20,
     "ignore_eos": True, "stop": STOPS},
    {"input": ITEMS, "truncation": "auto", "max_output_tokens": 1},
    {"input": [{"role": 5}] * 2**14},
    {"input": "x", "background": True, "max_output_tokens": 200, "stream": True,
     "top_logprobs": 20, "ignore_eos": True},
    {"input": ITEMS, "background": True, "max_output_tokens": 1},
    {"input": "x", "max_output_tokens": 1, "text": {"format": {"type": "json_schema", **STRICT}}},
]  # fmt: skip
ANTHROPIC = [
    *chats(max_tokens=1)[:4],
    {"messages": [SHORT], "max_tokens": 1, "tools": ANTHROPIC_TOOLS},
    {"messages": [{"role": "user", "content": EMOJI}], "max_tokens": 1},
    {"messages": [SHORT], "system": WORDS, "max_tokens": 1},
    {"messages": [SHORT], "max_tokens": 100, "stream": True, "stop_sequences": STOPS},
    {"messages": [{"role": "user", "content": [TEXT_PART] * 20_000}], "max_tokens": 1},
    {
        "messages": [SHORT],
        "max_tokens": 1,
        "output_format": {"type": "json_schema", "schema": WIDE},
    },
]
GEMINI = [
    {"contents": [{"parts": [{"text": "x"}]}] * 2**14},
    {"contents": [{"parts": [{"text": "x"}] * 2**14}]},
    *({"contents": [{"parts": [{"text": text}]}]} for text in (EMOJI, WORDS)),
    {"contents": [{"parts": [{"functionCall": {"name": "f"}}] * 9000}]},
    {"contents": [{"parts": [{"text": "x"}]}], "tools": [{"functionDeclarations": [
        {"name": f"f{i}", "parameters": SCHEMA} for i in range(100)
    ]}]},
    {"contents": [{"parts": [{"text": "x"}]}], "generationConfig": {
        "candidateCount": 12, "maxOutputTokens": 100, "stopSequences": STOPS
    }},
    {"contents": [{"parts": [{"text": "x"}]}], "generationConfig": {
        "responseMimeType": "application/json", "responseSchema": WIDE
    }},
]  # fmt: skip
COUNT_TOKENS = [
    {name: one[name] for name in ("messages", "tools", "system") if name in one}
    for one in ANTHROPIC
]
ASKED = {"max_tokens": 1, "messages": [SHORT]}
MESSAGE_BATCHES = [
    {"requests": [{"custom_id": str(i), "params": params} for i in range(num)]}
    for num, params in (
        (6000, ASKED),
        (1, ASKED | {"messages": MESSAGES}),
        (10, ASKED | {"system": WORDS[:700_000]}),
    )
]
SGLANG = [
    *texts("text"),
    {"input_ids": IDS},
    {"text": "x", "sampling_params": {"max_new_tokens": 100, "n": 12, "stop": STOPS},
     "stream": True},
    {"text": ["x"] * 200, "return_logprob": True, "top_logprobs_num": 20,
     "sampling_params": {"max_new_tokens": 5}},
]  # fmt: skip
TINY: dict[str, Any] = {"model": "tiny"}
OLLAMA = [TINY | {"prompt": EMOJI}, TINY | {"prompt": WORDS}]
CACHES = [
    {"name": "n", "messages": MESSAGES},
    {"name": "n", "messages": PARTS},
    {"name": "n", "prompt": EMOJI},
]
CONVERSATIONS = [
    {"items": ITEMS},
    {"items": [{"role": "user", "content": [{"type": "input_text", "text": "x"}] * 20_000}]},
]
LINE = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 1}}
JSONL = b"".join(json.dumps({"custom_id": str(i)} | LINE).encode() + b"\n" for i in range(50_000))
BATCH = {
    "input_file_id": "{file_id}", "endpoint": "/v1/completions", "completion_window": "24h",
}  # fmt: skip
JUNK = [{"x": [{}] * 60_000}, {"x": IDS}, [[]] * 60_000, WORDS]
NOTHING: list[object] = [None]
EIGHT, SIXTEEN = [None] * 8, [None] * 16  # at once
BODIES: dict[str, list[Any]] = {
    "POST /v1/completions": COMPLETIONS,
    "POST /invocations": [*COMPLETIONS[:5], *CHATS[:4]],
    "POST /v1/chat/completions": CHATS,
    "POST /v1/chat/completions/batch": CHAT_BATCHES,
    "POST /v1/chat/completions/render": chats(),
    "POST /v1/chat/completions/input_tokens": chats(),
    "POST /apply-template": chats(),
    "POST /tokenize": TOKENIZE,
    "POST /v1/tokenize": texts("prompt"),
    "POST /detokenize": DETOKENIZE,
    "POST /v1/detokenize": DETOKENIZE[:1],
    "POST /completion": LLAMACPP,
    "POST /completions": LLAMACPP,
    "POST /infill": INFILL,
    "POST /embedding": texts("content"),
    "POST /embeddings": texts("content"),
    "POST /v1/embeddings": EMBEDDINGS,
    "POST /pooling": POOLING,
    "POST /classify": texts("input"),
    "POST /v2/embed": COHERE,
    "POST /rerank": RERANK,
    "POST /v1/rerank": RERANK,
    "POST /v2/rerank": RERANK,
    "POST /reranking": RERANK,
    "POST /v1/reranking": RERANK,
    "POST /score": SCORE,
    "POST /v1/score": SCORE,
    "POST /generative_scoring": LABELS,
    "POST /v1/responses": RESPONSES,
    "POST /v1/responses/input_tokens": RESPONSES[:4],
    "POST /v1/responses/{response_id}/cancel": EIGHT,
    **{
        f"POST {path}/{{name:path}}:{method}": GEMINI
        for path in ("/v1beta/models", "/v1/models")
        for method in ("generateContent", "streamGenerateContent", "countTokens")
    },
    "POST /v1/messages": ANTHROPIC,
    "POST /v1/messages/count_tokens": COUNT_TOKENS,
    "POST /v1/messages/batches": MESSAGE_BATCHES,
    "POST /v1/messages/batches/{batch_id}/cancel": NOTHING,
    "POST /generate": SGLANG,
    "POST /abort_request": [{"rid": "x"}, *JUNK],
    "POST /flush_cache": NOTHING,
    "POST /api/generate": [*OLLAMA, TINY | {"prompt": "x", "context": IDS}],
    "POST /api/chat": chats(**TINY),
    "POST /api/embed": texts("input", **TINY),
    "POST /api/embeddings": OLLAMA,
    **{f"POST /api/{name}": JUNK for name in ("copy", "create", "pull", "push", "show")},
    "DELETE /api/delete": JUNK,
    "POST /v1/conversations": CONVERSATIONS,
    "POST /v1/conversations/{conversation_id}": [
        {"metadata": {str(i): WORDS[:400_000] for i in range(16)}}
    ],
    "POST /v1/conversations/{conversation_id}/items": [{"items": [ITEM]}] * 16,
    "GET /v1/conversations/{conversation_id}/items": SIXTEEN,
    "GET /v1/conversations/{conversation_id}/items/{item_id}": SIXTEEN,
    "GET /v1/responses/{response_id}/input_items": SIXTEEN,
    "POST /v1/prompt_caches": CACHES,
    "POST /v1/prompt_caches/{name}": JUNK,
    "POST /v1/prompt_caches/{name}/fork": CACHES,
    "POST /v1/load_lora_adapter": JUNK,
    "POST /v1/unload_lora_adapter": JUNK,
    "POST /v1/files": [JSONL],
    "POST /v1/batches": [BATCH, *JUNK],
    "POST /v1/batches/{batch_id}/cancel": NOTHING,
    "POST /ping": JUNK,
    **{f"POST {path}": JUNK for path in ROUTES},
}
QUERIES = {
    "/v1/files": "?limit=10000",
    "/v1/conversations/{conversation_id}/items": "?limit=1",
    "/v1/messages/batches": "?limit=1000",
}
