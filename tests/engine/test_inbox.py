"""Deltas that wait for their reader."""

import asyncio

import pytest

from tidemill.engine import inbox as inbox_module
from tidemill.engine.inbox import Inbox, cells
from tidemill.errors import EngineDead
from tidemill.server.generation.logprobs import MAX_LOGPROB_CELLS
from tidemill.types.wire import Delta, Timings, TokenLogprobs, logprob_pieces


def put(inbox, *deltas):
    for delta in deltas:
        inbox.put(delta)


async def test_deltas_that_wait_together_are_taken_together():
    inbox = Inbox()
    timings = Timings(1.0, 2.0, 3.0)
    scores = [[TokenLogprobs(token, -1.0, [])] for token in range(4)]
    put(
        inbox,
        Delta(
            "r", 0, [5], logprobs=scores[0], prompt_pieces=logprob_pieces(scores[3]), num_cached=7
        ),
        Delta("r", 0, [6], logprobs=scores[1], num_cached=7),
        Delta("r", 1, [1], logprobs=scores[2], num_cached=7),
        Delta(
            "r", 0, [8, 9], "length", logprobs=scores[2] + scores[3], num_cached=7, timings=timings
        ),
        Delta("r", 1, [2], "stop"),
    )
    every = [entry for one in (0, 1, 2, 3) for entry in scores[one]]
    assert await inbox.take() == Delta(
        "r", 0, [5, 6, 8, 9], "length", every, logprob_pieces(scores[3]), 7, timings
    )
    assert await inbox.take() == Delta("r", 1, [1, 2], "stop", scores[2])
    assert inbox.num_cells == 0


async def test_an_error_replaces_the_backlog():
    inbox = Inbox()
    put(inbox, Delta("r", 0, [5]), Delta("r", 1, [1]))
    inbox.fail(EngineDead("gone"))
    assert inbox.num_cells == 0
    with pytest.raises(EngineDead, match="gone"):
        await inbox.take()


async def test_the_reader_waits():
    inbox = Inbox()
    taking = asyncio.create_task(inbox.take())
    await asyncio.sleep(0)
    assert not taking.done()
    put(inbox, Delta("r", 0, [1]), Delta("r", 0, [2]))
    assert (await taking).token_ids == [1, 2]
    left = asyncio.create_task(inbox.take())
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.wait([left])
    put(inbox, Delta("r", 0, [3]))
    assert (await inbox.take()).token_ids == [3]


async def test_a_long_backlog_is_taken_in_pieces_and_other_tasks_run_between_them():
    inbox, num_samples, num_tokens = Inbox(), 2, 500
    top = [(token, -2.0) for token in range(20)]
    deltas = [
        Delta("r", i, [token], logprobs=[TokenLogprobs(token, -1.0, top)])
        for token in range(num_tokens)
        for i in (0, 1)
    ]
    put(inbox, *deltas)
    assert inbox.num_cells == sum(cells(delta) for delta in deltas)
    turns = 0

    async def others():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    got: list[list[int]] = [[], []]
    order, turns_at = [], []
    while inbox.num_cells:
        piece = await inbox.take()
        assert cells(piece) <= inbox_module.PIECE_CELLS
        assert len(piece.logprobs) == len(piece.token_ids)
        got[piece.index] += piece.token_ids
        order.append(piece.index)
        turns_at.append(turns)
    beside.cancel()
    assert got == [list(range(num_tokens))] * num_samples
    assert order[:4] == [0, 1, 0, 1]
    assert len(set(turns_at)) == len(turns_at)


def test_a_response_of_the_largest_size_fits_a_backlog():
    """A whole response is read by the server itself: one that is behind must not end it for a
    client that does not read."""
    num_tokens = MAX_LOGPROB_CELLS // (1 + 20)
    entry = TokenLogprobs(5, -1.0, [(token, -1.0) for token in range(20)])
    assert num_tokens * cells(Delta("r", 0, [5], logprobs=[entry])) < inbox_module.MAX_CELLS
