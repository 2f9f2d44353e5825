"""Collectives: the same results by shared memory and by sockets, and an error instead of a wait for
who is gone."""

import threading
from contextlib import closing

import numpy as np
import pytest
import torch

from tests.helpers import LONG_S
from tidemill.distributed.channel import Door, connect
from tidemill.distributed.peers import meet_peers
from tidemill.distributed.shared import SharedGroup, make_shared
from tidemill.distributed.sockets import SocketGroup
from tidemill.errors import ConfigError, WorkerLost
from tidemill.kernels import native
from tidemill.kernels.native import structs

KEY = b"a key of the test"
SLOT = 1024  # bytes: most messages below take several


def run(size, make, work):
    """Ranks as threads. What each returned, or raised."""
    results = [None] * size

    def rank_main(rank):
        try:
            with closing(make(rank)) as group:
                results[rank] = work(group)
                group.barrier() if not isinstance(results[rank], Exception) else None
        except WorkerLost as error:
            results[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.fixture(params=["shared", "sockets"])
def make_group(request, tmp_path):
    def prepare(size, deadline_s=LONG_S):
        if request.param == "shared":
            if native.lib is None:
                pytest.skip("shared memory needs the compiled kernels")
            make_shared(tmp_path / "group", size, slot_bytes=SLOT)
            return lambda rank: SharedGroup(tmp_path / "group", rank, size, SLOT, deadline_s)
        doors = [Door(str(tmp_path / f"{rank}.sock"), KEY) for rank in range(size)]
        addresses = [door.address for door in doors]

        def make(rank):
            return SocketGroup(
                rank, meet_peers(rank, set(range(size)) - {rank}, addresses, doors[rank], KEY)
            )

        return make

    return prepare


def check_gathers(group):
    """Of three ranks, along both dimensions, of equal and of different sizes."""
    # ranks are threads, and draw the same
    rank, seeded = group.rank, torch.Generator().manual_seed(1)
    xs = [torch.randn(7, 100, generator=seeded) for _ in range(3)]
    wide = [torch.randn(5, 130 + each, generator=seeded) for each in range(3)]
    long = [torch.randn(40 + each, 33, generator=seeded) for each in range(3)]
    assert torch.equal(
        group.all_gather(wide[rank], 1, [each.shape[1] for each in wide]), torch.cat(wide, 1)
    )
    assert torch.equal(
        group.all_gather(long[rank], 0, [len(each) for each in long]), torch.cat(long)
    )
    assert torch.equal(group.all_gather(xs[rank]), torch.cat(xs, 1))
    few = xs[0][: int(rank == 1)]  # as of a step with fewer tokens than ranks
    assert torch.equal(group.all_gather(few, 0, [0, 1, 0]), xs[0][:1])


def test_every_collective(make_group):
    size = 3
    torch.manual_seed(0)
    xs = [torch.randn(7, 100) * 10**rank for rank in range(size)]
    parts = [
        [torch.randn((3 * rank + other) % 5 * 30, 11) for other in range(size)]
        for rank in range(size)
    ]
    total = xs[0].clone()
    for x in xs[1:]:
        total += x
    assert not torch.equal(total, xs[2] + xs[1] + xs[0])  # the order matters

    def work(group):
        rank = group.rank
        assert torch.equal(group.all_reduce(xs[rank].clone()), total)
        check_gathers(group)
        came = group.all_to_all(parts[rank], [len(parts[other][rank]) for other in range(size)])
        assert all(torch.equal(came[other], parts[other][rank]) for other in range(size))
        assert group.broadcast_bytes(b"plan" * 900 if rank == 1 else b"", 1) == b"plan" * 900
        return True

    assert run(size, make_group(size), work) == [True] * size


def test_a_rank_that_is_gone_is_an_error(make_group):
    def work(group):
        group.all_reduce(torch.ones(2, 3))
        if group.rank == 2:
            group.fail()
            raise WorkerLost("gone")
        group.all_reduce(torch.ones(2, 3))

    assert all(isinstance(result, WorkerLost) for result in run(3, make_group(3), work))


def test_ranks_that_do_different_things_are_an_error(make_group):
    def work(group):
        group.all_reduce(torch.ones(2, 3 + group.rank))

    assert all(isinstance(result, WorkerLost) for result in run(2, make_group(2), work))


@pytest.mark.skipif(native.lib is None, reason="needs the compiled kernels")
def test_a_rank_that_does_not_come_is_waited_for_until_the_deadline(tmp_path):
    make_shared(tmp_path / "group", 2)
    group = SharedGroup(tmp_path / "group", 0, 2, deadline_s=0.05)
    with pytest.raises(WorkerLost, match="in time"):
        group.all_reduce(torch.ones(1, 1))


@pytest.mark.skipif(native.lib is None, reason="needs the compiled kernels")
def test_collectives_are_ops_of_a_recorded_program(tmp_path):
    """Of one rank, whose neighbour is it itself: what it gathers is its own, and a message."""
    doubled = structs.COLLECTIVE(double_it)
    spec = structs.GroupSpec(0, 2, 0, 0, None, doubled)
    address, x = native.ctypes.addressof(spec), torch.randn(4, 8)
    with native.lib.recording() as recording:
        given = x.clone()
        wide = native.lib.all_gather(address, given, 16)
        native.lib.all_reduce(address, wide)
        native.lib.add(wide, wide, 0.5)
    program = recording.compile(given, wide)
    for num_rows in (4, 1, 7):
        rows = torch.randn(num_rows, 8)
        expected = torch.cat([rows, rows], 1) * 2 * 1.5
        assert torch.equal(native.lib.replay(program, rows, 0), expected)


def double_it(what, x, out, num_rows, width, num_out):
    def array(place, columns):
        return np.ctypeslib.as_array(
            (native.ctypes.c_float * (num_rows * columns)).from_address(place)
        ).reshape(num_rows, -1)

    if what == 0:
        array(x, width)[:] *= 2
    else:
        array(out, num_out)[:] = np.concatenate([array(x, width)] * 2, 1)
    return 0


def test_who_does_not_know_the_key_is_not_let_in(tmp_path):
    door, results = Door(str(tmp_path / "door"), KEY), []
    listening = threading.Thread(target=lambda: results.append(door.accept("anybody", 30.0)))
    listening.start()
    with pytest.raises(ConfigError, match="another key"):
        connect(door.address, b"some other key", "rank 0", 1.0)
    listening.join()
    assert results == [None]
    assert (tmp_path / "door").stat().st_mode & 0o777 == 0o600


def test_nobody_at_the_address_is_an_error():
    with closing(Door(("127.0.0.1", 0), KEY)) as door:
        address = door.address
    with pytest.raises(ConfigError, match=f"Cannot reach rank 0 at 127.0.0.1:{address[1]}"):
        connect(address, KEY, "rank 0", 0.0)
