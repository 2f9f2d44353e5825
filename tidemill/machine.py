"""The resources that the process may use: cores, memory, compiled kernels, a GPU. The kernels and
the GPU are filled in by kernels.machine."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The resources that the process may use."""

    num_cores: int
    memory_bytes: int
    available_bytes: int
    kernels: str = ""  # the compiled CPU kernels: for which instructions, or empty
    no_kernels: str = ""  # and then, why
    gpu: str = ""  # its name, or empty
    gpu_bytes: int = 0
    gpu_free_bytes: int = 0
    num_gpus: int = 0

    @staticmethod
    def detect() -> Machine:
        total, available = _memory()
        return Machine(num_cores=_physical_cores(), memory_bytes=total, available_bytes=available)


def _physical_cores() -> int:
    """Distinct physical cores among the CPUs this process may run on."""
    if not hasattr(os, "sched_getaffinity"):  # not Linux
        return os.cpu_count() or 1
    cpus = os.sched_getaffinity(0)
    cores = set()
    for cpu in cpus:
        try:
            cores.add(
                Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
                .read_text()
                .strip()
            )
        except OSError:
            cores.add(str(cpu))
    quota = _read_cgroup("cpu.max").split()
    limit = int(quota[0]) / int(quota[1]) if len(quota) == 2 and quota[0].isdigit() else len(cores)
    return max(1, min(len(cores), int(limit)))


def _memory() -> tuple[int, int]:
    """Total and available bytes, whichever is tighter: the machine or the control group."""
    try:
        info = dict(re.findall(r"^(\w+):\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.M))
        total, available = int(info["MemTotal"]) * 1024, int(info["MemAvailable"]) * 1024
    except (OSError, KeyError):  # not Linux
        total = available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, used = _read_cgroup("memory.max"), _read_cgroup("memory.current")
    if limit.isdigit() and used.isdigit():
        # reclaimable
        cached = re.search(r"^inactive_file (\d+)$", _read_cgroup("memory.stat"), re.M)
        free = int(limit) - int(used) + (int(cached[1]) if cached else 0)
        total, available = min(total, int(limit)), min(available, max(0, free))
    return total, available


def _read_cgroup(name: str) -> str:
    try:
        return Path("/sys/fs/cgroup", name).read_text().strip()
    except OSError:
        return ""
