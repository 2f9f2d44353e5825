"""Two lanes: the halves of a step on two streams, so that one half's attention runs beside the
other's matmuls.

Each half is the model's own forward pass, in a thread of its own; one of the two threads runs at a
time, and they change over after each layer's attention. So launches are issued, and captured, in
one order: attention of the first half, attention of the second half, the next layer's of the first,
and so on. On the GPU each of these waits for the one before (`in_order`), and everything else runs
as it can. The second half may read keys and values that the first one wrote: its attention comes
later. The first never reads those of the second.

Collectives, too, keep the order in which they were issued: all ranks then have them in the same
order, and no two are under way at a time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

_here = threading.local()
# of the second thread
new_context: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext


def lane() -> int:
    """The lane of the caller: what both lanes would write to must be there for each."""
    number: int = getattr(_here, "number", 0)
    return number


@contextlib.contextmanager
def in_order(kind: str) -> Iterator[None]:
    """Orders launches: what is launched inside starts after what the other lane launched last
    inside the same kind, and is done."""
    lanes: Lanes | None = getattr(_here, "lanes", None)
    if lanes is None:
        yield
        return
    stream, before = torch.cuda.current_stream(), lanes.last.get(kind)
    if before is not None and before[0] != lane():
        stream.wait_event(before[1])
    yield
    event = torch.cuda.Event()
    event.record(stream)
    lanes.last[kind] = lane(), event


def change_over() -> None:
    """The other lane goes on, until it changes over or is done."""
    lanes: Lanes | None = getattr(_here, "lanes", None)
    if lanes is not None:
        lanes.change_over()


class Lanes:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        """`stream`: of the second lane; the first has the current one."""
        self._stream = stream
        self._may_run = threading.Semaphore(0), threading.Semaphore(0)
        self._is_done = [False, False]
        self.last: dict[str, tuple[int, torch.cuda.Event]] = {}

    def change_over(self) -> None:
        mine = lane()
        if not self._is_done[1 - mine]:
            self._may_run[1 - mine].release()
            self._may_run[mine].acquire()

    def run(
        self, first: Callable[[], torch.Tensor], second: Callable[[], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both, from what the current stream has done, which then waits for both. Called once."""
        stream, made, failed = (
            torch.cuda.current_stream(),
            list[torch.Tensor](),
            list[BaseException](),
        )
        self._stream.wait_stream(stream)

        def run_second() -> None:
            self._may_run[1].acquire()
            try:
                with new_context(), torch.cuda.stream(self._stream), torch.inference_mode():
                    made.append(self._in_lane(1, second))
            except BaseException as error:  # is raised where both are awaited
                failed.append(error)
            finally:
                self._end(1)

        thread = threading.Thread(target=run_second, name="second lane", daemon=True)
        thread.start()
        try:
            one = self._in_lane(0, first)
        finally:
            self._end(0)
            thread.join()
        stream.wait_stream(self._stream)
        if failed:
            raise failed[0]
        return one, made[0]

    def _in_lane(self, number: int, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        _here.lanes, _here.number = self, number
        try:
            return work()
        finally:
            del _here.lanes, _here.number

    def _end(self, number: int) -> None:
        self._is_done[number] = True
        self._may_run[1 - number].release()
