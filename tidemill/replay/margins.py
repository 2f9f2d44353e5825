"""Margins: how close two tokens were, where a replay differs from its recording."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from tidemill.errors import TidemillError
from tidemill.record.reader import RecordedRequest
from tidemill.replay.engine import ReplayEngine
from tidemill.replay.outcome import Difference
from tidemill.types.wire import Resumed


def with_margin(engine: ReplayEngine, request: RecordedRequest, found: Difference) -> Difference:
    """The difference with the log-probabilities that this build gives to both tokens there, before
    sampling. They are computed after the recorded output up to that place."""
    params = request.begun.request.params
    if (
        found.what != "token"
        or not isinstance(found.recorded, int)
        or not isinstance(found.replayed, int)
        or params.beams
    ):
        return found
    name = f"margin-{request.number}-{found.sample}"
    asked = msgspec.structs.replace(
        params,
        logprobs=0,
        logprob_token_ids=(found.recorded, found.replayed),
        prompt_logprobs=None,
        max_tokens=found.position + 1,
        min_tokens=0,
        post_sampling_logprobs=False,
    )
    output = request.output_ids(found.sample)[: found.position].tolist()
    submit = msgspec.structs.replace(
        request.submit(),
        request_id=name,
        salt=name,
        prefix_leases=[],
        params=asked,
        resumed=[Resumed(found.sample, output)],
    )
    entries = []
    try:
        engine.core.submit(submit)
        while engine.core.has(name):
            entries += [
                entry for delta in engine.core.step()[0].deltas for entry in delta.logprobs or ()
            ]
    except TidemillError:
        return found
    logprobs = {
        token: logprob
        for entry in entries[:1]
        for token, logprob in [*entry.top, (entry.token_id, entry.logprob)]
    }
    then, now = logprobs.get(found.recorded), logprobs.get(found.replayed)
    return replace(found, recorded_logprob=then, replayed_logprob=now)
