"""The APIs that generate text: how each writes a neutral request, and how its responses are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

Body = dict[str, Any]
Field = str | Callable[[Any], Body]  # the path of a value in the body, or what it adds to the body


@dataclass
class Answer:
    """One output of a response. `reason`: stop, length or calls."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    reason: str | None = None
    logprobs: list[float] = field(default_factory=list)
    top: list[list[float]] = field(default_factory=list)


@dataclass
class Reply:
    """What a response says, whole or streamed. None: the API does not tell it."""

    answers: list[Answer]
    num_prompt: int | None = None
    num_output: int | None = None
    num_cached: int | None = None
    num_reasoning: int | None = None

    @property
    def text(self) -> str:
        (answer,) = self.answers
        return answer.text

    @property
    def answer(self) -> Answer:
        (answer,) = self.answers
        return answer


# ---- why a feature is not in an API


@dataclass(frozen=True)
class Refused:
    """400, and the message names the field."""

    field: str


@dataclass(frozen=True)
class Ignored:
    """The answer is as without the field, and a header names it."""

    field: str


@dataclass(frozen=True)
class AsText:
    """It is part of the text, as the model wrote it."""


@dataclass(frozen=True)
class Untold:
    """No field of a response has this in its name."""

    word: str


Lack = Refused | Ignored | AsText | Untold


# ---- the APIs


class Dialect:
    name: ClassVar[str]
    path: ClassVar[str]
    fields: ClassVar[dict[str, Field]] = {}  # by neutral name; others keep their name
    always: ClassVar[Body] = {}
    lacks: ClassVar[dict[str, Lack]] = {}

    def prompt(self, prompt: Any) -> Body:
        """The prompt, or the list of prompts, as the body has it."""
        raise NotImplementedError

    def request(self, ask: Body) -> tuple[str, Body]:
        """The path, and the neutral request as this API writes it."""
        body = {"model": "tiny"} | self.always | self.prompt(ask["prompt"])
        for name, value in ask.items():
            if name == "prompt":
                continue
            how = self.fields.get(name, name)
            merge(body, nested(how, value) if isinstance(how, str) else how(value))
        return self.path, body

    def whole(self, body: Any) -> Reply:
        raise NotImplementedError

    def streamed(self, events: list[Any]) -> Reply:
        raise NotImplementedError

    def refusal(self, body: Any) -> str:
        """The message of a response that is an error, or of an event that is one."""
        message: str = body["error"]["message"]
        return message

    def is_refusal(self, event: Any) -> bool:
        return "error" in event


def nested(path: str, value: Any) -> Body:
    for name in reversed(path.split(".")):
        value = {name: value}
    made: Body = value
    return made


def merge(body: Body, more: Body) -> None:
    for name, value in more.items():
        if isinstance(value, dict) and isinstance(body.get(name), dict):
            body[name] = dict(body[name])
            merge(body[name], value)
        else:
            body[name] = value


def one_turn(prompt: str) -> Body:
    return {"messages": [{"role": "user", "content": prompt}]}


def schema_format(schema: Body) -> Body:
    return {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema},
        }
    }


def with_usage(is_streamed: bool) -> Body:
    """A stream tells the usage only to who asks."""
    return (
        {"stream": True, "stream_options": {"include_usage": True}}
        if is_streamed
        else {"stream": False}
    )


# Where a prompt is only continued.
NO_CHAT: dict[str, Lack] = {
    "tools": Refused("tools"),
    "parallel tools": Refused("tools"),
    "one tool": Refused("tools"),
    "forced tool": Refused("tools"),
    "reasoning": AsText(),
    "reasoning on or off": Refused("chat_template_kwargs"),
    "reasoning budget": Refused("thinking_token_budget"),
}
OPENAI_REASONS = {"stop": "stop", "length": "length", "tool_calls": "calls", None: None}


def openai_usage(reply: Reply, usage: Body | None) -> Reply:
    assert usage is not None, "there is no usage"
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    reply.num_prompt, reply.num_output = usage["prompt_tokens"], usage["completion_tokens"]
    reply.num_cached = usage["prompt_tokens_details"]["cached_tokens"]
    reply.num_reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    return reply


class OpenAIChat(Dialect):
    name, path = "chat", "/v1/chat/completions"
    fields: ClassVar[dict[str, Field]] = {
        "schema": schema_format,
        "stream": with_usage,
        "thinking": lambda thinks: {"chat_template_kwargs": {"enable_thinking": thinks}},
        "one_tool": lambda one: {"parallel_tool_calls": not one},
        "forced_tool": lambda name: {
            "tool_choice": {"type": "function", "function": {"name": name}} if name else "required"
        },
        "top_logprobs": lambda num: {"logprobs": True, "top_logprobs": num},
    }
    lacks: ClassVar[dict[str, Lack]] = {"several prompts": Refused("messages")}

    def prompt(self, prompt: Any) -> Body:
        return (
            one_turn(prompt)
            if isinstance(prompt, str)
            else {"messages": [one_turn(one)["messages"] for one in prompt]}
        )

    def whole(self, body: Any) -> Reply:
        answers = [self._answer(choice, choice["message"]) for choice in body["choices"]]
        return openai_usage(Reply(answers), body["usage"])

    def _answer(self, choice: Body, message: Body) -> Answer:
        calls = [
            (call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in message.get("tool_calls") or ()
        ]
        entries = (choice.get("logprobs") or {}).get("content") or []
        assert message.get("reasoning") == message.get("reasoning_content")  # vLLM's name of it
        return Answer(
            message.get("content") or "",
            message.get("reasoning_content") or "",
            calls,
            OPENAI_REASONS[choice["finish_reason"]],
            [entry["logprob"] for entry in entries],
            [[top["logprob"] for top in entry["top_logprobs"]] for entry in entries],
        )

    def streamed(self, events: list[Any]) -> Reply:
        choices: dict[int, Body] = {}
        for event in events:
            for part in event["choices"]:
                choice = choices.setdefault(
                    part["index"],
                    {"message": {}, "logprobs": {"content": []}, "finish_reason": None},
                )
                self._add(choice["message"], part["delta"])
                choice["logprobs"]["content"] += (part.get("logprobs") or {}).get("content") or []
                choice["finish_reason"] = part["finish_reason"] or choice["finish_reason"]
        answers = [self._answer(choices[i], choices[i]["message"]) for i in sorted(choices)]
        return openai_usage(Reply(answers), events[-1]["usage"])

    def _add(self, message: Body, delta: Body) -> None:
        for name in ("content", "reasoning", "reasoning_content"):
            message[name] = message.get(name, "") + (delta.get(name) or "")
        calls = message.setdefault("tool_calls", [])
        for part in delta.get("tool_calls") or ():
            if part["index"] == len(calls):
                calls.append({"function": {"name": part["function"]["name"], "arguments": ""}})
            calls[part["index"]]["function"]["arguments"] += part["function"].get("arguments") or ""


class OpenAICompletions(Dialect):
    name, path = "completions", "/v1/completions"
    lacks = NO_CHAT
    fields: ClassVar[dict[str, Field]] = {
        "schema": schema_format,
        "stream": with_usage,
        "thinking": lambda thinks: {"chat_template_kwargs": {"enable_thinking": thinks}},
        "one_tool": lambda one: {"parallel_tool_calls": not one},
        "forced_tool": lambda name: {
            "tool_choice": {"type": "function", "function": {"name": name}} if name else "required"
        },
        "top_logprobs": "logprobs",
    }

    def prompt(self, prompt: Any) -> Body:
        return {"prompt": prompt}

    def whole(self, body: Any) -> Reply:
        return openai_usage(
            Reply([self._answer([choice]) for choice in body["choices"]]), body["usage"]
        )

    def _answer(self, parts: list[Body]) -> Answer:
        told = [part["logprobs"] for part in parts if part.get("logprobs")]
        return Answer(
            "".join(part["text"] for part in parts),
            reason=OPENAI_REASONS[parts[-1]["finish_reason"]],
            logprobs=[value for one in told for value in one["token_logprobs"]],
            top=[
                sorted(tops.values(), reverse=True) for one in told for tops in one["top_logprobs"]
            ],
        )

    def streamed(self, events: list[Any]) -> Reply:
        parts: dict[int, list[Body]] = {}
        for event in events:
            for part in event["choices"]:
                parts.setdefault(part["index"], []).append(part)
        return openai_usage(
            Reply([self._answer(parts[i]) for i in sorted(parts)]), events[-1]["usage"]
        )


class Responses(Dialect):
    name, path = "responses", "/v1/responses"
    fields: ClassVar[dict[str, Field]] = {
        "max_tokens": "max_output_tokens",
        "schema": lambda schema: {
            "text": {"format": {"type": "json_schema", "name": "answer", "schema": schema}}
        },
        "tools": lambda tools: {
            "tools": [{"type": "function", **tool["function"]} for tool in tools]
        },
        "thinking": lambda thinks: {"reasoning": {"effort": "medium" if thinks else "none"}},
        "one_tool": lambda one: {"parallel_tool_calls": not one},
        "forced_tool": lambda name: {
            "tool_choice": {"type": "function", "name": name} if name else "required"
        },
    }
    lacks: ClassVar[dict[str, Lack]] = {
        "n": Refused("n"),
        "several prompts": Refused("input"),
        "reasoning budget": Refused("thinking_token_budget"),
        "prompt cache": Refused("prompt_cache"),
        "deadline": Refused("timeout"),
    }

    def prompt(self, prompt: Any) -> Body:
        return {"input": prompt}

    def whole(self, body: Any) -> Reply:
        answer = Answer()
        for item in body["output"]:
            if item["type"] == "message":
                answer.text += "".join(part["text"] for part in item["content"])
                answer.logprobs += [
                    entry["logprob"] for part in item["content"] for entry in part["logprobs"]
                ]
                answer.top += [
                    [top["logprob"] for top in entry["top_logprobs"]]
                    for part in item["content"]
                    for entry in part["logprobs"]
                ]
            elif item["type"] == "reasoning":
                answer.reasoning += "".join(part["text"] for part in item["content"])
            else:
                answer.calls.append((item["name"], json.loads(item["arguments"])))
        return self._told(answer, body)

    def _told(self, answer: Answer, body: Body) -> Reply:
        is_cut = (
            body["status"] == "incomplete"
            and body["incomplete_details"]["reason"] == "max_output_tokens"
        )
        assert is_cut or body["status"] == "completed"
        answer.reason = "length" if is_cut else "calls" if answer.calls else "stop"
        usage = body["usage"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        cached, thought = (
            usage["input_tokens_details"]["cached_tokens"],
            usage["output_tokens_details"]["reasoning_tokens"],
        )
        return Reply([answer], usage["input_tokens"], usage["output_tokens"], cached, thought)

    def streamed(self, events: list[Any]) -> Reply:
        """From the deltas; the last event has the whole response, which says the same."""
        answer, names, arguments = Answer(), [], []
        for event in events:
            kind = event["type"].removeprefix("response.")
            if kind == "output_text.delta":
                answer.text += event["delta"]
                answer.logprobs += [entry["logprob"] for entry in event["logprobs"]]
                answer.top += [
                    [top["logprob"] for top in entry["top_logprobs"]] for entry in event["logprobs"]
                ]
            elif kind == "reasoning_text.delta":
                answer.reasoning += event["delta"]
            elif kind == "output_item.added" and event["item"]["type"] == "function_call":
                names.append(event["item"]["name"])
                arguments.append("")
            elif kind == "function_call_arguments.delta":
                arguments[-1] += event["delta"]
        answer.calls = [
            (name, json.loads(text)) for name, text in zip(names, arguments, strict=True)
        ]
        last = events[-1]["response"]
        reply, told = self._told(answer, last), self.whole(last)
        assert reply == told
        return reply

    def is_refusal(self, event: Any) -> bool:
        return event["type"] in ("error", "response.failed")

    def refusal(self, body: Any) -> str:
        if body.get("type") == "response.failed":
            body = body["response"]
        message: str = body["message"] if body.get("type") == "error" else body["error"]["message"]
        return message


class AnthropicMessages(Dialect):
    name, path = "messages", "/v1/messages"
    always: ClassVar[Body] = {"max_tokens": 50}
    fields: ClassVar[dict[str, Field]] = {
        "stop": "stop_sequences",
        "schema": lambda schema: {
            "output_config": {"format": {"type": "json_schema", "schema": schema}}
        },
        "tools": lambda tools: {
            "tools": [
                {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]}
                for tool in tools
            ]
        },
        "thinking": lambda thinks: {"thinking": {"type": "adaptive" if thinks else "disabled"}},
        "thinking_token_budget": lambda num: {
            "thinking": {"type": "enabled", "budget_tokens": num}
        },
        "one_tool": lambda one: {"tool_choice": {"type": "auto", "disable_parallel_tool_use": one}},
        "forced_tool": lambda name: {
            "tool_choice": {"type": "tool", "name": name} if name else {"type": "any"}
        },
    }
    lacks: ClassVar[dict[str, Lack]] = {
        "prompt cache": Refused("prompt_cache"),
        "deadline": Refused("timeout"),
        "logprobs": Refused("top_logprobs"),
        "n": Refused("n"),
        "seed": Refused("seed"),
        "several prompts": Refused("messages"),
    }
    prompt = OpenAIChat.prompt
    _REASONS: ClassVar = {
        "end_turn": "stop",
        "stop_sequence": "stop",
        "max_tokens": "length",
        "tool_use": "calls",
    }

    def whole(self, body: Any) -> Reply:
        answer = Answer(reason=self._REASONS[body["stop_reason"]])
        assert bool(body["stop_sequence"]) == (body["stop_reason"] == "stop_sequence")
        for block in body["content"]:
            if block["type"] == "text":
                answer.text += block["text"]
            elif block["type"] == "thinking":
                answer.reasoning += block["thinking"]
            else:
                answer.calls.append((block["name"], block["input"]))
        return self._with_usage(answer, body["usage"])

    def _with_usage(self, answer: Answer, usage: Body) -> Reply:
        cached, thought = (
            usage["cache_read_input_tokens"],
            usage["output_tokens_details"]["thinking_tokens"],
        )
        num_prompt = usage["input_tokens"] + cached + usage["cache_creation_input_tokens"]
        return Reply([answer], num_prompt, usage["output_tokens"], cached, thought)

    def streamed(self, events: list[Any]) -> Reply:
        blocks: list[Body] = []
        usage = dict(events[0]["message"]["usage"])
        ending: Body = {}
        for event in events:
            if event["type"] == "content_block_start":
                blocks.append(event["content_block"] | {"partial": ""})
            elif event["type"] == "content_block_delta":
                delta, block = event["delta"], blocks[event["index"]]
                for name in ("text", "thinking"):
                    block[name] = block.get(name, "") + delta.get(name, "")
                block["partial"] += delta.get("partial_json", "")
            elif event["type"] == "message_delta":
                ending = event["delta"]
                usage |= event["usage"]
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = json.loads(block["partial"] or "{}")
        return self.whole({"content": blocks, "usage": usage, **ending})

    def refusal(self, body: Any) -> str:
        assert body["type"] == "error"
        return super().refusal(body)


class OllamaChat(Dialect):
    name, path = "ollama chat", "/api/chat"
    always: ClassVar[Body] = {"stream": False}
    fields: ClassVar[dict[str, Field]] = {
        "max_tokens": "options.num_predict",
        "stop": "options.stop",
        "seed": "options.seed",
        "temperature": "options.temperature",
        "schema": "format",
        "top_logprobs": lambda num: {"logprobs": True, "top_logprobs": num},
        "thinking": "think",
    }
    lacks: ClassVar[dict[str, Lack]] = {
        "n": Ignored("n"),
        "several prompts": Refused("messages"),
        "one tool": Ignored("parallel_tool_calls"),
        "forced tool": Ignored("tool_choice"),
        "reasoning budget": Ignored("thinking_token_budget"),
        "prefix cache": Untold("cache"),
        "cache salt": Ignored("cache_salt"),
        "prompt cache": Ignored("prompt_cache"),
        "deadline": Ignored("timeout"),
    }
    prompt = OpenAIChat.prompt

    def whole(self, body: Any) -> Reply:
        return self.streamed([body])

    def streamed(self, events: list[Any]) -> Reply:
        answer, last = Answer(), events[-1]
        for event in events:
            assert event["done"] == (event is last)
            message = self._message(event)
            answer.text += message.get("content") or ""
            answer.reasoning += message.get("thinking") or ""
            answer.calls += [
                (call["function"]["name"], call["function"]["arguments"])
                for call in message.get("tool_calls") or ()
            ]
            answer.logprobs += [entry["logprob"] for entry in event.get("logprobs") or ()]
            answer.top += [
                [top["logprob"] for top in entry["top_logprobs"]]
                for entry in event.get("logprobs") or ()
            ]
        answer.reason = "calls" if answer.calls else last["done_reason"]
        return Reply([answer], last["prompt_eval_count"], last["eval_count"])

    def _message(self, event: Body) -> Body:
        message: Body = event["message"]
        return message

    def refusal(self, body: Any) -> str:
        message: str = body["error"]
        return message


class OllamaGenerate(OllamaChat):
    name, path = "ollama generate", "/api/generate"
    lacks: ClassVar[dict[str, Lack]] = OllamaChat.lacks | {
        "several prompts": Refused("prompt"),
        "tools": Ignored("tools"),
        "parallel tools": Ignored("tools"),
        "one tool": Ignored("tools"),
        "forced tool": Ignored("tools"),
    }

    def prompt(self, prompt: Any) -> Body:
        return {"prompt": prompt}

    def _message(self, event: Body) -> Body:
        return {"content": event["response"], "thinking": event.get("thinking")}


class LlamaCppCompletion(Dialect):
    name, path = "completion", "/completion"
    always: ClassVar[Body] = {"n_predict": 50}
    fields: ClassVar[dict[str, Field]] = {
        "max_tokens": "n_predict",
        "schema": "json_schema",
        "top_logprobs": "n_probs",
    }
    lacks: ClassVar[dict[str, Lack]] = NO_CHAT | {
        "n": Refused("n"),
        "cache salt": Refused("cache_salt"),
        "prompt cache": Refused("prompt_cache"),
        "deadline": Refused("timeout"),
    }

    def prompt(self, prompt: Any) -> Body:
        return {"prompt": prompt}

    def whole(self, body: Any) -> Reply:
        parts = body if isinstance(body, list) else [body]
        return self._reply([[part] for part in parts])

    def streamed(self, events: list[Any]) -> Reply:
        parts: dict[int, list[Body]] = {}
        for event in events:
            parts.setdefault(event["index"], []).append(event)
        return self._reply([parts[i] for i in sorted(parts)])

    def _reply(self, sequences: list[list[Body]]) -> Reply:
        lasts = [parts[-1] for parts in sequences]
        assert all(last["stop"] for last in lasts)
        num_prompt = sum(last["tokens_evaluated"] for last in lasts)
        num_output = sum(last["tokens_predicted"] for last in lasts)
        cached = sum(last["timings"]["cache_n"] for last in lasts)
        return Reply([self._answer(parts) for parts in sequences], num_prompt, num_output, cached)

    def _answer(self, parts: list[Body]) -> Answer:
        entries = [entry for part in parts for entry in part.get("completion_probabilities", ())]
        return Answer(
            "".join(part["content"] for part in parts),
            reason={"limit": "length", "eos": "stop", "word": "stop"}[parts[-1]["stop_type"]],
            logprobs=[entry["logprob"] for entry in entries],
            top=[[top["logprob"] for top in entry["top_logprobs"]] for entry in entries],
        )


class LlamaCppInfill(LlamaCppCompletion):
    name, path = "infill", "/infill"
    lacks: ClassVar[dict[str, Lack]] = LlamaCppCompletion.lacks | {
        "several prompts": Refused("prompt")
    }

    def prompt(self, prompt: Any) -> Body:
        return {"input_prefix": "", "input_suffix": "", "prompt": prompt}


class SGLangGenerate(Dialect):
    name, path = "generate", "/generate"
    fields: ClassVar[dict[str, Field]] = {
        "max_tokens": "sampling_params.max_new_tokens",
        "temperature": "sampling_params.temperature",
        "n": "sampling_params.n",
        "stop": "sampling_params.stop",
        "seed": "sampling_params.sampling_seed",
        "schema": "sampling_params.json_schema",
        "top_logprobs": lambda num: {"return_logprob": True, "top_logprobs_num": num},
        "cache_salt": "extra_key",
    }
    lacks: ClassVar[dict[str, Lack]] = NO_CHAT | {
        "prompt cache": Refused("prompt_cache"),
        "deadline": Refused("timeout"),
    }

    def prompt(self, prompt: Any) -> Body:
        return {"input_ids" if isinstance(prompt[0], list) else "text": prompt}

    def whole(self, body: Any) -> Reply:
        parts = body if isinstance(body, list) else [body]
        metas = [part["meta_info"] for part in parts]
        total = {
            name: sum(meta[f"{name}_tokens"] for meta in metas)
            for name in ("prompt", "completion", "cached")
        }
        return Reply([self._answer(part) for part in parts], *total.values())

    def streamed(self, events: list[Any]) -> Reply:
        """Each event has the whole output so far."""
        latest: dict[int, Body] = {}
        for event in events:
            latest[event.get("index", 0)] = event
        return self.whole([latest[i] for i in sorted(latest)])

    def _answer(self, part: Body) -> Answer:
        meta = part["meta_info"]
        return Answer(
            part["text"],
            reason=meta["finish_reason"]["type"],
            logprobs=[cell[0] for cell in meta.get("output_token_logprobs", ())],
            top=[[cell[0] for cell in cells] for cells in meta.get("output_top_logprobs", ())],
        )


def json_schema_in_capitals(schema: Any) -> Any:
    """As Google's clients write types."""
    if isinstance(schema, dict):
        converted = {name: json_schema_in_capitals(value) for name, value in schema.items()}
        if isinstance(schema.get("type"), str):
            converted["type"] = schema["type"].upper()
        return converted
    return schema


class Gemini(Dialect):
    name, path = "gemini", "/v1beta/models/{model}:generateContent"
    fields: ClassVar[dict[str, Field]] = {
        "max_tokens": "generationConfig.maxOutputTokens",
        "temperature": "generationConfig.temperature",
        "stop": "generationConfig.stopSequences",
        "seed": "generationConfig.seed",
        "n": "generationConfig.candidateCount",
        "schema": lambda schema: {
            "generationConfig": {
                "responseMimeType": "application/json",
                "responseJsonSchema": schema,
            }
        },
        "top_logprobs": lambda num: {
            "generationConfig": {"responseLogprobs": True, "logprobs": num}
        },
        "one_tool": "parallel_tool_calls",
        "tools": lambda tools: {
            "tools": [
                {
                    "functionDeclarations": [
                        tool["function"]
                        | {"parameters": json_schema_in_capitals(tool["function"]["parameters"])}
                        for tool in tools
                    ]
                }
            ]
        },
        "forced_tool": lambda name: {
            "toolConfig": {
                "functionCallingConfig": {"mode": "ANY"}
                | ({"allowedFunctionNames": [name]} if name else {})
            }
        },
        "thinking": lambda thinks: {
            "generationConfig": {"thinkingConfig": {"thinkingBudget": -1 if thinks else 0}}
        },
        "thinking_token_budget": lambda num: {
            "generationConfig": {"thinkingConfig": {"thinkingBudget": num}}
        },
    }
    always: ClassVar[Body] = {"generationConfig": {"thinkingConfig": {"includeThoughts": True}}}
    lacks: ClassVar[dict[str, Lack]] = {
        "several prompts": Refused("contents"),
        "one tool": Refused("parallel_tool_calls"),
        "cache salt": Refused("cache_salt"),
        "prompt cache": Refused("prompt_cache"),
        "deadline": Refused("timeout"),
    }

    def request(self, ask: Body) -> tuple[str, Body]:
        _, body = super().request(ask)
        method = "streamGenerateContent?alt=sse" if body.pop("stream", False) else "generateContent"
        return f"/v1beta/models/{body.pop('model')}:{method}", body

    def prompt(self, prompt: Any) -> Body:
        prompts = [prompt] if isinstance(prompt, str) else prompt
        contents = [{"role": "user", "parts": [{"text": one}]} for one in prompts]
        return {"contents": contents if isinstance(prompt, str) else [contents]}

    def whole(self, body: Any) -> Reply:
        return self.streamed([body])

    def streamed(self, events: list[Any]) -> Reply:
        answers: dict[int, Answer] = {}
        for event in events:
            for candidate in event["candidates"]:
                answer = answers.setdefault(candidate["index"], Answer())
                self._add(answer, candidate)
        usage = events[-1]["usageMetadata"]
        num_thought, num_prompt = usage["thoughtsTokenCount"], usage["promptTokenCount"]
        num_output = usage["candidatesTokenCount"] + num_thought
        assert usage["totalTokenCount"] == num_prompt + num_output
        cached = usage["cachedContentTokenCount"]
        several = [answers[i] for i in sorted(answers)]
        return Reply(several, num_prompt, num_output, cached, num_thought)

    def _add(self, answer: Answer, candidate: Body) -> None:
        for part in candidate["content"]["parts"]:
            if "functionCall" in part:
                answer.calls.append((part["functionCall"]["name"], part["functionCall"]["args"]))
            elif part.get("thought"):
                answer.reasoning += part["text"]
            else:
                answer.text += part["text"]
        told = candidate.get("logprobsResult", {"chosenCandidates": [], "topCandidates": []})
        answer.logprobs += [cell["logProbability"] for cell in told["chosenCandidates"]]
        answer.top += [
            [cell["logProbability"] for cell in top["candidates"]] for top in told["topCandidates"]
        ]
        if reason := candidate.get("finishReason"):
            answer.reason = {"STOP": "stop", "MAX_TOKENS": "length"}[reason]
            if answer.reason == "stop" and answer.calls:
                answer.reason = "calls"

    def refusal(self, body: Any) -> str:
        assert body["error"]["status"].isupper()
        return super().refusal(body)


DIALECTS: list[Dialect] = [
    OpenAIChat(), OpenAICompletions(), Responses(), AnthropicMessages(), OllamaChat(), OllamaGenerate(), LlamaCppCompletion(),
    LlamaCppInfill(), SGLangGenerate(), Gemini(),
]  # fmt: skip
