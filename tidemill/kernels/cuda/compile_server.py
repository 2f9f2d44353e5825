"""Triton kernels compiled by other processes, into Triton's cache on disk.

Much of Triton's compiler holds Python's interpreter lock, so threads gain little. The server is a
process that imports the kernels, then forks one worker for each core; none of them touches the GPU.
It takes lines of JSON on its standard input, one kernel for one set of arguments each, and ends
when its input ends and everything is compiled. A kernel that fails there is compiled again by the
process that needs it, where the error is raised.

Importing torch and Triton takes seconds: `start()` before importing them here, so that both import
at once. This module imports neither.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_GPU = Path("/dev/nvidiactl")
_server: subprocess.Popen[str] | None = None


def start() -> None:
    """Unless it runs already. No effect without an NVIDIA GPU, or where kernels are interpreted."""
    global _server
    if _server is None and _GPU.exists() and os.environ.get("TRITON_INTERPRET") != "1":
        command = [sys.executable, "-P", "-m", __name__]
        with contextlib.suppress(OSError):
            _server = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)


def stop() -> None:
    """Stops the server: anything that is not compiled yet will not be."""
    global _server
    if _server is not None:
        _server.kill()
        _server.communicate()
        _server = None


@contextlib.contextmanager
def compile_elsewhere() -> Iterator[None]:
    """Inside, kernels that are not compiled yet go to the server and do not run. At its end all are
    in Triton's cache."""
    from triton import __version__, knobs
    from triton.runtime import driver

    start()
    if _server is None:
        yield
        return
    _fix_keys()
    server, asked = _server, set[str]()
    target = vars(driver.active.get_current_target())

    def ask(fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        source = [__version__, fn.jit_function.cache_key]
        job = json.dumps([fn.module, fn.name, compile["specialization_data"], target, source])
        if _mark(job).exists():
            return False  # it is in the cache
        if job not in asked:
            asked.add(job)
            assert server.stdin is not None
            with contextlib.suppress(OSError):  # it has died
                server.stdin.write(job + "\n")
                server.stdin.flush()
        return True  # not to be compiled here

    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, ask
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = before
    if asked:
        with contextlib.suppress(OSError):
            server.communicate()
    stop()


def _mark(job: str) -> Path:
    """A file that is there once the job is done. Should Triton's cache lose the kernel, it is
    compiled where it is needed."""
    from triton import knobs

    return Path(knobs.cache.dir, "compiled-ahead", hashlib.sha256(job.encode()).hexdigest())


def _fix_keys() -> None:
    """A kernel's key in Triton's cache depends on which keys of its process were computed before
    (functions that call each other, as Triton's own reductions do): compute all in one order."""
    from importlib import import_module

    from triton import JITFunction

    for module in (
        "attention",
        "gemm",
        "glu",
        "hopper_attention",
        "hopper_packed",
        "hopper_single",
        "kv_write",
        "look_up",
        "lora",
        "moe",
        "norm",
        "outliers",
        "packed_gemm",
        "policy_attention",
        "pooling",
        "rounding",
        "routing",
        "sampling",
        "scaled_attention",
        "scaled_gemm",
        "scan",
    ):
        for value in vars(import_module(f"{__package__}.{module}")).values():
            if isinstance(value, JITFunction):
                _ = value.cache_key


class _NoDriver:
    """In place of Triton's driver: the device to compile for, without touching one."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0


def compile_one(job: str) -> None:
    from importlib import import_module

    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    module, name, specialization, target, _ = json.loads(job)
    driver.set_active(_NoDriver(GPUTarget(**target)))
    kernel = getattr(import_module(module), name).preload(specialization)
    if _GPU.exists():
        from triton.backends.nvidia.driver import CudaLauncher

        with contextlib.suppress(AttributeError):  # Triton 3.7 has one launcher for all
            # a small C module for each signature, kept in the cache too
            CudaLauncher(kernel.src, kernel.metadata)
    mark = _mark(job)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()


def _serve() -> None:
    import multiprocessing
    import signal
    from concurrent.futures import ProcessPoolExecutor

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _fix_keys()  # and every kernel is imported, before the workers are forked
    with ProcessPoolExecutor(os.cpu_count() or 1, multiprocessing.get_context("fork")) as pool:
        jobs = {pool.submit(compile_one, job): job for job in map(str.strip, sys.stdin)}
        for done, job in jobs.items():
            if error := done.exception():
                name = json.loads(job)[1]
                print(
                    f"tidemill: {name} was not compiled ahead: {type(error).__name__}: {error}",
                    file=sys.stderr,
                )


if __name__ == "__main__":
    _serve()
