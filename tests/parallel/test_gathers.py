"""Collectives over a library that only gathers: gloo here, NCCL on GPUs. The same results, and the
same bits, as by sockets."""

import contextlib
import threading
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.helpers import LONG_S
from tests.parallel.test_group import KEY, check_gathers, run
from tests.test_config import LARGE, SMOLLM2
from tidemill.capabilities import asked, check
from tidemill.config import EngineOptions, resolve
from tidemill.config.parallel import decide_collectives
from tidemill.distributed import gathers, peers
from tidemill.distributed.channel import Door, connect
from tidemill.distributed.gathers import GatherGroup
from tidemill.distributed.group import Alone
from tidemill.distributed.peers import Devices, meet_peers, on_devices, own_host
from tidemill.distributed.sockets import SocketGroup
from tidemill.errors import ConfigError, WorkerLost
from tidemill.kernels.cuda import nccl


class Gloo:
    """As `nccl.Communicator`, for tensors of a CPU. `path`: where ranks find each other."""

    def __init__(self, path, rank, size):
        self.error, self._is_ended = "", False
        self._group = dist.ProcessGroupGloo(dist.FileStore(str(path), size), rank, size)

    def all_gather(self, x, out):
        if self._is_ended:
            raise WorkerLost("gone")
        self._group._allgather_base(out.view(-1).view(torch.uint8), x.view(torch.uint8)).wait()

    def all_to_all(self, x, out):
        self._group.alltoall_base(
            out.view(-1).view(torch.uint8), x.view(torch.uint8), [], []
        ).wait()

    def end(self):
        self._is_ended = True


@pytest.fixture
def make_host(tmp_path):
    """The group of hosts, of so many ranks, by rank."""

    def prepare(size):
        doors = [Door(str(tmp_path / f"{rank}.sock"), KEY) for rank in range(size)]
        addresses = [door.address for door in doors]
        return lambda rank: SocketGroup(
            rank, meet_peers(rank, set(range(size)) - {rank}, addresses, doors[rank], KEY)
        )

    return prepare


@pytest.fixture
def make_group(make_host, tmp_path):
    def prepare(size):
        host = make_host(size)

        def make(rank):
            group = GatherGroup(host(rank), Gloo(tmp_path / "gloo", rank, size))
            group.begin()
            return group

        return make

    return prepare


def test_every_collective_as_by_sockets(make_group):
    size = 3
    torch.manual_seed(0)
    xs = [torch.randn(7, 100) * 10**rank for rank in range(size)]
    halves = [x.bfloat16() for x in xs]
    total, half = (
        xs[0] + xs[1] + xs[2],
        (halves[0].float() + halves[1].float() + halves[2].float()).bfloat16(),
    )
    assert not torch.equal(total, xs[2] + xs[1] + xs[0])  # the order matters

    def work(group):
        rank = group.rank
        own = xs[rank].clone()
        assert group.all_reduce(own) is own
        assert torch.equal(own, total)
        assert torch.equal(group.all_reduce(halves[rank].clone()), half)
        check_gathers(group)
        came = group.all_to_all([halves[rank][: other + 1] for other in range(size)])
        assert all(torch.equal(one, halves[other][: rank + 1]) for other, one in enumerate(came))
        assert group.broadcast_bytes(b"plan" if rank == 1 else b"", 1) == b"plan"
        return True

    assert run(size, make_group(size), work) == [True] * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_sums_are_shared_out_and_the_same(dtype, make_group, monkeypatch):
    monkeypatch.setattr(gathers, "_LARGE_BYTES", 1)
    # 217 values: ranks have 73, 73 and 71
    xs = [(torch.randn(7, 31) * 10**rank).to(dtype) for rank in range(3)]
    total = (xs[0].float() + xs[1].float() + xs[2].float()).to(dtype)

    def work(group):
        own = xs[group.rank].clone()
        assert group.all_reduce(own) is own
        return torch.equal(own, total)

    assert run(3, make_group(3), work) == [True] * 3


def test_before_all_begin_nobody_is_waited_for():
    group = GatherGroup(Alone(), wire := CountingWire())
    x = torch.randn(2, 3)
    assert group.all_reduce(x) is x
    assert group.all_gather(x).shape == (2, 3)
    assert not wire.gathered
    group.begin()
    group.all_reduce(x)
    assert wire.gathered == 1
    group.close()


class CountingWire:
    """A wire of one rank that counts, and fails when it is told to."""

    def __init__(self):
        self.gathered, self.error, self.has_ended = 0, "", threading.Event()

    def all_gather(self, x, out):
        self.gathered += 1
        out.copy_(x.view(1, -1))

    def end(self):
        self.has_ended.set()


def test_a_rank_that_is_gone_ends_whoever_waits(make_group):
    def work(group):
        group.all_reduce(torch.ones(2, 3))
        group.fail()
        group.all_reduce(torch.ones(2, 3))

    assert all(isinstance(result, WorkerLost) for result in run(2, make_group(2), work))


def test_an_error_of_the_network_is_told_unless_there_is_a_better_reason(monkeypatch):
    monkeypatch.setattr(gathers, "_LOOK_S", 0.01)
    monkeypatch.setattr(gathers, "_PATIENCE_S", 0.01)
    told, is_told = [], threading.Event()
    wire = CountingWire()
    GatherGroup(Alone(), wire, lambda error: (told.append(error.message), is_told.set()))
    wire.error = "remote error (cable)"
    assert is_told.wait(LONG_S)
    assert "cable" in told[0]

    monkeypatch.setattr(gathers, "_PATIENCE_S", LONG_S)
    before, wire = set(threading.enumerate()), CountingWire()
    group = GatherGroup(Alone(), wire, lambda error: told.append(error.message))
    (watcher,) = set(threading.enumerate()) - before
    wire.error = "remote error (its process ended)"
    group.fail()
    assert wire.has_ended.wait(LONG_S)
    watcher.join(LONG_S)
    assert len(told) == 1


# ---- which of both


@pytest.mark.parametrize(
    ("collectives", "hosts", "chosen"),
    [
        ("auto", "aa", "ipc"),
        ("ipc", "aa", "ipc"),
        ("nccl", "aa", "nccl"),
        ("auto", "ab", "nccl"),
        ("nccl", "ab", "nccl"),
    ],
)
def test_nccl_between_hosts_and_cuda_ipc_on_one(collectives, hosts, chosen, make_host, monkeypatch):
    made, ids = choices(monkeypatch, hosts), set()
    ranks = run_plainly(
        2, make_host(2), lambda host: on_devices(host, Devices("cuda", collectives))
    )
    assert [type(rank) for rank in ranks] == [tuple] * 2, ranks
    for kind, *rest in ranks:
        assert kind == chosen
        ids |= set(rest)
    assert ids == ({made} if chosen == "nccl" else set()), (
        "all ranks have the id that the first one made"
    )


def test_cuda_ipc_between_hosts_is_refused(make_host, monkeypatch):
    choices(monkeypatch, "ab")
    ranks = run_plainly(2, make_host(2), lambda host: on_devices(host, Devices("cuda", "ipc")))
    assert all(isinstance(rank, ConfigError) and "on 2 hosts" in rank.message for rank in ranks), (
        ranks
    )


def choices(monkeypatch, hosts):
    """Groups of GPUs are tuples that say what they would have been. The id of NCCL's."""
    shared_id = b"i" * nccl.ID_BYTES
    seen = threading.local()
    monkeypatch.setattr(peers, "own_host", lambda: hosts[seen.rank].encode())
    monkeypatch.setattr(peers, "CudaGroup", lambda host: ("ipc",))
    monkeypatch.setattr(
        peers, "Library", lambda: type("", (), {"new_id": lambda self: shared_id})()
    )
    monkeypatch.setattr(peers, "Communicator", lambda given, *rest: given)
    monkeypatch.setattr(peers, "GatherGroup", lambda host, wire, on_error: ("nccl", wire))
    choices.seen = seen
    return shared_id


def run_plainly(size, make, work):
    """As `run`, for what is no group."""
    results = [None] * size

    def rank_main(rank):
        choices.seen.rank = rank
        with contextlib.closing(make(rank)) as host:
            try:
                results[rank] = work(host)
            except ConfigError as error:
                results[rank] = error
            host.barrier()

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_a_host_is_what_nccl_takes_it_for(monkeypatch):
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    assert own_host() == own_host() != b""
    monkeypatch.setenv("NCCL_HOSTID", "the other")
    assert own_host() == b"the other"


@pytest.mark.parametrize(
    ("given", "device", "problem"),
    [
        ({"collectives": "gloo"}, "cuda", "Choose one of auto, ipc, nccl"),
        ({"collectives": "nccl", "tensor_parallel": 2}, "cpu", "for GPUs that share layers"),
        ({"collectives": "ipc"}, "cuda", "for GPUs that share layers"),
    ],
)
def test_what_cannot_be_is_refused(given, device, problem):
    options = EngineOptions(model="x", **given)

    def decide():
        check(asked(options) | {{"cpu": "CPU", "cuda": "GPU"}[device]})
        decide_collectives(options, device)

    with pytest.raises(ConfigError) as refused:
        decide()
    assert problem in str(refused.value)


def test_gpus_of_two_hosts_may_share_layers():
    gpu = replace(LARGE, gpu="none", gpu_bytes=2**36, gpu_free_bytes=2**36, num_gpus=1)
    away = {"remote_workers": 1, "workers_address": "10.0.0.1:29500", "workers_key_file": "key"}
    config = resolve(EngineOptions(device="cuda", tensor_parallel=2, **away), SMOLLM2, gpu)
    assert (config.collectives, config.reasons["collectives"]) == (
        "auto",
        "CUDA IPC on one host, NCCL between hosts",
    )


# ---- NCCL's own end, with a library of the test's


class Nccl:
    """libnccl, as far as it is called. `init`: what starting returns."""

    def __init__(self, init=lambda: 0):
        self.init, self.aborted, self.ids = init, threading.Event(), []

        def ncclCommInitRank(made, size, shared_id, rank):
            self.ids.append((bytes(shared_id), rank, size))
            made._obj.value = 7
            return self.init()

        def ncclGetUniqueId(made):
            made._obj.internal[0] = 5
            return 0

        def ncclCommGetAsyncError(comm, code):
            code._obj.value = self.code
            return 0

        self.code = 0
        self.ncclGetVersion = lambda number: setattr(number._obj, "value", 22907) or 0
        for name in ("AllGather", "Send", "Recv"):
            setattr(self, f"nccl{name}", lambda *rest: 0)
        for name in ("GroupStart", "GroupEnd"):
            setattr(self, f"nccl{name}", lambda: 0)
        self.ncclCommAbort = lambda comm: self.aborted.set() or 0
        self.ncclGetErrorString = lambda code: (
            b"invalid usage" if code == 5 else b"remote process exited"
        )
        self.ncclGetLastError = lambda comm: b"Duplicate GPU detected"
        self.ncclCommInitRank, self.ncclGetUniqueId, self.ncclCommGetAsyncError = (
            ncclCommInitRank, ncclGetUniqueId, ncclCommGetAsyncError,
        )  # fmt: skip


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(nccl.Communicator, "_warm_up", lambda self, comm, size: None)


def started(lib, check=lambda: None, within_s=LONG_S):
    library = nccl.Library(lib)
    return nccl.Communicator(library.new_id(), 1, 2, check, within_s, library)


def test_a_communicator_starts_and_ends(without_gpu):
    lib = Nccl()
    communicator = started(lib)
    assert nccl.Library(lib).version == "2.29.7"
    assert lib.ids == [(bytes([5]) + bytes(127), 1, 2)]
    assert communicator.error == ""
    lib.code = 6
    assert communicator.error == "remote process exited (Duplicate GPU detected)"
    communicator.end()
    assert lib.aborted.wait(LONG_S)
    assert communicator.error == ""
    with pytest.raises(WorkerLost, match="is gone"):
        communicator.all_gather(torch.ones(1), torch.ones(2))


def test_ranks_that_nccl_cannot_join_are_an_error(without_gpu):
    with pytest.raises(ConfigError, match="Duplicate GPU") as refused:
        started(Nccl(lambda: 5))
    assert "a GPU each" in refused.value.fix
    with pytest.raises(WorkerLost, match="remote process exited"):
        started(Nccl(lambda: 6))


def test_a_rank_that_does_not_come_to_nccl_is_not_waited_for(without_gpu):
    never = threading.Event()

    def lost():
        raise WorkerLost("Worker 1 of the group is gone.")

    with pytest.raises(WorkerLost, match="Worker 1"):
        started(Nccl(lambda: never.wait(LONG_S) and 0), lost)
    with pytest.raises(ConfigError, match="NCCL_SOCKET_IFNAME"):
        started(Nccl(lambda: never.wait(LONG_S) and 0), within_s=0.0)
    never.set()


def test_who_is_gone_is_noticed_while_nobody_reads(tmp_path):
    door, gone = Door(str(tmp_path / "door"), KEY), threading.Event()
    ends = []
    listening = threading.Thread(target=lambda: ends.append(door.accept("the other", LONG_S)))
    listening.start()
    channel = connect(door.address, KEY, "rank 0", LONG_S)
    listening.join()
    channel.when_gone(gone.set)
    channel.check()
    ends[0].send(b"the last message")
    ends[0].close()
    assert gone.wait(LONG_S)
    with pytest.raises(WorkerLost, match="rank 0 is gone"):
        channel.check()
    assert channel.receive() == b"the last message"
    channel.close()
