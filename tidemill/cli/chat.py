"""`tidemill chat`: a conversation in the terminal. Ctrl-C stops a response, not the program."""

from __future__ import annotations

import contextlib
import signal
import sys
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console

from tidemill.cli.generate import MaxTokens, RepetitionPenalty, Seed, Temperature, TopK, TopP, given_params, summary
from tidemill.cli.options import ENGINE_NAMES
from tidemill.cli.settings import Settings, raise_on_interrupt, takes
from tidemill.errors import InvalidRequest
from tidemill.sampling import SamplingParams

if TYPE_CHECKING:
    from tidemill.engine.llm import LLM

_HELP = "/reset starts over, /system TEXT sets the system prompt, /exit or Ctrl-D leaves, Ctrl-C stops a response."


@takes(*ENGINE_NAMES)
def chat(
    settings: Settings,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Seed = None,
) -> None:
    """Chat with a model in the terminal."""
    params = given_params(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    from tidemill.engine.llm import LLM  # brings torch

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() a history and editing
    console = Console(stderr=True, highlight=False)
    raise_on_interrupt()
    llm = LLM(progress=console.is_terminal, **settings.engine)
    console.print(f"Chat with {settings['model']}. {_HELP}", style="dim")
    conversation = Conversation(llm, console, params, system)
    signal.signal(signal.SIGINT, conversation.on_interrupt)
    while True:
        try:
            if not conversation.turn(conversation.listen()):
                return
        except KeyboardInterrupt:
            console.print("\nCtrl-D or /exit leaves.", style="dim")
        except EOFError:
            print()
            return


class Conversation:
    def __init__(self, llm: LLM, console: Console, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._console = console
        self._params = params
        self._responding = self._listening = False
        self._begin(system)

    def _begin(self, system: str | None) -> None:
        self._system = system
        self._messages = [{"role": "system", "content": system}] if system else []

    def on_interrupt(self, *_: object) -> None:
        """Ctrl-C ends a response (between two steps, so that the engine is never cut in two) or a line being typed."""
        if self._responding:
            self._llm.interrupt()
        elif self._listening:
            self._listening = False
            raise KeyboardInterrupt

    def listen(self) -> str:
        self._listening = True
        text = input("> ")
        self._listening = False
        return text.strip()

    def turn(self, text: str) -> bool:
        """A command or a message. False: leave."""
        command, _, rest = text.partition(" ")
        if command in ("/exit", "/quit", "/bye"):
            return False
        if command == "/reset":
            self._begin(self._system)
        elif command == "/system":
            self._begin(rest or None)
        elif command.startswith("/"):
            self._console.print(_HELP, style="dim")
        elif text:
            self._say(text)
        return True

    def _say(self, text: str) -> None:
        messages = [*self._messages, {"role": "user", "content": text}]
        try:
            ids = self._llm.tokenizer.encode_chat(messages, max_tokens=self._llm.config.max_context)
            params = self._params
            if params.max_tokens is not None and params.is_given("max_tokens"):
                room = max(1, self._llm.config.max_context - len(ids))
                params = msgspec.structs.replace(params, max_tokens=min(params.max_tokens, room))
            response = self._respond(ids, params)
        except InvalidRequest as error:
            self._console.print(f"{error} /reset starts over.", style="red", markup=False)
            return
        self._messages = [*messages, {"role": "assistant", "content": response}]
        self._console.print(summary(self._llm), style="dim", soft_wrap=True)

    def _respond(self, prompt_ids: list[int], params: SamplingParams) -> str:
        pieces: list[str] = []
        self._responding = True
        try:
            for piece in self._llm.stream(prompt_ids, params):
                pieces.append(piece)
                sys.stdout.write(piece)
                sys.stdout.flush()
        finally:
            self._responding = False
        print(flush=True)
        return "".join(pieces)
