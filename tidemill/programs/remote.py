"""A Tidemill server as a backend. Requests are sent with token ids, so that the server finds the
very tokens it has computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidemill.client import AsyncClient
from tidemill.programs.backend import Backend, Generated, OnText, Scored, Token
from tidemill.programs.expressions import Gen


class Remote(Backend):
    """A server. `model` names one of several that it has; without a key, the first of
    TIDEMILL_API_KEY is sent."""

    def __init__(self, url: str, model: str | None = None, api_key: str | None = None) -> None:
        super().__init__()
        self._model = {"model": model} if model else {}
        self._client = AsyncClient(url, api_key)

    async def encode(self, texts: Sequence[str], at_start: bool = False) -> list[list[int]]:
        response = await self._post(
            "/tokenize", {"prompt": list(texts), "add_special_tokens": at_start}
        )
        tokens: list[list[int]] = response["tokens"]
        return tokens

    async def encode_chat(self, messages: list[dict[str, str]]) -> list[Token]:
        response = await self._post("/tokenize", {"messages": messages, "with_pieces": True})
        return [
            Token(
                token["id"],
                token["piece"].encode()
                if isinstance(token["piece"], str)
                else bytes(token["piece"]),
            )
            for token in response["tokens"]
        ]

    async def decode(self, token_ids: list[int]) -> str:
        response = await self._post(
            "/detokenize", {"tokens": token_ids, "skip_special_tokens": True}
        )
        return str(response["text"])

    async def generate(
        self, token_ids: list[int], gen: Gen, salt: str, on_text: OnText
    ) -> Generated:
        body = gen.given | {
            "prompt": token_ids,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body |= {"return_token_ids": True} | ({"cache_salt": salt} if salt else {})
        generated = Generated([], "", "", None, 0)
        texts = []
        async with self._client.stream("/v1/completions", body | self._model) as chunks:
            async for chunk in chunks:
                usage = chunk.get("usage")
                if usage:
                    generated.num_cached = (usage.get("prompt_tokens_details") or {}).get(
                        "cached_tokens"
                    ) or 0
                for choice in chunk.get("choices") or ():
                    generated.token_ids += choice.get("token_ids") or ()
                    generated.finish_reason = choice.get("finish_reason") or generated.finish_reason
                    generated.stop = choice.get("matched_stop", generated.stop)
                    if choice["text"]:
                        texts.append(choice["text"])
                        on_text(choice["text"])
        generated.text = "".join(texts)
        return generated

    async def score(self, prompts: list[list[int]], start: int, salts: list[str]) -> list[Scored]:
        body: dict[str, Any] = {
            "input_ids": prompts,
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
        }
        body |= {"return_logprob": True, "logprob_start_len": start} | (
            {"extra_key": salts} if any(salts) else {}
        )
        metas = [result["meta_info"] for result in await self._post("/generate", body, list)]
        return [
            Scored([cell[0] for cell in meta["input_token_logprobs"]], meta["cached_tokens"])
            for meta in metas
        ]

    async def _post(self, path: str, body: dict[str, Any], kind: type = dict) -> Any:
        return await self._client.json("POST", path, body | self._model, kind)
