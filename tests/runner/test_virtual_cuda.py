"""The GPU's runner for `--kv-layout virtual` without a GPU: kernels interpreted, memory of the CPU
in the place of the GPU's."""

import ctypes
import gc
import mmap
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import triton

from tests.helpers import LONG_S, Guesser, greedy, guess_with, load_model, make_core, run
from tests.runner.test_cuda_runner import folder, ids, on_gpu  # noqa: F401
from tidemill.config import virtual
from tidemill.errors import ConfigError
from tidemill.kernels.cuda import virtual_memory
from tidemill.kernels.cuda.virtual_memory import CudaMemory
from tidemill.kernels.virtual import HostMemory, VirtualRows, view_of
from tidemill.runner import virtual_cuda
from tidemill.types.sampling import SamplingParams


class HostDriver:
    """The driver's calls on memory of this machine. It does not map over what is mapped, nor unmap
    what is not."""

    def __init__(self, page_bytes):
        self.host, self.handles, self.mapped, self.allowed = (
            HostMemory(4096, page_bytes),
            set(),
            {},
            set(),
        )
        self.numbers = iter(range(1, 4096))

    def enter(self):
        pass

    def wait(self):
        pass

    def free(self, address, size):
        pass

    def granule(self):
        return mmap.PAGESIZE

    def reserve(self, size):
        return self.host.reserve(size // self.host.page_bytes)

    def create(self, size):
        self.handles.add(handle := next(self.numbers))
        return handle

    def release(self, handle):
        self.handles.remove(handle)

    def map(self, address, size, handle):
        assert address not in self.mapped
        assert handle in self.handles
        self.mapped[address] = handle

    def allow(self, address, size):
        for at in range(address, address + size, self.host.page_bytes):
            self.host.map(at, [self.mapped[at]])
            self.allowed.add(at)

    def unmap(self, address, size):
        del self.mapped[address]
        self.allowed.remove(address)
        self.host.unmap(address)


class Memory(CudaMemory):
    """In float32, as all that the kernels are interpreted on."""

    def __init__(self, page_bytes):
        super().__init__(2 * page_bytes, HostDriver(2 * page_bytes))

    def view(self, address, shape, dtype):
        return view_of(address, shape, torch.float32, self)


@pytest.fixture
def on_virtual(on_gpu, monkeypatch):  # noqa: F811
    monkeypatch.setattr(virtual, "GPU_GRANULE", 4096)
    monkeypatch.setattr(virtual_cuda, "CudaMemory", Memory)
    return lambda **options: on_gpu(kv_layout="virtual", **options)


def crowd():
    requests = {f"r{i}": (ids(3 + 29 * i % 70, i), greedy(8)) for i in range(4)}
    requests["again"] = (requests["r2"][0] + [7, 8, 9], greedy(8))
    return requests | {
        "f": (ids(40, 99), SamplingParams(n=2, temperature=0.9, seed=5, max_tokens=4))
    }


def tokens_of(answers):
    return {name: answer.tokens for name, answer in answers.items()}


def test_prompts_and_decoding_over_the_end_of_a_page(folder, on_virtual):  # noqa: F811
    requests = {"a": (ids(31, 1), greedy(4)), "b": (ids(3, 2), greedy(3))}
    core = on_virtual(max_requests=2, token_budget=64, prefix_caching=False)
    memory, launch, over = core.runner.kv_layout.memory, core.runner.launch, []

    def watched(plan):
        launched, running = launch(plan), core.scheduler.running
        memory.settle()
        live = (
            sum(max(request.num_computed, request.num_known) for request in running)
            / core.config.page_size
        )
        # the null page is nobody's
        over.append((memory.used_bytes / memory.page_bytes - 1 - live) / len(running))
        return launched

    core.runner.launch = watched
    assert tokens_of(run(core, requests)) == tokens_of(
        run(make_core(load_model(folder), max_context=128), requests)
    )
    assert memory.num_in_time == 1
    assert 0 < max(over) <= 1  # a page for each request


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"token_budget": 9, "max_requests": 3, "kv_memory_bytes": 12 * 4096}]
)
def test_the_tokens_are_those_of_the_cpu(folder, on_virtual, options):  # noqa: F811
    expected = tokens_of(run(make_core(load_model(folder), max_context=128), crowd()))
    core = on_virtual(**options)
    assert isinstance(core.runner.kv_layout, virtual_cuda.VirtualCudaLayout)
    assert core.config.page_size == 32
    assert tokens_of(run(core, crowd())) == expected
    # rows in other ranges, and from the prefix cache
    assert tokens_of(run(core, crowd())) == expected
    memory = core.runner.kv_layout.memory
    memory.settle()
    assert memory.num_in_time
    assert memory._failed is None


@pytest.mark.slow
def test_drafts_change_nothing(folder, on_virtual):  # noqa: F811
    requests = {"a": (ids(20, 1), greedy(24)), "b": (ids(33, 2), greedy(24))}
    expected = run(on_virtual(), requests)
    core = on_virtual()
    guess_with(
        core,
        Guesser(
            {tuple(requests[name][0]): answer.tokens for name, answer in expected.items()}, 0.6
        ),
    )
    assert tokens_of(run(core, requests)) == tokens_of(expected)


def test_what_a_gpu_does_not_have_is_refused(on_virtual):
    with pytest.raises(ConfigError, match="LoRA adapters of a GPU"):
        on_virtual(max_loras=1)


HEADER = Path(triton.__file__).parent / "backends/nvidia/include"


@pytest.mark.skipif(
    not shutil.which("gcc") or not (HEADER / "cuda.h").exists(), reason="no gcc or cuda.h"
)
def test_structs_are_laid_out_as_the_driver_has_them(tmp_path):
    """CUmemAllocationProp and CUmemAccessDesc, and the constants, as in cuda.h."""
    source = tmp_path / "sizes.c"
    source.write_text(
        """#include <cuda.h>
        #include <stddef.h>
        #include <stdio.h>
        int main(void) { printf("%zu %zu %zu %zu %zu %zu %d %d %d %d",
        sizeof(CUmemAllocationProp), offsetof(CUmemAllocationProp, location),
        offsetof(CUmemAllocationProp, win32HandleMetaData), offsetof(CUmemAllocationProp, allocFlags), sizeof(CUmemAccessDesc),
        offsetof(CUmemAccessDesc, flags), CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE,
        CU_MEM_ACCESS_FLAGS_PROT_READWRITE, CU_MEM_ALLOC_GRANULARITY_MINIMUM); }"""
    )
    subprocess.run(["gcc", f"-I{HEADER}", str(source), "-o", str(tmp_path / "sizes")], check=True)
    printed = subprocess.run(
        [str(tmp_path / "sizes")], check=True, capture_output=True, text=True
    ).stdout.split()
    own, access = virtual_memory._Properties, virtual_memory._Access
    assert list(map(int, printed)) == [
        ctypes.sizeof(own), own.location.offset, own.windows.offset, own.compression.offset, ctypes.sizeof(access),
        access.flags.offset, virtual_memory._PINNED, virtual_memory._ON_DEVICE, virtual_memory._READ_AND_WRITE, 0,
    ]  # fmt: skip


class Fence:
    def __init__(self):
        self.done = threading.Event()

    def synchronize(self):
        assert self.done.wait(LONG_S)


def test_memory_is_kept_while_a_step_may_read_it_and_then_used_again():
    driver = HostDriver(4096)
    memory = CudaMemory(4096, driver)
    rows = VirtualRows(memory, 2, 4, num_spare=2)
    rows.set(0, np.array([1, 2, 0, 0]))
    old = rows.address_of(0, 0)
    memory.fence = fence = Fence()
    rows.drop([1, 2])
    rows.renew(0)
    rows.set(0, np.array([3, 0, 0, 0]))  # elsewhere, and nothing is waited for
    assert old in driver.mapped
    assert rows.address_of(0, 0) != old
    fence.done.set()
    memory.settle()
    assert old not in driver.mapped
    memory.map_ahead(rows.address_of(0, 1))
    memory.settle()
    num = len(driver.handles)
    rows.set(0, np.array([3, 4, 0, 0]))
    assert memory.num_in_time == 1
    assert len(driver.handles) == num  # what page 4 got was there
    assert memory.physical_bytes == num * 4096


def test_pieces_beyond_a_few_go_back_to_the_driver(monkeypatch):
    monkeypatch.setattr(virtual_memory, "_MOST_SPARE", 20)
    driver = HostDriver(4096)
    memory = CudaMemory(4096, driver)
    rows = VirtualRows(memory, 1, 100)
    rows.set(0, np.arange(1, 101))
    memory.settle()
    assert len(driver.handles) >= 100
    rows.drop(range(1, 101))
    memory.settle()
    assert not driver.mapped
    assert len(driver.handles) == 20 == memory.physical_bytes // 4096
    rows.set(0, np.arange(1, 101))
    del memory, rows
    gc.collect()
    assert not driver.mapped
    assert not driver.handles
