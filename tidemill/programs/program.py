"""@program: a function of a state, and how to run it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from tidemill.errors import ProgramError
from tidemill.programs.backend import Backend
from tidemill.programs.local import Local
from tidemill.programs.remote import Remote
from tidemill.programs.run import Run
from tidemill.programs.state import State

if TYPE_CHECKING:
    from tidemill.engine.llm import LLM

AnyBackend: TypeAlias = "Backend | LLM | str"
_NUM_THREADS = 64  # programs of a batch that run at the same time
_default: AnyBackend | None = None
_remotes: dict[str, Remote] = {}
_lock = threading.Lock()


def set_default_backend(backend: AnyBackend | None) -> None:
    """Sets the backend of programs that are run without one: an LLM, the URL of a server, or a
    Backend."""
    global _default
    _default = backend


def resolve(backend: AnyBackend | None) -> Backend:
    """One for each engine and server, so that programs that run at the same time share batches."""
    backend = _default if backend is None else backend
    if isinstance(backend, Backend):
        return backend
    with _lock:
        if isinstance(backend, str) and backend.startswith(("http://", "https://", "unix:")):
            return _remotes.setdefault(backend, _remotes.get(backend) or Remote(backend))
        if hasattr(backend, "core") and hasattr(backend, "tokenizer"):
            kept = vars(backend)
            kept["_programs"] = kept.get("_programs") or Local(cast("LLM", backend))
            local: Local = kept["_programs"]
            return local
    what = (
        "A program needs a backend"
        if backend is None
        else f"A program cannot run on {str(backend)[:60]!r}"
    )
    raise ProgramError(
        f"{what}.",
        fix='Give backend=LLM("smollm2") or backend="http://127.0.0.1:8000".',
        param="backend",
    )


class Program:
    """Its function is called with a State and the arguments of `run`."""

    def __init__(self, function: Callable[..., Any], backend: AnyBackend | None = None) -> None:
        functools.update_wrapper(self, function)
        self._function, self._backend = function, backend

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Runs the program as part of another program, with its state."""
        if not arguments or not isinstance(arguments[0], State):
            name = self._function.__name__
            raise ProgramError(
                f"{name} is a program.",
                fix=f"Use {name}.run(...), or {name}(s, ...) in another program.",
            )
        return self._function(*arguments, **named)

    def run(
        self,
        *arguments: Any,
        backend: AnyBackend | None = None,
        stream: bool = False,
        share_prefix: bool = True,
        **named: Any,
    ) -> State:
        """`stream`: returns at once; the state's text can be read while it is generated.
        `share_prefix` off: every request computes its whole prompt, to measure what sharing
        saves."""
        run = Run(resolve(backend or self._backend), share_prefix)
        state = State(run)
        work = functools.partial(self._execute, run, state, arguments, named)
        if stream:
            threading.Thread(
                target=_quietly, args=(work,), name="tidemill-program", daemon=True
            ).start()
        else:
            work()
        return state

    def run_batch(
        self,
        batch: Sequence[Mapping[str, Any] | Sequence[Any]],
        *,
        backend: AnyBackend | None = None,
        share_prefix: bool = True,
        num_threads: int = _NUM_THREADS,
    ) -> list[State]:
        """Run it with each of these arguments, given by name or by position. One that fails does so
        alone: reading its state raises the error."""
        for each in batch:
            if isinstance(each, str) or not isinstance(each, Mapping | Sequence):
                raise ProgramError(
                    f"run_batch() takes a list of dicts or tuples; got {str(each)[:60]!r} in it.",
                    param="batch",
                )
        if not batch:
            return []
        runs = [Run(resolve(backend or self._backend), share_prefix) for _ in batch]
        states = [State(run) for run in runs]
        stopped = threading.Event()

        def work(i: int) -> None:
            each = batch[i]
            arguments, named = ((), dict(each)) if isinstance(each, Mapping) else (tuple(each), {})
            if not stopped.is_set():
                _quietly(functools.partial(self._execute, runs[i], states[i], arguments, named))

        with ThreadPoolExecutor(min(len(batch), num_threads)) as pool:
            futures = [pool.submit(work, i) for i in range(len(batch))]
            try:
                for future in futures:
                    future.result()
            except BaseException:  # Ctrl-C
                stopped.set()
                for state in states:
                    state.cancel()
                raise
        return states

    def _execute(
        self, run: Run, state: State, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        try:
            state.returned = self._function(state, *arguments, **named)
            run.end()
        except BaseException as error:
            run.end(error)
            raise
        if run.error is not None:
            raise run.error


def _quietly(work: Callable[[], None]) -> None:
    """Its error is read from the state."""
    try:
        work()
    except Exception:
        return


def program(
    function: Callable[..., Any] | None = None, *, backend: AnyBackend | None = None
) -> Any:
    """Make a function a program: `@program` or `@program(backend=...)`."""
    if function is None:
        return functools.partial(Program, backend=backend)
    return Program(function, backend)
