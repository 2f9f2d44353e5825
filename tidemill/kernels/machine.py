"""What the process may use: cores, memory, compiled kernels, a GPU."""

from __future__ import annotations

from dataclasses import replace

from tidemill.kernels import native
from tidemill.machine import Machine


def detect() -> Machine:
    import torch

    machine = replace(Machine.detect(), kernels=native.why if native.lib else "", no_kernels="" if native.lib else native.why)
    if not torch.cuda.is_available():
        return machine
    free, total = torch.cuda.mem_get_info()
    return replace(machine, gpu=torch.cuda.get_device_name(), gpu_bytes=total, gpu_free_bytes=free)


def set_threads(num_threads: int) -> None:
    """Threads of the heavy work. Where the compiled kernels do it, torch's own pool would only fight them for the cores."""
    import torch

    if native.lib:
        native.lib.set_threads(num_threads)
    torch.set_num_threads(1 if native.lib else num_threads)
