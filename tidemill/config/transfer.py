"""Decisions about KV pages that move between engines."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

from tidemill.config.memory import Memory
from tidemill.config.options import Decision, EngineOptions
from tidemill.config.sizes import MIB, fmt_bytes, parse_bytes
from tidemill.errors import ConfigError
from tidemill.machine import Machine

KINDS = ("shm", "tcp", "nixl")
_DEFAULT_BYTES = 256 * MIB
_MIN_SLOTS = 4
_MAX_SLOTS = 2**20
_MAX_PEERS = 64
_FORMS = "shm:NAME on one host, tcp:HOST:PORT or nixl:HOST:PORT between hosts"


@dataclass(frozen=True, slots=True)
class TransferAddress:
    """The address where an engine offers pages: shared memory of a name, or a host and a port."""

    kind: str
    name: str
    port: int = 0
    num_bytes: int = 0  # of its pages; 0: not said

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}" + (f":{self.port}" if self.port else "")


def parse_address(text: str, param: str) -> TransferAddress:
    """`shm:NAME[:SIZE]`, `tcp:HOST:PORT[:SIZE]`, `nixl:HOST:PORT[:SIZE]`."""
    kind, *parts = text.strip().split(":")
    num = 1 if kind == "shm" else 2
    is_known = kind in KINDS and num <= len(parts) <= num + 1 and all(parts)
    if is_known and kind == "shm":
        is_known = re.fullmatch(r"[A-Za-z0-9_-]{1,64}", parts[0]) is not None
    elif is_known:
        is_known = parts[1].isdecimal() and 0 < int(parts[1]) < 65536
    if not is_known:
        size = (
            "[:SIZE], like shm:prefill:2G"
            if param == "kv_export"
            else ", several with commas between them"
        )
        raise ConfigError(f"{param} is {text!r}.", fix=f"Write {_FORMS}{size}.", param=param)
    try:
        num_bytes = parse_bytes(parts[num]) if len(parts) > num else 0
    except ConfigError as error:
        raise ConfigError(
            f"{param} is {text!r}: {error.message}", fix=error.fix, param=param
        ) from error
    return TransferAddress(kind, parts[0], int(parts[1]) if num == 2 else 0, num_bytes)


def numbered(export: str | None, number: int, num_ranks: int) -> str | None:
    """The address of one of several engines: each has a name, or a port for each rank, of its own.
    That of the first is the one given."""
    if export is None or not number:
        return export
    at = parse_address(export, "kv_export")
    mine = (
        f"{at.kind}:{at.name}-{number}"
        if at.kind == "shm"
        else f"{at.kind}:{at.name}:{at.port + number * num_ranks}"
    )
    return f"{mine}:{at.num_bytes}" if at.num_bytes else mine


def rank_address(address: str, rank: int) -> str:
    """The address of a rank. Of several ranks of an engine, each exchanges its own parts of pages:
    the first at the address given, the others under names of their own, or at the ports that
    follow."""
    at = parse_address(address, "kv_export")
    if not rank:
        return address
    return (
        f"{at.kind}:{at.name}_rank{rank}"
        if at.kind == "shm"
        else f"{at.kind}:{at.name}:{at.port + rank}"
    )


def decide_export(
    options: EngineOptions, memory: Memory, used: int, machine: Machine, num_ranks: int
) -> Decision[tuple[str, int]]:
    """The address and how many pages it holds. `used`: host memory that is taken already."""
    if options.kv_export is None:
        return ("", 0), "KV pages are not exported: --kv-export is not given"
    address = parse_address(options.kv_export, "kv_export")
    _check(options, "kv_export", [address], num_ranks)
    num_bytes, page_bytes = address.num_bytes or _DEFAULT_BYTES, memory.page_bytes
    num_slots = min(num_bytes // page_bytes, _MAX_SLOTS)
    has_roles = options.has_roles  # then the address is not the user's
    like, param = (
        ("--kv-transfer-memory 1G", "kv_transfer_bytes")
        if has_roles
        else (f"{address}:1G", "kv_export")
    )
    if num_slots < _MIN_SLOTS:
        raise ConfigError(
            f"{fmt_bytes(num_bytes)} for exported pages hold {num_slots} pages of {fmt_bytes(page_bytes)}.",
            fix=f"Give at least {fmt_bytes(_MIN_SLOTS * page_bytes)}, like {like}.",
            param=param,
        )
    left = machine.available_bytes - used
    if num_bytes > left:
        raise ConfigError(
            f"{fmt_bytes(num_bytes)} for exported pages are more than the {fmt_bytes(max(0, left))} that are left.",
            fix=f"Give less with {'--kv-transfer-memory' if has_roles else '--kv-export'}, --kv-host-memory or --kv-memory.",
            param=param,
        )
    return (
        str(address),
        num_slots,
    ), f"{num_slots} pages of {fmt_bytes(page_bytes)} are there for other engines to fetch"


def decide_import(options: EngineOptions, num_ranks: int) -> Decision[tuple[str, ...]]:
    """Addresses of engines whose pages may be fetched."""
    if options.kv_import is None:
        return (), "no pages of other engines are fetched: --kv-import is not given"
    addresses = [parse_address(text, "kv_import") for text in options.kv_import.split(",")]
    names = [str(address) for address in addresses]
    if len(set(names)) < len(names) or len(names) > _MAX_PEERS:
        fix = f"Give each engine once, and at most {_MAX_PEERS}."
        raise ConfigError(
            f"kv_import names {len(names)} engines, {len(set(names))} different ones.",
            fix=fix,
            param="kv_import",
        )
    if (
        options.kv_export is not None
        and str(parse_address(options.kv_export, "kv_export")) in names
    ):
        raise ConfigError(
            "kv_import names the address of kv_export.",
            fix="Leave one of them out.",
            param="kv_import",
        )
    _check(options, "kv_import", addresses, num_ranks)
    return tuple(
        names
    ), "pages that other engines have computed are fetched where that is faster than computing them"


def _check(
    options: EngineOptions, name: str, addresses: list[TransferAddress], num_ranks: int
) -> None:
    if options.kv_key_file is None and any(address.kind != "shm" for address in addresses):
        raise ConfigError(
            f"{name} between hosts needs a key that both engines have.",
            fix="Make one with: openssl rand -hex 32 > FILE, and give it to both with --kv-key-file FILE.",
            param="kv_key_file",
        )
    own = (
        [parse_address(options.kv_export, "kv_export")]
        if name == "kv_import" and options.kv_export is not None
        else []
    )
    doors = sorted((address.name, address.port) for address in (*addresses, *own) if address.port)
    for (host, port), following in pairwise([*doors, ("", 0)]):
        end = port + num_ranks  # each rank has a port
        if end > 65536 or (following[0] == host and following[1] < end):
            raise ConfigError(
                f"{name}: {num_ranks} ranks take the ports {port} to {end - 1} of {host}, which are not all free for them.",
                fix=f"Leave {num_ranks} ports for each address, below 65536.",
                param=name,
            )
