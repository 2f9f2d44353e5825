"""Cluster: the connection to Ray, and actors on its nodes."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from dataclasses import dataclass, replace
from typing import Any

from tidemill.config import EngineOptions
from tidemill.errors import ConfigError
from tidemill.version import __version__

INSTALL = "pip install 'tidemill[ray]'"
START_S = 180.0  # for an actor that has a place to run; nodes may be slow to import
_CONNECT_S = 10.0
_log = logging.getLogger("tidemill.cluster.ray")


class NoRoom(OSError):
    """No node of the cluster has what an actor needs, at the moment."""


@dataclass(frozen=True)
class Needs:
    """The resources that an actor takes of its node."""

    num_cpus: int = 1
    num_gpus: int = 0

    def limit(self, options: EngineOptions) -> EngineOptions:
        """Replicas of one node share its cores."""
        if self.num_gpus:
            return options
        ranks = options.tensor_parallel * options.pipeline_parallel
        return replace(
            options, device="cpu", threads=options.threads or max(1, self.num_cpus // ranks)
        )

    def __str__(self) -> str:
        return f"{self.num_cpus} CPUs" + (f" and {self.num_gpus} GPUs" if self.num_gpus else "")


def import_ray() -> Any:
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ConfigError(
            "Ray is not installed.", fix=f"Install it: {INSTALL}", param="ray"
        ) from error
    return ray


class Cluster:
    """Connects to an existing cluster, or starts one on this machine. `wait_s`: for a node with
    room for an actor."""

    def __init__(self, address: str | None = None, wait_s: float = 15.0) -> None:
        ray = self._ray = import_ray()
        self.wait_s = wait_s
        address = address or os.environ.get("RAY_ADDRESS")
        if address and address.startswith("ray://"):
            fix = "Run this on a node of the cluster, with --ray-address auto."
            raise ConfigError(
                f"{address} is an address of Ray's client proxy.", fix=fix, param="ray_address"
            )
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            _check_somebody_listens(address)
            options: dict[str, Any] = {} if address else {"include_dashboard": False}
            logging.getLogger("ray").setLevel(logging.ERROR)
            try:
                ray.init(address=address or "local", logging_level=logging.ERROR, **options)
            except Exception as error:  # of many types, also plain Exception
                where = f"at {address}" if address else "on this machine"
                fix = (
                    "Check --ray-address (or RAY_ADDRESS), and `ray status`."
                    if address
                    else "See the messages above."
                )
                raise ConfigError(
                    f"No Ray cluster can be used {where}: {_first(error)}",
                    fix=fix,
                    param="ray_address",
                ) from error

    @property
    def errors(self) -> tuple[type[BaseException], ...]:
        """The errors that a call raises if its actor has failed or is not there any more."""
        found = self._ray.exceptions
        return (
            found.RayActorError,
            found.RayTaskError,
            found.RaySystemError,
            found.ObjectLostError,
            found.NodeDiedError,
            found.WorkerCrashedError,
        )

    def nodes(self) -> list[dict[str, float]]:
        """Resources of each node that is alive."""
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]

    def needs_of(self, options: EngineOptions, num_replicas: int) -> Needs:
        """On GPUs each rank has one. On CPUs a replica has as many as it has threads: by default
        its share of the cluster."""
        nodes, ranks = self.nodes(), options.tensor_parallel * options.pipeline_parallel
        has_gpus = any(node.get("GPU", 0) for node in nodes)
        if options.device == "cuda" or (options.device == "auto" and has_gpus):
            return Needs(ranks, ranks)
        if options.threads is not None:
            return Needs(options.threads * ranks)
        cpus = sorted((int(node.get("CPU", 0)) for node in nodes), reverse=True)
        share = sum(cpus) // max(num_replicas, 1)
        return Needs(max(min(share, cpus[0] if cpus else 1), ranks, 1))

    async def reserve(self, needs: Needs, num: int) -> Any:
        """A placement group: room for so many actors, spread over the nodes; all of it, or none and
        NoRoom."""
        bundle = {"CPU": needs.num_cpus} | ({"GPU": needs.num_gpus} if needs.num_gpus else {})
        group = self._ray.util.placement_group([bundle] * num, strategy="SPREAD")
        try:
            await asyncio.wait_for(_awaited(group.ready()), self.wait_s)
        except BaseException as error:
            self.release(group)
            if not isinstance(error, TimeoutError):
                raise
            raise NoRoom(
                f"{num} x {needs} cannot be placed within {self.wait_s:g} s; {self.described()}"
            ) from None
        return group

    def release(self, *groups: Any) -> None:
        """Releases the room and what is in it."""
        for group in groups:
            self._ray.util.remove_placement_group(group)

    async def place(self, kind: type, needs: Needs, num: int = 1, group: Any = None) -> list[Any]:
        """Places so many actors, spread over the nodes: all of them, or none and NoRoom. `group`:
        in the room that it has."""
        remote = self._ray.remote(kind).options(
            num_cpus=needs.num_cpus,
            num_gpus=needs.num_gpus,
            scheduling_strategy="SPREAD" if group is None else self._in_group(group),
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=1000,
        )
        free = self._num_free(needs)
        actors = [remote.remote() for _ in range(num)]
        answers = [asyncio.create_task(_awaited(actor.info.remote())) for actor in actors]
        try:
            found = await _all_of(answers, self.wait_s)
            # a group's place is reserved
            if found is None and group is None and free - self._num_free(needs) < num:
                raise NoRoom(
                    f"{num} x {needs} cannot be placed within {self.wait_s:g} s; {self.described()}"
                )
            found = found or await _all_of(answers, START_S)
            if found is None:
                raise NoRoom(f"{num} x {needs} have a place and did not start within {START_S:g} s")
        except self.errors as error:
            self.kill(*actors)
            raise NoRoom(
                f"a node was lost while {num} x {needs} were placed ({type(error).__name__})"
            ) from error
        except BaseException:
            self.kill(*actors)
            raise
        finally:
            for answer in answers:
                answer.cancel()  # of those that will not come
            await asyncio.gather(*answers, return_exceptions=True)
        for info in found:
            if info.version != __version__:
                self.kill(*actors)
                what = (
                    f"The node {info.host} has tidemill {info.version}, this machine {__version__}."
                )
                raise ConfigError(what, fix="Install the same version on all nodes.", param="ray")
        return actors

    def _in_group(self, group: Any) -> Any:
        return self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group)

    def _num_free(self, needs: Needs) -> int:
        """Actors for which the cluster has room, if that were all on one node."""
        free = self._ray.available_resources()
        rooms = {"GPU": needs.num_gpus, "CPU": needs.num_cpus}
        return min(int(free.get(name, 0) // num) for name, num in rooms.items() if num)

    def described(self) -> str:
        """The resources of the cluster, and the free ones."""
        free, total = self._ray.available_resources(), self._ray.cluster_resources()
        parts = [
            f"{free.get(name, 0):g} of {total[name]:g} {name}s"
            for name in ("CPU", "GPU")
            if total.get(name)
        ]
        return f"the cluster has {len(self.nodes())} nodes, and {' and '.join(parts) or 'nothing'} free"

    def kill(self, *actors: Any) -> None:
        for actor in actors:
            try:
                self._ray.kill(actor)
            except Exception:  # it is gone already
                _log.debug("an actor could not be killed", exc_info=True)

    def close(self) -> None:
        """Ends the actors, and the cluster if it was started here."""
        if self._is_ours:
            self._ray.shutdown()


def _check_somebody_listens(address: str | None) -> None:
    """Ray itself would try for many minutes."""
    host, _, port = (address or "").rpartition(":")
    if not host or not port.isdecimal():  # auto, local
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except (OSError, OverflowError) as error:
        fix = "Check --ray-address (or RAY_ADDRESS), and `ray status`."
        raise ConfigError(
            f"No Ray cluster can be used at {address}: {error}.", fix=fix, param="ray_address"
        ) from error


async def _all_of(answers: list[asyncio.Task[Any]], within_s: float) -> list[Any] | None:
    """None: some do not come within that time. Raises what one of them fails with."""
    done, missing = await asyncio.wait(
        answers, timeout=within_s, return_when=asyncio.FIRST_EXCEPTION
    )
    found = [task.result() for task in done]
    return None if missing else found


async def _awaited(ref: Any) -> Any:
    return await ref


def _first(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
