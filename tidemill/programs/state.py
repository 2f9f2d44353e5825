"""State: what a program appends to. Appending returns at once; reading a variable waits for it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Self

from tidemill.errors import Cancelled, ProgramError
from tidemill.programs.backend import Usage
from tidemill.programs.expressions import Appended, Gen, Message, Part, Select, Text, parts_of
from tidemill.programs.run import Run
from tidemill.programs.sequence import Sequence

MAX_BRANCHES = 1024


@dataclass(slots=True)
class Variable:
    value: Future[Any]
    meta: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a state's text. The last one of a variable is marked."""

    name: str | None
    text: str
    is_last: bool = False


class State:
    """`s += text`, `s += gen("name")`, `s["name"]`. Branches of it: `s.fork(3)`."""

    def __init__(self, run: Run, parent: State | None = None) -> None:
        self._run = run
        self._sequence = Sequence(run.backend, run.usage, run.shares)
        self._ready = asyncio.Event()  # the parent has come to where this one begins
        self._variables: dict[str, Variable | Any] = (
            {} if parent is None else dict(parent._variables)
        )
        self._ops: deque[Callable[[], Awaitable[None]]] = deque()
        self._is_working = False
        self._pieces: list[Piece] = []
        self.returned: Any = None  # by the program's function
        if parent is None:
            self._ready.set()

    # ---- appending

    def __iadd__(self, value: Appended) -> Self:
        parts = parts_of(value)
        self._check_open()
        for part in parts:
            inner = part.parts if isinstance(part, Message) else (part,)
            declared = {
                part.name: self._declare(part)
                for part in inner
                if isinstance(part, Gen | Select) and part.name
            }
            self._push(partial(self._append, part, declared))
        return self

    def fork(self, num: int = 1) -> Branches:
        """States that begin with the text so far, whose prefix is computed once."""
        if not isinstance(num, int) or not 1 <= num <= MAX_BRANCHES:
            raise ProgramError(
                f"fork() makes 1 to {MAX_BRANCHES} branches; got {num!r}.", param="num"
            )
        self._check_open()
        branches = Branches(State(self._run, self) for _ in range(num))
        branches.parent = self

        async def begin() -> None:
            for branch in branches:
                branch._sequence = self._sequence.copy()
                branch._pieces = list(self._pieces)
                branch._ready.set()

        self._push(begin)
        return branches

    def _check_open(self) -> None:
        if self._run.is_over:
            raise ProgramError(
                "The program has ended: nothing can be appended.",
                fix="Append in the program's function.",
            )

    def _declare(self, part: Gen | Select) -> Variable:
        assert part.name is not None
        variable = self._variables[part.name] = Variable(self._run.future())
        with self._run.changed:
            self._run.changed.notify_all()
        return variable

    def _push(self, op: Callable[[], Awaitable[None]]) -> None:
        if self._run.error is not None:
            raise self._run.error
        self._ops.append(op)
        self._run.call(self._wake)

    # ---- in the backend's thread

    def _wake(self) -> None:
        if not self._is_working and self._ops:
            self._is_working = True
            self._run.start(self._work())

    async def _work(self) -> None:
        await self._ready.wait()
        while self._ops:
            await self._ops.popleft()()
        self._is_working = False

    async def _append(self, part: Part | Message, declared: dict[str, Variable]) -> None:
        if not isinstance(part, Message):
            if self._sequence.messages:
                fix = "Use assistant(gen(...)) for a reply."
                raise ProgramError("Text without a role is appended to a conversation.", fix=fix)
            await self._append_part(part, declared)
            return
        sequence, content = self._sequence, ""
        if all(isinstance(inner, Text) for inner in part.parts):
            if not sequence.messages and (sequence.ids or sequence.tail):
                raise ProgramError(
                    "A conversation begins after text without a role.",
                    fix="Use system() or user() for it.",
                )
            content = "".join(inner.text for inner in part.parts if isinstance(inner, Text))
        else:
            self._note(None, await sequence.open_reply())
            for inner in part.parts:
                content += await self._append_part(inner, declared)
            sequence.replies.add(len(sequence.messages))
        sequence.messages.append({"role": part.role, "content": content})

    async def _append_part(self, part: Part, declared: dict[str, Variable]) -> str:
        """Its text."""
        if isinstance(part, Text):
            self._sequence.tail += part.text
            self._note(None, part.text)
            return part.text
        variable = declared.get(part.name) if part.name else None
        if isinstance(part, Gen):
            generated = await self._sequence.generate(part, partial(self._note, part.name))
            text, meta = generated.text, asdict(generated)
            self._note(part.name, "", is_last=True)
        else:
            chosen = await self._sequence.select(part)
            text, meta = chosen.text, asdict(chosen)
            self._note(part.name, text, is_last=True)
        if variable is not None:
            variable.meta = meta
            variable.value.set_result(text)
        return text

    def _note(self, name: str | None, text: str, is_last: bool = False) -> None:
        with self._run.changed:
            self._pieces.append(Piece(name, text, is_last))
            self._run.changed.notify_all()

    # ---- reading

    def __getitem__(self, name: str) -> Any:
        """The value of a variable, as soon as it is complete. Of branches that were joined: a list
        of theirs."""
        variable = self._variable(name)
        return variable.value.result() if isinstance(variable, Variable) else variable

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self._variables else default

    def __setitem__(self, name: str, value: Any) -> None:
        self._variables[name] = value

    def __contains__(self, name: object) -> bool:
        return name in self._variables

    @property
    def variables(self) -> list[str]:
        return list(self._variables)

    def meta(self, name: str) -> dict[str, Any]:
        """The figures of a variable. A generation has token_ids, finish_reason, stop and
        num_cached; a select has scores and logprobs."""
        variable = self._variable(name)
        if not isinstance(variable, Variable):
            raise ProgramError(f"{name!r} was not generated.", param="name")
        variable.value.result()
        return variable.meta or {}

    def _variable(self, name: str) -> Any:
        if name not in self._variables:
            if self._run.error is not None:
                raise self._run.error
            known = ", ".join(map(repr, self._variables)) or "none"
            raise ProgramError(
                f"There is no variable {name!r}.", fix=f"There are: {known}.", param="name"
            )
        return self._variables[name]

    def wait(self) -> Self:
        """Until all that was appended is there."""
        if self._run.is_over and self._run.error is None:
            return self
        done = self._run.future()

        async def tell() -> None:
            done.set_result(None)

        self._push(tell)
        done.result()
        return self

    def text(self) -> str:
        """All of it; of a conversation as the chat template has it, up to the last reply."""
        self.wait()
        return "".join(piece.text for piece in self._pieces)

    def messages(self) -> list[dict[str, str]]:
        self.wait()
        return [dict(message) for message in self._sequence.messages]

    def token_ids(self) -> list[int]:
        """The ids of all tokens that are computed; text after the last generation has none yet."""
        self.wait()
        return list(self._sequence.ids)

    @property
    def usage(self) -> Usage:
        """The usage of the whole program, its branches included."""
        return self._run.usage

    @property
    def error(self) -> BaseException | None:
        return self._run.error

    def cancel(self) -> None:
        """End the program and its requests."""
        self._run.end(Cancelled("The program was cancelled."))

    def fail(self, error: BaseException) -> None:
        """End the program and its requests, with this error."""
        self._run.end(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if not self._run.is_over:
            self.cancel()

    # ---- streaming

    def stream(self) -> Iterator[tuple[str, str]]:
        """(variable, piece of its text), as they are generated, until the program has ended."""
        return (
            (piece.name, piece.text)
            for piece in self._read()
            if piece.name is not None and piece.text
        )

    def text_iter(self, name: str | None = None) -> Iterator[str]:
        """The text of a variable as it is generated, until it is complete; without a name all text
        of the state."""
        for piece in self._read():
            if name is None or piece.name == name:
                if piece.text:
                    yield piece.text
                if name is not None and piece.is_last:
                    return
        if name is not None:
            self._variable(name)

    def _read(self) -> Iterator[Piece]:
        at, run = 0, self._run
        while True:
            with run.changed:
                while at == len(self._pieces) and run.error is None and not run.is_over:
                    run.changed.wait()
                new, error = self._pieces[at:], run.error
            yield from new
            at += len(new)
            if not new and error is not None:
                raise error
            if not new and run.is_over:
                return


class Branches(list[State]):
    """The branches of one state, in parallel. `branches["name"]` has the values of all; `branches
    += text` appends to all."""

    parent: State | None = None

    def __iadd__(self, value: Appended) -> Self:  # type: ignore[override, misc]
        for branch in self:
            branch += value
        return self

    def __getitem__(self, at: Any) -> Any:  # type: ignore[override]
        return [branch[at] for branch in self] if isinstance(at, str) else super().__getitem__(at)

    def each(self, work: Callable[[State, int], Any]) -> list[Any]:
        """`work(branch, index)` for all at once, each in a thread of its own, for branches that
        read what they generate."""

        def work_on(i: int) -> Any:
            try:
                return work(self[i], i)
            except BaseException as error:
                self[i].fail(error)
                raise

        with ThreadPoolExecutor(len(self)) as pool:
            futures = [pool.submit(work_on, i) for i in range(len(self))]
            try:
                return [future.result() for future in futures]
            except BaseException as error:  # Ctrl-C, too
                self[0].fail(error)
                raise

    def join(self) -> Self:
        """Wait for all. The state that they are branches of gets their variables, as lists."""
        for branch in self:
            branch.wait()
        parent = self.parent
        if parent is not None:
            for name in dict.fromkeys(name for branch in self for name in branch.variables):
                if any(
                    branch._variables.get(name) is not parent._variables.get(name)
                    for branch in self
                ):
                    parent[name] = [branch.get(name) for branch in self]
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        if kind is None:
            self.join()


def fork(state: State, num: int = 1) -> Branches:
    return state.fork(num)


def join(branches: Branches) -> Branches:
    return branches.join()
