"""A Tidemill server as a backend. Requests are sent with token ids, so that the server finds the very tokens it has computed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from tidemill.errors import ContextTooLong, InvalidRequest, TidemillError
from tidemill.programs.backend import Backend, Generated, OnText, Scored, Token
from tidemill.programs.expressions import Gen

_TIMEOUT_S = 600.0  # between two pieces of a response
_ERROR_CHARS = 500
_CODES = {cls.code: cls for cls in (ContextTooLong,)}


class Remote(Backend):
    """`model`: of several that the server has. Its address may end with /v1."""

    def __init__(self, url: str, model: str | None = None, api_key: str | None = None) -> None:
        super().__init__()
        self.url = url.rstrip("/").removesuffix("/v1")
        self._model = {"model": model} if model else {}
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx.AsyncClient(headers=headers, timeout=httpx.Timeout(_TIMEOUT_S, connect=10), limits=limits)

    async def encode(self, texts: Sequence[str], at_start: bool = False) -> list[list[int]]:
        made = await self._post("/tokenize", {"prompt": list(texts), "add_special_tokens": at_start})
        tokens: list[list[int]] = made["tokens"]
        return tokens

    async def encode_chat(self, messages: list[dict[str, str]]) -> list[Token]:
        made = await self._post("/tokenize", {"messages": messages, "with_pieces": True})
        return [
            Token(one["id"], one["piece"].encode() if isinstance(one["piece"], str) else bytes(one["piece"]))
            for one in made["tokens"]
        ]

    async def decode(self, token_ids: list[int]) -> str:
        made = await self._post("/detokenize", {"tokens": token_ids, "skip_special_tokens": True})
        return str(made["text"])

    async def generate(self, token_ids: list[int], gen: Gen, salt: str, on_text: OnText) -> Generated:
        body = gen.given | {"prompt": token_ids, "stream": True, "stream_options": {"include_usage": True}}
        body |= {"return_token_ids": True} | ({"cache_salt": salt} if salt else {})
        made = Generated([], "", "", None, 0)
        texts = []
        async with self._request("/v1/completions", body) as reply:
            async for chunk in _chunks(reply):
                usage = chunk.get("usage")
                if usage:
                    made.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                for choice in chunk.get("choices") or ():
                    made.token_ids += choice.get("token_ids") or ()
                    made.finish_reason = choice.get("finish_reason") or made.finish_reason
                    made.stop = choice.get("matched_stop", made.stop)
                    if choice["text"]:
                        texts.append(choice["text"])
                        on_text(choice["text"])
        if not made.finish_reason:
            raise TidemillError(f"{self.url} ended a response before it was complete.", fix="Check the server's log.")
        made.text = "".join(texts)
        return made

    async def score(self, prompts: list[list[int]], start: int, salts: list[str]) -> list[Scored]:
        body: dict[str, Any] = {"input_ids": prompts, "sampling_params": {"max_new_tokens": 0, "temperature": 0}}
        body |= {"return_logprob": True, "logprob_start_len": start} | ({"extra_key": salts} if any(salts) else {})
        made = [one["meta_info"] for one in await self._post("/generate", body)]
        return [Scored([cell[0] for cell in meta["input_token_logprobs"]], meta["cached_tokens"]) for meta in made]

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        async with self._request(path, body) as reply:
            data = await reply.aread()
        try:
            return json.loads(data)
        except ValueError:
            raise TidemillError(f"{self.url}{path} does not send JSON.", fix="Check the address of the server.") from None

    @asynccontextmanager
    async def _request(self, path: str, body: dict[str, Any]) -> AsyncIterator[httpx.Response]:
        """Leaving it early closes the connection, which ends the request in the server."""
        try:
            async with self._client.stream("POST", self.url + path, json=body | self._model) as reply:
                if reply.status_code != 200:
                    raise _refusal(reply.status_code, (await reply.aread()).decode(errors="replace"))
                yield reply
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            what = f"{self.url} does not respond: {str(error) or type(error).__name__}."
            raise TidemillError(what, fix="Check that the server runs, and its address.") from error


async def _chunks(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Server-sent events; lines end with a newline only, whatever else Unicode takes for one."""
    rest = b""
    async for part in reply.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and not line.strip().endswith(b"[DONE]"):
                chunk = json.loads(line[5:])
                if chunk.get("error"):
                    raise _refusal(400, line[5:].decode())
                yield chunk


def _refusal(status: int, body: str) -> TidemillError:
    try:
        error = json.loads(body)["error"]
        message, param, code = error["message"], error.get("param"), error.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, param, code = body, None, None
    kind = _CODES.get(code) or (InvalidRequest if 400 <= status < 500 else TidemillError)
    return kind(f"The server refuses it ({status}): {str(message)[:_ERROR_CHARS]}", param=param)
