"""What waits for one request."""

import asyncio

from tidemill.engine.inbox import Inbox
from tidemill.errors import EngineDead
from tidemill.wire import Delta, Timings, TokenLogprobs


def said(inbox, *items):
    for item in items:
        inbox.put(item)


async def test_what_waits_together_is_taken_together():
    inbox = Inbox()
    timings = Timings(1.0, 2.0, 3.0)
    scores = [[TokenLogprobs(token, -1.0, [])] for token in range(4)]
    said(
        inbox,
        Delta("r", 0, [5], logprobs=scores[0], prompt_logprobs=scores[3], num_cached=7),
        Delta("r", 0, [6], logprobs=scores[1], num_cached=7),
        Delta("r", 1, [1], logprobs=scores[2], num_cached=7),
        Delta("r", 0, [8, 9], "length", logprobs=scores[2] + scores[3], num_cached=7, timings=timings),
        Delta("r", 1, [2], "stop"),
    )
    every = [entry for one in (0, 1, 2, 3) for entry in scores[one]]
    assert await inbox.take() == Delta("r", 0, [5, 6, 8, 9], "length", every, scores[3], 7, timings)
    assert await inbox.take() == Delta("r", 1, [1, 2], "stop", scores[2])


async def test_an_end_and_an_error_are_not_passed_over():
    inbox, lost = Inbox(), EngineDead("gone")
    said(inbox, Delta("r", 0, [5]), Delta("r", 1, [1]), Delta("r", 0, [6]), lost, Delta("r", 0, [7], "stop"))
    assert (await inbox.take()).token_ids == [5, 6]
    assert (await inbox.take()).token_ids == [1]
    assert await inbox.take() is lost
    assert (await inbox.take()).token_ids == [7]


async def test_a_taker_waits():
    inbox = Inbox()
    taking = asyncio.create_task(inbox.take())
    await asyncio.sleep(0)
    assert not taking.done()
    said(inbox, Delta("r", 0, [1]), Delta("r", 0, [2]))
    assert (await taking).token_ids == [1, 2]
    left = asyncio.create_task(inbox.take())
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.wait([left])
    said(inbox, Delta("r", 0, [3]))
    assert (await inbox.take()).token_ids == [3]
