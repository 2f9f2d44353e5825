"""Starting a group of ranks from the engine's process: all of them, or none."""

from __future__ import annotations

from tidemill.config import EngineConfig, EngineOptions
from tidemill.config.keys import read_key
from tidemill.config.parallel import workers_address
from tidemill.distributed.peers import Devices, meet_peers, peers_of, take_device, use_groups
from tidemill.errors import TidemillError, WorkerLost
from tidemill.models.base import Model, ProgressFn
from tidemill.runner.rank import load_rank, make_rank_runner, world_of
from tidemill.runner.team import Team
from tidemill.runner.worker_group import WorkerGroup
from tidemill.runner.worker_messages import Join, Loaded, Prepare, Prepared
from tidemill.types.model_config import ModelConfig
from tidemill.weights.checkpoint import Checkpoint
from tidemill.weights.digest import fingerprint_of


def start_group(
    options: EngineOptions,
    checkpoint: Checkpoint,
    architecture: type[Model],
    model_config: ModelConfig,
    config: EngineConfig,
    progress: ProgressFn | None = None,
    weights: bytes = b"",
) -> tuple[Model, WorkerGroup]:
    """Rank 0's part of the model, and the group. `weights`: a digest of them, if KV pages are
    compared with those of others."""
    world = world_of(config, model_config, config.pipeline_layers)
    key = (
        read_key(options.workers_key_file)
        if options.remote_workers and options.workers_key_file
        else b""
    )
    team = Team(world, options.remote_workers, workers_address(options), key)
    tell = progress or (lambda name, done, total: None)
    try:
        total = checkpoint.num_bytes if checkpoint.has_weights else 0
        team.start(lambda text: tell(text, 0, total))
        shared = {rank: team.shared_memory(rank) for rank in range(world.size)}
        model_digest = fingerprint_of(checkpoint.path)
        team.join(
            lambda rank: Join(
                rank, world, options, config, model_digest, team.addresses, shared[rank]
            )
        )
        peers = peers_of(0, world, by_sockets=world.tensor > 1 and not shared[0])
        channels = meet_peers(0, peers, team.addresses, team.door, team.key, team.check)
        take_device(0, config.device)
        devices = Devices(config.device, config.collectives, team.check, team.fail)
        groups, group = use_groups(0, world, shared[0], channels, devices)
        team.on_lost += [
            *(group.fail for group in groups),
            *(channel.abort for channel in channels.values()),
        ]
        team.on_closed += [group.close for group in groups]
        random = options.load_format == "dummy"
        model = load_rank(
            architecture, checkpoint, model_config, config, world, 0, progress, random, shared[0]
        )
        loaded = team.wait(
            Loaded,
            lambda rank, message: tell(f"worker {rank}", message.done_bytes, message.total_bytes),
        )
        team.all_are_here()
        team.read_bytes = [
            model.num_bytes_read,
            *(loaded[rank].read_bytes for rank in sorted(loaded)),
        ]
        team.send_all(Prepare(weights))
        own = make_rank_runner(model, config, world, 0, channels)
        shapes, no_disk = dict[str, tuple[int, int]](), ""
        for prepared in team.wait(Prepared).values():
            own.fallback = own.fallback or prepared.fallback
            shapes |= prepared.shapes
            no_disk = no_disk or prepared.no_disk
        group.begin()
        return model, WorkerGroup(own, team, shapes, no_disk)
    except WorkerLost as error:
        team.fail(error)
        team.close()
        assert team.lost is not None
        raise team.lost from error  # the first reason
    except BaseException as error:
        team.fail(
            error
            if isinstance(error, TidemillError)
            else WorkerLost("The group could not be started.")
        )
        team.close()
        raise
