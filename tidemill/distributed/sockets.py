"""SocketGroup: ranks on several hosts, each with a channel to every other. What they exchange is
what SharedGroup does."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from tidemill.distributed.channel import Channel
from tidemill.errors import WorkerLost
from tidemill.kernels import native
from tidemill.kernels.native import structs

_ALL_REDUCE = 0  # of tidemill.h


class SocketGroup:
    def __init__(self, rank: int, channels: dict[int, Channel]) -> None:
        """`channels`: by rank, to every other."""
        self.rank, self.size, self._channels = rank, len(channels) + 1, channels
        self._why = ""
        if native.lib is not None:
            self._call = structs.COLLECTIVE(self._from_c)
            self._spec = structs.GroupSpec(rank, self.size, 0, 0, None, self._call)
            self._address = ctypes.addressof(self._spec)

    def begin(self) -> None:
        return

    def all_reduce(self, x_TN: torch.Tensor) -> torch.Tensor:
        if native.lib is not None and x_TN.device.type == "cpu":
            self._checked(lambda: native.lib.all_reduce(self._address, x_TN))  # type: ignore[union-attr]
        else:
            x_TN.copy_(torch.from_numpy(self._sum(x_TN.numpy(force=True))))
        return x_TN

    def all_gather(
        self, x: torch.Tensor, dim: int = -1, sizes: Sequence[int] | None = None
    ) -> torch.Tensor:
        dim %= 2
        total = sum(sizes) if sizes else self.size * x.shape[dim]
        if dim == 1 and native.lib is not None and x.device.type == "cpu":
            gathered: list[torch.Tensor] = []
            self._checked(lambda: gathered.append(native.lib.all_gather(self._address, x, total)))  # type: ignore[union-attr]
            return gathered[0]
        shape = (-1, x.shape[1]) if dim == 0 else (x.shape[0], -1)
        parts = [_values(each, x.dtype).view(shape) for each in self._exchange(_bytes(x))]
        return torch.cat(parts, dim).to(x.device)

    def all_to_all(
        self, parts: Sequence[torch.Tensor], counts: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        width = parts[0].shape[1]
        for rank, channel in self._channels.items():
            channel.send(_bytes(parts[rank]))
        taken = []
        for rank in range(self.size):
            if rank == self.rank:
                taken.append(parts[rank])
            else:
                received = self._channels[rank].receive()
                taken.append(
                    torch.from_numpy(np.frombuffer(received, np.float32).copy()).view(-1, width)
                )
        assert counts is None or [len(piece) for piece in taken] == list(counts)
        return taken

    def broadcast_bytes(self, data: bytes = b"", source: int = 0) -> bytes:
        if self.rank != source:
            return self._channels[source].receive()
        for channel in self._channels.values():
            channel.send(data)
        return data

    def barrier(self) -> None:
        self._exchange(b"")

    def fail(self) -> None:
        for channel in self._channels.values():
            channel.abort()

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()

    def _exchange(self, shown: bytes) -> list[bytes]:
        for channel in self._channels.values():
            channel.send(shown)
        return [
            shown if rank == self.rank else self._channels[rank].receive()
            for rank in range(self.size)
        ]

    def _sum(self, x: np.ndarray) -> np.ndarray:
        parts = self._exchange(x.tobytes())
        if len({len(part) for part in parts}) > 1:
            raise WorkerLost(
                "The engine cannot go on: the workers of the group do not compute the same step."
            )
        total = np.frombuffer(parts[0], np.float32).reshape(x.shape).copy()
        for part in parts[1:]:
            total += np.frombuffer(part, np.float32).reshape(x.shape)
        return total

    def _from_c(self, what: int, x: int, out: int, num_rows: int, width: int, num_out: int) -> int:
        """An op of the recorded forward pass. What goes wrong is raised once it has returned."""
        try:
            array = _array(x, (num_rows, width))
            if what == _ALL_REDUCE:
                array[:] = self._sum(array)
            else:
                parts = [
                    np.frombuffer(each, np.float32).reshape(num_rows, -1)
                    for each in self._exchange(array.tobytes())
                ]
                np.concatenate(parts, 1, out=_array(out, (num_rows, num_out)))
        except WorkerLost as error:
            self._why = error.message
            return -2
        except ValueError:
            return -4
        except Exception as error:  # ctypes would take it for success
            self._why = f"An exchange between ranks failed: {type(error).__name__}."
            return -2
        return 0

    def _checked(self, call: object) -> None:
        assert callable(call)
        try:
            call()
        except WorkerLost as error:
            raise WorkerLost(self._why or error.message) from error


def _bytes(x: torch.Tensor) -> bytes:
    return x.contiguous().numpy(force=True).tobytes()


def _array(address: int, shape: tuple[int, int]) -> np.ndarray:
    num = shape[0] * shape[1]
    return np.ctypeslib.as_array((ctypes.c_float * num).from_address(address)).reshape(shape)


def _values(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    """Also of a rank that has none, which torch.frombuffer refuses."""
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
