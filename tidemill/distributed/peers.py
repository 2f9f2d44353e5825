"""The connection of the ranks of a group: the lower listens, the higher connects and says which it
is."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from tidemill.distributed.channel import Address, Channel, Door, connect
from tidemill.distributed.cuda import CudaGroup
from tidemill.distributed.gathers import GatherGroup
from tidemill.distributed.group import Alone, Group, use
from tidemill.distributed.shard import Shard
from tidemill.distributed.shared import SharedGroup, shared_bytes
from tidemill.distributed.sockets import SocketGroup
from tidemill.distributed.world import World
from tidemill.errors import ConfigError, WorkerLost
from tidemill.kernels.cuda.nccl import Communicator, Library

CONNECT_S = 60.0
_LOOK_S = 0.2


def peers_of(rank: int, world: World, by_sockets: bool) -> set[int]:
    """Ranks that it has a channel to. `by_sockets`: also to those that share its layers."""
    neighbours = {world.before(rank), world.after(rank)} - {None}
    return {peer for peer in neighbours if peer is not None} | (
        set(world.stage_ranks(rank)) - {rank} if by_sockets else set()
    )


def meet_peers(
    rank: int,
    peers: Iterable[int],
    addresses: Sequence[Address],
    door: Door,
    key: bytes,
    check: Callable[[], None] = lambda: None,
) -> dict[int, Channel]:
    """`check`: called again and again meanwhile; raises if there is no point in waiting."""
    channels = dict[int, Channel]()
    wanted = set(peers)
    for peer in sorted(peer for peer in wanted if peer < rank):
        channels[peer] = connect(addresses[peer], key, f"worker {peer}", CONNECT_S)
        channels[peer].send(rank.to_bytes(4, "little"))
    until = time.monotonic() + CONNECT_S
    while missing := wanted - set(channels):
        check()
        if time.monotonic() > until:
            raise WorkerLost(
                f"Worker {min(missing)} did not connect to worker {rank} in {CONNECT_S:.0f} s."
            )
        if (channel := door.accept("another worker", _LOOK_S)) is not None:
            peer = int.from_bytes(channel.receive()[:4], "little")
            if peer in missing:
                channel.peer = f"worker {peer}"
                channels[peer] = channel
            else:
                channel.abort()
    return channels


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices that ranks compute on, and their exchange: `collectives` is auto, ipc or nccl."""

    kind: str = "cpu"
    collectives: str = "auto"
    check: Callable[[], None] = lambda: None  # raises if there is no point in waiting for others
    # the network between them has failed
    on_error: Callable[[WorkerLost], None] = lambda error: None


def on_devices(host: Group, devices: Devices) -> Group:
    """The group of the same ranks, for what is on their devices."""
    if devices.kind != "cuda" or host.size == 1:
        return host
    num_hosts = len({host.broadcast_bytes(own_host(), rank) for rank in range(host.size)})
    if devices.collectives == "ipc" and num_hosts > 1:
        raise ConfigError(
            f"Ranks that share layers are on {num_hosts} hosts, and CUDA IPC is for those of one host.",
            fix="Leave --collectives out, or give nccl.",
            param="collectives",
        )
    if devices.collectives != "nccl" and num_hosts == 1:
        return CudaGroup(host)
    shared_id = host.broadcast_bytes(Library().new_id() if host.rank == 0 else b"")
    return GatherGroup(
        host,
        Communicator(shared_id, host.rank, host.size, devices.check, CONNECT_S),
        devices.on_error,
    )


def own_host() -> bytes:
    """Processes with the same can open each other's GPU memory. NCCL_HOSTID says otherwise, to NCCL
    and here."""
    if host_id := os.environ.get("NCCL_HOSTID"):
        return host_id.encode()
    name = platform.node()
    # on Linux: not the name, which containers of one host have of their own
    with suppress(OSError):
        spaces = [os.readlink(f"/proc/self/ns/{namespace}") for namespace in ("pid", "ipc")]
        name = " ".join([Path("/proc/sys/kernel/random/boot_id").read_text(), *spaces])
    return name.encode()


def take_device(rank: int, device: str) -> None:
    """This process computes on the GPU of its rank. If there are fewer GPUs, ranks share them."""
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())


def groups_for(
    rank: int, world: World, shared: str, channels: dict[int, Channel]
) -> dict[Shard, Group]:
    """The groups of the ranks that share the layers of this one, on hosts; those of all of them
    first. `shared`: a file of shared memory, or empty."""
    groups, first = dict[Shard, Group](), 0
    for shard, ranks in world.axes(rank):
        if rank in ranks and shard.size == 1:
            groups[shard] = Alone()
        elif rank in ranks and shared:
            groups[shard] = SharedGroup(Path(shared), shard.rank, shard.size, first=first)
        elif rank in ranks:
            groups[shard] = SocketGroup(
                shard.rank, {i: channels[peer] for i, peer in enumerate(ranks) if peer != rank}
            )
        first += shared_bytes(shard.size)
    return groups


def use_groups(
    rank: int, world: World, shared: str, channels: dict[int, Channel], devices: Devices
) -> tuple[list[Group], Group]:
    """Those of the ranks that share the layers of this one, which its layers use from now on: on
    hosts, and for its device."""
    hosts = groups_for(rank, world, shared, channels)
    groups = {shard: on_devices(host, devices) for shard, host in hosts.items()}
    for shard, group in groups.items():
        use(shard, group)
    return list(
        {id(group): group for group in (*hosts.values(), *groups.values())}.values()
    ), groups[world.shard(rank)]
