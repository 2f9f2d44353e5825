"""`tidemill chat`: a conversation in the terminal. Ctrl-C stops the answer, not the program."""

from __future__ import annotations

import contextlib
import signal
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from tidemill.cli import options as opt
from tidemill.cli.generate import summary
from tidemill.errors import InvalidRequest
from tidemill.sampling import SamplingParams

_HELP = "/reset starts over, /system TEXT sets the system prompt, /exit or Ctrl-D leaves, Ctrl-C stops an answer."


def chat(
    model: opt.Model = "smollm2",
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: opt.MaxTokens = 1024,
    temperature: opt.Temperature = 0.7,
    top_p: opt.TopP = 0.95,
    top_k: opt.TopK = 0,
    seed: opt.Seed = None,
    threads: opt.Threads = None,
) -> None:
    """Talk to a model."""
    from tidemill.engine.llm import LLM

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() a history and editing
    console = Console(stderr=True, highlight=False)
    llm = LLM(model, progress=console.is_terminal, threads=threads)
    console.print(f"Talking to {model}. {_HELP}", style="dim")
    opening: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    while True:
        try:
            text = input("> ").strip()
        except KeyboardInterrupt:
            console.print("\nCtrl-D or /exit leaves.", style="dim")
            continue
        except EOFError:
            print()
            return
        command, _, rest = text.partition(" ")
        if command in ("/exit", "/quit", "/bye"):
            return
        if command == "/reset":
            messages = list(opening)
            continue
        if command == "/system":
            opening = [{"role": "system", "content": rest}] if rest else []
            messages = list(opening)
            continue
        if command.startswith("/"):
            console.print(_HELP, style="dim")
            continue
        if not text:
            continue
        messages.append({"role": "user", "content": text})
        try:
            ids = llm.tokenizer.encode_chat(messages, max_tokens=llm.config.max_context)
            room = max(1, llm.config.max_context - len(ids))
            params = SamplingParams(
                max_tokens=min(max_tokens, room), temperature=temperature, top_p=top_p, top_k=top_k, seed=seed
            )
            answer = _answer(llm, ids, params)
        except InvalidRequest as error:
            messages.pop()
            console.print(f"{error} /reset starts over.", style="red", markup=False)
            continue
        messages.append({"role": "assistant", "content": answer})
        console.print(summary(llm), style="dim", soft_wrap=True)


def _answer(llm: Any, prompt_ids: list[int], params: SamplingParams) -> str:
    previous = signal.signal(signal.SIGINT, lambda *_: llm.interrupt())
    pieces: list[str] = []
    try:
        for piece in llm.stream(prompt_ids, params):
            pieces.append(piece)
            sys.stdout.write(piece)
            sys.stdout.flush()
    finally:
        signal.signal(signal.SIGINT, previous)
    print(flush=True)
    return "".join(pieces)
