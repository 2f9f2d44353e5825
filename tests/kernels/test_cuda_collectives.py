"""Sums and gathers over ranks, one rank after the other: programs of the interpreter do not run
side by side."""

import pytest
import torch

from tidemill.kernels.cuda.collectives import (
    MOST_PROGRAMS,
    Exchange,
    add_parts,
    all_reduce_reference,
    flags_offset,
    memory_bytes,
)


def ranks(size):
    memories = [torch.zeros(memory_bytes(size), dtype=torch.uint8) for _ in range(size)]
    table = torch.tensor([memory.data_ptr() for memory in memories])
    return memories, [Exchange(rank, size, table) for rank in range(size)]


@pytest.mark.parametrize("shape", [(1, 96), (3, 5000)])
def test_sums_are_in_the_order_of_ranks(shape):
    memories, group = ranks(3)
    parts = [torch.randn(shape) * 10.0**rank for rank in range(3)]
    for one, part in zip(group[1:], parts[1:], strict=True):
        one.all_reduce(part.clone())  # nobody waits before all begin
    made = group[0].all_reduce(parts[0].clone())
    assert torch.equal(made, all_reduce_reference(parts))
    assert torch.equal(
        add_parts(torch.stack(parts), torch.empty(shape)).view(torch.int32), made.view(torch.int32)
    )
    assert not torch.equal(all_reduce_reference(parts), all_reduce_reference(parts[::-1]))
    assert all(memory[flags_offset() :].eq(0).all() for memory in memories)


def test_columns_are_gathered_also_where_ranks_have_different_numbers():
    _, group = ranks(2)
    left, right = torch.randn(3, 70), torch.randn(3, 41)
    group[1].all_gather(right, [70, 41])
    assert torch.equal(group[0].all_gather(left, [70, 41]), torch.cat([left, right], 1))


def test_turns_are_counted_and_told_once_all_begin():
    memories, group = ranks(2)
    flags = [
        memory[flags_offset() :].view(torch.int64).view(MOST_PROGRAMS, 2) for memory in memories
    ]
    flags[0][:, 1] = 3  # the other is there already
    group[0].begin()
    for turn in (1, 2, 3):
        group[0].all_reduce(torch.ones(1, 64))
        assert flags[1][0].tolist() == [turn, 0]
        assert flags[0][0].tolist() == [turn, 3]
    assert flags[1][1].tolist() == [0, 0], "a program that had no piece"
