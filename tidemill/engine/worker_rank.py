"""A rank of a group, other than the engine's: joins, loads its part, computes the plans it gets."""

from __future__ import annotations

import sys
import time
import traceback
from collections import deque
from functools import partial
from itertools import count
from typing import Any

from tidemill.config import EngineConfig
from tidemill.distributed.channel import Address, Door, connect
from tidemill.distributed.peers import Devices, meet_peers, peers_of, take_device, use_groups
from tidemill.engine.kv_tiers import open_outside
from tidemill.engine.load import inspect
from tidemill.errors import ConfigError, TidemillError, WorkerLost
from tidemill.kernels import machine
from tidemill.kv.tiers import Moved
from tidemill.layers.lora import Loras
from tidemill.runner.base import StepResult
from tidemill.runner.cpu_runner import CpuRunner
from tidemill.runner.group_loras import put_own, received
from tidemill.runner.layer_timer import LayerTimer
from tidemill.runner.make import make_mover
from tidemill.runner.page_moves import Outside, PageMover
from tidemill.runner.rank import load_rank, make_rank_runner
from tidemill.runner.team import error_of, own_kernels
from tidemill.runner.worker_group import Launched, RankRunner, append, drawn_in, launch
from tidemill.runner.worker_messages import (
    Change,
    Drawn,
    Failed,
    FromWorker,
    Hello,
    Join,
    Loaded,
    Loading,
    PageMoved,
    Prepare,
    Prepared,
    PutAdapter,
    Result,
    Step,
    TakeTimes,
    TookTimes,
    ToWorker,
    decode_to_worker,
    encode,
)
from tidemill.version import __version__
from tidemill.weights.digest import fingerprint_of

_FIRST_S = 60.0
_TRIES, _PAUSE_S = 25, 0.2


class Worker:
    def __init__(self, start: dict[str, Any]) -> None:
        """`start`: address and key of rank 0; the rank, or none; where to listen, or none; the
        model, if it lies elsewhere."""
        place = start["address"]
        address: Address = place if isinstance(place, str) else (place[0], int(place[1]))
        self._key, self._model, self._rank = (
            bytes.fromhex(start["key"]),
            start.get("model"),
            start.get("rank", -1),
        )
        self._threads = start.get("threads")
        self._host = None if isinstance(address, str) else address[0]
        self._channel = connect(address, self._key, "rank 0", start.get("within_s", _FIRST_S))
        self._door = Door(start.get("listen") or (self._channel.own_host, 0), self._key)

    def run(self) -> int:
        """The process's exit code: 0 in good order, 1 if the group failed, 2 if it cannot be
        joined."""
        is_remote = self._rank < 0
        try:
            self._run()
            return 0
        except TidemillError as error:
            self._tell(error)
            if is_remote:  # others are told by rank 0
                print(f"error: {error}", file=sys.stderr)
            return 2 if isinstance(error, ConfigError) else 1
        except Exception as error:
            traceback.print_exc()
            self._send(
                Failed("WorkerLost", f"Worker {self._rank} failed: {type(error).__name__}: {error}")
            )
            return 1
        finally:
            self._channel.close()

    def _send(self, message: FromWorker) -> None:
        self._channel.send(encode(message))

    def _tell(self, error: TidemillError) -> None:
        self._send(Failed(type(error).__name__, error.message, error.fix, error.param))

    def _receive(self) -> ToWorker:
        return decode_to_worker(self._channel.receive())

    def _run(self) -> None:
        self._send(Hello(__version__, own_kernels(), self._door.address, self._rank))
        join = self._receive()
        if isinstance(join, Failed):
            raise error_of(join)
        assert isinstance(join, Join)
        self._rank = join.rank
        runner = self._prepare(join)
        if runner is None:
            return
        try:
            self._compute(runner, join)
        finally:
            if runner.mover is not None:
                runner.mover.close()

    def _prepare(self, join: Join) -> RankRunner | None:
        """The runner, or None if the group ends before."""
        rank, world, config = join.rank, join.world, join.config
        machine.set_threads(self._threads or config.threads)
        checkpoint, architecture, model_config = inspect(self._model or join.options.model)
        if fingerprint_of(checkpoint.path) != join.model:
            what = f"Worker {rank} has another model than rank 0 at {checkpoint.path}."
            raise ConfigError(what, fix="Give all hosts the same files.", param="model")
        addresses = list(join.addresses)
        if self._host is not None and not isinstance(addresses[0], str):
            addresses[0] = (self._host, addresses[0][1])  # as this host reaches it
        peers = peers_of(rank, world, by_sockets=world.tensor > 1 and not join.shared)
        channels = meet_peers(rank, peers, addresses, self._door, self._key)
        take_device(rank, config.device)
        devices = Devices(config.device, config.collectives, self._channel.check, self._tell)
        groups, group = use_groups(rank, world, join.shared, channels, devices)
        if config.device == "cuda":  # whose kernels would wait for ranks that are gone
            for member in groups:
                self._channel.when_gone(member.fail)
        random = join.options.load_format == "dummy"
        model = load_rank(
            architecture,
            checkpoint,
            model_config,
            config,
            world,
            rank,
            lambda name, done, total: self._send(Loading(done, total)),
            random,
            join.shared,
        )
        self._send(Loaded(model.num_bytes_read))
        prepare = self._receive()
        if not isinstance(prepare, Prepare):
            return None
        runner, no_disk = make_rank_runner(model, config, world, rank, channels), ""
        if config.has_tiers:
            weights = prepare.weights + bytes([model.config.has_long_factors(config.max_context)])
            outside, no_disk = self._open_outside(runner, config, weights)
            runner.mover = make_mover(runner, config, outside)
            runner.mover.report_to = partial(self._report, runner.mover)
        self._send(
            Prepared(runner.fallback, {} if runner.loras is None else runner.loras.shapes, no_disk)
        )
        group.begin()
        return runner

    def _open_outside(
        self, runner: RankRunner, config: EngineConfig, weights: bytes
    ) -> tuple[Outside, str]:
        """The store outside, and why there is no file, if there should be one."""
        problems = list[str]()
        for attempt in count(1):
            outside, opened = open_outside(runner, config, weights, self._rank, problems.append)
            if opened is not None or not config.kv_disk:
                return outside, ""
            if attempt == _TRIES:
                break
            outside.close()
            time.sleep(_PAUSE_S)  # a rank of the engine before may still have the file
        return outside, f"worker {self._rank}: {problems[-1]}"

    def _report(self, mover: PageMover, moved: Moved) -> None:
        mover.written.pop(moved.number, None)  # rank 0 sees to it that other engines know
        self._send(PageMoved(moved))

    def _compute(self, runner: RankRunner, join: Join) -> None:
        samples, is_heard = join.rank >= join.world.sampler, join.rank == join.world.sampler
        flying, drawn = deque[Launched](), dict[int, list[Drawn]]()
        timer: LayerTimer | None = None
        while True:
            message = self._receive()
            if isinstance(message, Step):
                if not samples:
                    append(runner.state, message.drawn)
                while samples and flying and flying[0].plan.step <= message.drawn_in:
                    self._collect(runner, flying, drawn)
                drawn = {step: tokens for step, tokens in drawn.items() if step >= message.drawn_in}
                if samples and drawn.get(message.drawn_in, []) != message.drawn:
                    raise WorkerLost(
                        f"Worker {join.rank} drew other tokens than the rank whose tokens count."
                    )
                flying.append(launch(runner, message.plan))
                while len(flying) > runner.steps_ahead:
                    result = self._collect(runner, flying, drawn)
                    if is_heard:
                        self._send(Result.of(message.plan.step, result))
            elif isinstance(message, PutAdapter):
                assert isinstance(runner.loras, Loras)
                put_own(runner.loras, message.slot, received(message))
            elif isinstance(message, TakeTimes):
                assert isinstance(runner, CpuRunner)
                timer = timer or runner.time_layers()
                self._send(TookTimes(timer.take()))
            elif isinstance(message, Change):
                runner.change_pages(message.plan)
            else:
                return

    def _collect(
        self, runner: RankRunner, flying: deque[Launched], drawn: dict[int, list[Drawn]]
    ) -> StepResult:
        launched = flying.popleft()
        result = runner.collect(launched.own)
        drawn[launched.plan.step] = drawn_in(launched, result)
        return result
