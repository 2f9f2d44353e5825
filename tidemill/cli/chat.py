"""`tidemill chat`: a conversation in the terminal. Ctrl-C stops a response, not the program."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tidemill.cli.chat_backends import Backend, Local, Remote
from tidemill.cli.chat_input import Input, make_input, no_echo
from tidemill.cli.generate import (
    MaxTokens,
    RepetitionPenalty,
    Seed,
    Temperature,
    TopK,
    TopP,
    only_lora,
    warn_if_noisy,
)
from tidemill.cli.options import ENGINE_NAMES
from tidemill.cli.settings import Settings, raise_on_interrupt, takes
from tidemill.errors import ConfigError, TidemillError
from tidemill.types.sampling import SamplingParams

_KINDS: dict[str, Callable[[str], Any]] = {
    "temperature": float, "top_p": float, "top_k": int, "min_p": float, "repetition_penalty": float, "presence_penalty": float,
    "frequency_penalty": float, "max_tokens": int, "seed": int, "stop": lambda text: [text],
}  # fmt: skip
_HINT = "/help lists commands. Alt-Enter or \\ at the end makes a new line. Ctrl-C stops an answer, Ctrl-D leaves."
_COMMANDS = {
    "/system [TEXT]": "set the system prompt and start over; without a text, show it",
    "/set [NAME VALUE]": "set a sampling parameter, or `default`; without a name, show all",
    "/retry": "answer the last message again (another answer, unless a seed is set)",
    "/clear": "start over; the system prompt stays",
    "/save FILE": "write the conversation into a file, as JSON",
    "/load FILE": "continue a conversation from a file",
    "/help": "this",
    "/exit": "leave, as Ctrl-D does",
}


@takes(*ENGINE_NAMES, "lora", "max-lora-rank")
def chat(
    settings: Settings,
    prompt: Annotated[
        str | None, typer.Argument(help="Answer this and exit. Without it, a conversation.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="Talk to a server with the OpenAI API, at http://HOST:PORT or unix:PATH."
        ),
    ] = None,
    api_key: Annotated[
        str,
        typer.Option(help="With --url: the server's key. Default: the first of TIDEMILL_API_KEY."),
    ] = "",
    system: Annotated[
        str | None, typer.Option(help="System prompt: how the model should behave.")
    ] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Seed = None,
) -> None:
    """Chat in the terminal, with a model or a server (--url)."""
    options = {
        "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k,
        "repetition_penalty": repetition_penalty, "seed": seed,
    }  # fmt: skip
    sampling: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    SamplingParams(**sampling)  # a wrong value is an error before a model is loaded
    console = Console(stderr=True, highlight=False)
    warn_if_noisy(temperature, console)
    raise_on_interrupt()
    with no_echo():
        backend, is_words = _backend(settings, url, api_key, console, prompt)
        prompt = settings["model"] if is_words else prompt
        conversation = Conversation(backend, console, sampling, system)
        signal.signal(signal.SIGINT, conversation.on_interrupt)
        if prompt is not None:
            if not conversation.say(sys.stdin.read() if prompt == "-" else prompt):
                raise typer.Exit(1)
            return
        console.print(f"Chat with {backend.name}. {_HINT}", style="dim", markup=False)
        conversation.run(make_input([name.split()[0] for name in _COMMANDS]))


def _backend(
    settings: Settings, url: str | None, api_key: str, console: Console, prompt: str | None
) -> tuple[Backend, bool]:
    """Who answers, and whether what stands in the place of the model is the prompt: with a server,
    nobody has to name its model."""
    if url is None:
        if api_key:
            raise ConfigError("--api-key is of a server.", fix="Give its address with --url.")
        from tidemill.engine.llm import LLM  # brings torch

        lora = only_lora(settings)
        return Local(
            LLM(progress=console.is_terminal, **settings.engine), lora or settings["model"], lora
        ), False
    for name in (*ENGINE_NAMES, "lora", "max-lora-rank"):
        if name != "model" and settings.source(name).startswith("--"):
            raise ConfigError(
                f"--{name} is of a model in this process.",
                fix="With --url, the server has its own options.",
            )
    model = settings["model"] if settings.source("model") else None
    server = Remote(url, api_key)
    is_words = model is not None and prompt is None and model not in server.models
    if is_words:
        console.print(
            f"{model!r} is none of the server's models, so it is the prompt.",
            style="dim",
            markup=False,
        )
    server.name = model if model is not None and not is_words else server.models[0]
    return server, is_words


class Conversation:
    """Messages so far, what was set, and the commands that change them."""

    def __init__(
        self, backend: Backend, console: Console, sampling: dict[str, Any], system: str | None
    ) -> None:
        self._backend, self._console, self._sampling = backend, console, sampling
        self._responding = self._listening = False
        self._messages: list[dict[str, Any]] = (
            [{"role": "system", "content": system}] if system else []
        )

    def on_interrupt(self, *_: object) -> None:
        """Ctrl-C ends a response or a line being typed."""
        if self._responding:
            self._backend.interrupt()
        elif self._listening:
            self._listening = False
            raise KeyboardInterrupt

    def run(self, source: Input) -> None:
        while True:
            try:
                self._listening = True
                text = source.read().strip()
                self._listening = False
                if not self.turn(text):
                    return
            except KeyboardInterrupt:
                self._confirm("Ctrl-D or /exit leaves.")
            except EOFError:
                return

    def turn(self, text: str) -> bool:
        """A command or a message. False: leave."""
        name, _, rest = text.partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "/system": self._set_system, "/set": self._set, "/retry": self._retry, "/clear": self._clear, "/reset": self._clear,
            "/save": self._save, "/load": self._load, "/help": self._help, "/?": self._help,
        }  # fmt: skip
        if name in ("/exit", "/quit", "/bye"):
            return False
        if name in commands:
            commands[name](rest.strip())
        elif name.startswith("/") and "/" not in name[1:] and "\n" not in text:
            self._complain(f"There is no command {name}. /help lists those there are.")
        elif text:
            self.say(text)
        return True

    def say(self, text: str) -> bool:
        return self._answer([*self._messages, {"role": "user", "content": text}])

    # ---- commands

    def _set_system(self, text: str) -> None:
        if not text:
            now = self._messages[0]["content"] if self._has_system else "none"
            return self._confirm(f"System prompt: {now}")
        self._messages = [{"role": "system", "content": text}]
        return self._confirm("System prompt set. The conversation starts over.")

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if not name:
            known = self._backend.defaults() | self._sampling
            return self._confirm(
                ", ".join(f"{each} {known.get(each, 'default')}" for each in _KINDS)
            )
        name = name.replace("-", "_")
        if name not in _KINDS:
            return self._complain(f"There is no parameter {name}. Possible: {', '.join(_KINDS)}.")
        if not value:
            return self._complain(
                f"Give a value, like /set {name} {self._backend.defaults().get(name, 1)}, or default."
            )
        if value == "default":
            self._sampling.pop(name, None)
            return self._confirm(f"{name} is the default.")
        try:
            changed = self._sampling | {name: _KINDS[name](value)}
            SamplingParams(**changed)
        except (ValueError, TidemillError) as error:
            return self._complain(
                str(error) if isinstance(error, TidemillError) else f"{name} cannot be {value!r}."
            )
        self._sampling = changed
        return self._confirm(f"{name} is {value}.")

    def _retry(self, _: str) -> None:
        kept = list(self._messages)
        while kept and kept[-1]["role"] != "user":
            kept.pop()
        if not kept:
            return self._complain("There is no message to answer yet.")
        self._answer(kept)
        return None

    def _clear(self, _: str) -> None:
        self._messages = self._messages[:1] if self._has_system else []
        self._confirm(
            "The conversation starts over."
            + (" The system prompt stays." if self._has_system else "")
        )

    def _save(self, name: str) -> None:
        if not name:
            return self._complain("Give a file: /save FILE")
        try:
            Path(name).expanduser().write_text(
                json.dumps({"messages": self._messages}, indent=2, ensure_ascii=False) + "\n"
            )
        except OSError as error:
            return self._complain(f"{name} cannot be written: {error}.")
        return self._confirm(f"{len(self._messages)} messages are in {name}.")

    def _load(self, name: str) -> None:
        if not name:
            return self._complain("Give a file: /load FILE")
        try:
            read = json.loads(Path(name).expanduser().read_text())
            messages = read["messages"] if isinstance(read, dict) else read
            is_right = isinstance(messages, list) and all(
                isinstance(each, dict)
                and isinstance(each.get("role"), str)
                and isinstance(each.get("content"), str)
                for each in messages
            )
        except (OSError, ValueError, KeyError, RecursionError) as error:
            return self._complain(f"{name} cannot be read: {error}.")
        if not is_right:
            return self._complain(f"{name} holds no messages with a role and a text.")
        self._messages = messages
        return self._confirm(
            f"{len(messages)} messages from {name}. The conversation goes on from there."
        )

    def _help(self, _: str) -> None:
        for name, words in _COMMANDS.items():
            self._confirm(f"{name:18} {words}")
        self._confirm(_HINT)

    # ---- answering

    @property
    def _has_system(self) -> bool:
        return bool(self._messages) and self._messages[0]["role"] == "system"

    def _answer(self, messages: list[dict[str, Any]]) -> bool:
        """Answer the last of the messages. What was asked and the answer, as far as it came, are
        kept."""
        pieces: list[str] = []
        try:
            self._responding = True
            for piece, is_reasoning in self._backend.reply(messages, self._sampling):
                if is_reasoning:
                    self._console.print(piece, style="dim", end="", markup=False, soft_wrap=True)
                    continue
                pieces.append(piece)
                sys.stdout.write(piece)
                sys.stdout.flush()
        except KeyboardInterrupt:
            pass
        except TidemillError as error:
            self._complain(f"{error} /clear starts over.")
            return False
        finally:
            self._responding = False
        print(flush=True)
        self._messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
        self._console.print(self._backend.summary(), style="dim", soft_wrap=True)
        return True

    def _confirm(self, line: str) -> None:
        self._console.print(line, style="dim", markup=False, soft_wrap=True)

    def _complain(self, line: str) -> None:
        self._console.print(line, style="red", markup=False, soft_wrap=True)
