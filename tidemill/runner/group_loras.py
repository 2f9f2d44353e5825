"""GroupLoras: the adapters of all ranks, as one. An adapter goes to every rank whole, and each
keeps what belongs to its part."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch

from tidemill.distributed.channel import MAX_BYTES
from tidemill.errors import AdapterError
from tidemill.kernels.lora import Pair
from tidemill.layers.lora import Loras
from tidemill.runner.team import Team
from tidemill.runner.worker_messages import PutAdapter, SentPair, encode

_SPARE = 2**20  # of a message, for what is around the matrices


class ReceivedPair(msgspec.Struct, frozen=True):
    down_RK: torch.Tensor
    up_NR: torch.Tensor
    scale: float


class GroupLoras:
    def __init__(self, own: Loras, team: Team, shapes: dict[str, tuple[int, int]]) -> None:
        """`own`: of rank 0. `shapes`: of the matrices that an adapter may change, on all ranks."""
        self._own, self._team, self.shapes = own, team, shapes

    def put(self, slot: int, pairs: Mapping[str, Pair]) -> None:
        sent = {name: _sent(pair) for name, pair in pairs.items()}
        num_bytes = sum(len(pair.down) + len(pair.up) for pair in sent.values())
        if num_bytes > MAX_BYTES - _SPARE:
            raise AdapterError(
                f"The adapter has {num_bytes} bytes, and ranks take {MAX_BYTES} at once.",
                fix="Use a lower rank.",
            )
        self._team.send_encoded(encode(PutAdapter(slot, sent)))
        put_own(self._own, slot, pairs)


def put_own(loras: Loras, slot: int, pairs: Mapping[str, Pair]) -> None:
    """Those of a rank's layers; other stages have the others."""
    own = loras.shapes
    loras.put(slot, {name: pair for name, pair in pairs.items() if name in own})


def received(message: PutAdapter) -> dict[str, Pair]:
    return {name: _received(pair) for name, pair in message.pairs.items()}


def _sent(pair: Pair) -> SentPair:
    down, up = (one.float().contiguous().numpy().tobytes() for one in (pair.down_RK, pair.up_NR))
    return SentPair(pair.down_RK.shape[0], down, up, pair.scale)


def _received(pair: SentPair) -> Pair:
    down, up = (
        torch.frombuffer(bytearray(one), dtype=torch.float32) for one in (pair.down, pair.up)
    )
    return ReceivedPair(down.view(pair.rank, -1), up.view(-1, pair.rank), pair.scale)
