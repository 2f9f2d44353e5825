"""Decisions about the tiers behind the KV cache: host memory and disk."""

from __future__ import annotations

from tidemill.config.memory import Memory
from tidemill.config.options import Decision, EngineOptions
from tidemill.config.sizes import MIB, fmt_bytes, parse_bytes
from tidemill.errors import ConfigError
from tidemill.machine import Machine

_STAGING = 256 * MIB  # of host memory, where only disk is asked for
_MIN_SLOTS = 4


def decide_disk(options: EngineOptions) -> Decision[tuple[str, int]]:
    """Folder and quota; none if the folder is empty."""
    if options.kv_disk is None:
        return ("", 0), "no disk behind the KV cache: --kv-disk is not given"
    path, _, size = options.kv_disk.rpartition(":")
    try:
        quota = parse_bytes(size)
    except ConfigError:
        quota = 0
    if not path or not quota:
        raise ConfigError(
            f"kv_disk is {options.kv_disk!r}.",
            fix="Write PATH:SIZE, such as /var/cache/tidemill:20G.",
            param="kv_disk",
        )
    return (path, quota), "cached pages that leave host memory stay on disk, also over a restart"


def decide_host_slots(
    options: EngineOptions, memory: Memory, kv_bytes: int, machine: Machine
) -> Decision[int]:
    """Pages of host memory behind the KV cache."""
    num_bytes = options.kv_host_memory_bytes
    if not num_bytes and options.kv_disk is None:
        return 0, "no host memory behind the KV cache: --kv-host-memory is not given"
    param = "kv_host_memory_bytes" if num_bytes else "kv_disk"
    page_bytes, why = memory.page_bytes, "pages of host memory behind the KV cache"
    if not num_bytes:
        why = "pages of host memory on the way to disk; more with --kv-host-memory"
    num_slots = (num_bytes or max(_STAGING, _MIN_SLOTS * page_bytes)) // page_bytes
    if num_slots < _MIN_SLOTS:
        raise ConfigError(
            f"{fmt_bytes(num_bytes or 0)} of host memory hold {num_slots} pages of {fmt_bytes(page_bytes)}.",
            fix=f"Give at least {fmt_bytes(_MIN_SLOTS * page_bytes)} with --kv-host-memory.",
            param=param,
        )
    used = 0 if memory.gpu else memory.weight_bytes + memory.activation_bytes + kv_bytes
    if num_slots * page_bytes > machine.available_bytes - used:
        raise ConfigError(
            f"{fmt_bytes(num_slots * page_bytes)} of host memory behind the KV cache are more than the "
            f"{fmt_bytes(max(0, machine.available_bytes - used))} that are left.",
            fix="Give less with --kv-host-memory"
            + ("." if memory.gpu else ", or less with --kv-memory."),
            param=param,
        )
    return num_slots, f"{why}, {fmt_bytes(page_bytes)} each"
