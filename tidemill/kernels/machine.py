"""The resources that the process may use: cores, memory, compiled kernels, a GPU."""

from __future__ import annotations

import platform
from dataclasses import replace

from tidemill.kernels import native
from tidemill.machine import Machine


def detect() -> Machine:
    import torch

    machine = replace(
        Machine.detect(),
        kernels=native.why if native.lib else "",
        no_kernels="" if native.lib else native.why,
    )
    if not torch.cuda.is_available():
        return machine
    free, total = torch.cuda.mem_get_info()
    return replace(
        machine,
        gpu=torch.cuda.get_device_name(),
        gpu_bytes=total,
        gpu_free_bytes=free,
        num_gpus=torch.cuda.device_count(),
    )


def arithmetic(device: str) -> dict[str, str]:
    """The arithmetic that the bits of a result depend on besides the model and the options: two
    machines that differ in it round differently."""
    import torch

    parts = {
        "build of kernels": native.sources if native.lib else "torch",
        "instruction set": native.why if native.lib else "torch",
        "torch": torch.__version__,
        "instruction set of torch": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
    }
    if device == "cuda":
        parts["GPU"] = f"{torch.cuda.get_device_name()} {torch.cuda.get_device_capability()}"
    return parts


def set_threads(num_threads: int) -> None:
    """Threads of the heavy work. Where the compiled kernels do it, torch's own pool would only
    compete for the cores."""
    import torch

    settle_vector_math()
    if native.lib:
        native.lib.set_threads(num_threads)
    torch.set_num_threads(1 if native.lib else num_threads)


def settle_vector_math() -> None:
    """One call on one element of every vector math function the engine uses, before any large call.

    On x86, torch hands these functions to oneMKL, which picks a kernel at a function's first call.
    When that call comes from several threads at once, one of them may run a low-accuracy kernel on
    its share (oneMKL 2024.2, pytorch issue 188792). A call on one element has one thread."""
    import torch

    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype)
        for name in ("cos", "sin", "exp", "expm1", "log", "log1p", "log2", "sqrt", "tanh", "erf"):
            getattr(torch, name)(one)
