"""The engine of this process as a backend: the requests of all states are steps of one batch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidemill.programs.backend import Backend, Generated, OnText, Scored, Token
from tidemill.programs.expressions import Gen
from tidemill.types.sampling import SamplingParams

if TYPE_CHECKING:
    from tidemill.engine.llm import LLM
    from tidemill.engine.llm_outputs import RequestOutput


@dataclass(slots=True)
class _Waiting:
    output: RequestOutput
    done: asyncio.Future[None]
    on_text: OnText | None
    num_given: int = 0  # characters

    def tell(self) -> None:
        """Tells the results of the last step."""
        text = self.output.samples[0].text
        if self.on_text is not None and len(text) > self.num_given:
            self.on_text(text[self.num_given :])
            self.num_given = len(text)
        if self.output.finished and not self.done.done():
            self.done.set_result(None)


class Local(Backend):
    """While a program runs, the LLM is used by its thread and must not be called from another."""

    def __init__(self, llm: LLM) -> None:
        super().__init__()
        self._llm = llm
        self._waiting: dict[str, _Waiting] = {}
        self._driver: asyncio.Task[None] | None = None

    async def encode(self, texts: Sequence[str], at_start: bool = False) -> list[list[int]]:
        tokenizer, most = self._llm.tokenizer, self._llm.config.max_context
        return [tokenizer.encode(text, add_special=at_start, max_tokens=most) for text in texts]

    async def encode_chat(self, messages: list[dict[str, str]]) -> list[Token]:
        tokenizer = self._llm.tokenizer
        ids = tokenizer.encode_chat(messages, max_tokens=self._llm.config.max_context)
        return [Token(token, tokenizer.token_bytes(token)) for token in ids]

    async def decode(self, token_ids: list[int]) -> str:
        return self._llm.tokenizer.decode(token_ids)

    async def generate(
        self, token_ids: list[int], gen: Gen, salt: str, on_text: OnText
    ) -> Generated:
        output = await self._run(token_ids, gen.params, salt, on_text)
        sample = output.outputs[0]
        return Generated(
            sample.token_ids,
            sample.text,
            sample.finish_reason or "",
            sample.stop_reason,
            output.num_cached,
        )

    async def score(self, prompts: list[list[int]], start: int, salts: list[str]) -> list[Scored]:
        params = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, prompt_logprobs_start=start
        )
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._run(ids, params, salt, None))
                for ids, salt in zip(prompts, salts, strict=True)
            ]
        outputs = [task.result() for task in tasks]
        return [
            Scored(
                [entry.logprob for entry in output.prompt_logprobs or () if entry],
                output.num_cached,
            )
            for output in outputs
        ]

    async def _run(
        self, token_ids: list[int], params: SamplingParams, salt: str, on_text: OnText | None
    ) -> RequestOutput:
        request_id, output = self._llm.submit(token_ids, params, salt=salt)
        waiting = self._waiting[request_id] = _Waiting(output, self.loop.create_future(), on_text)
        if self._driver is None or self._driver.done():
            self._driver = self.loop.create_task(self._drive())
        try:
            await waiting.done
        finally:
            del self._waiting[request_id]
            self._llm.abandon(request_id)
        if output.error is not None:
            raise output.error
        return output

    async def _drive(self) -> None:
        """Steps, as long as there are requests. Between two of them states go on and submit their
        next."""
        while self._waiting:
            try:
                self._llm.step()
                for waiting in list(self._waiting.values()):
                    waiting.tell()
            except Exception as error:
                for waiting in self._waiting.values():
                    if not waiting.done.done():
                        waiting.done.set_exception(error)
            await asyncio.sleep(0)
