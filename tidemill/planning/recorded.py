"""A recording as rows of a trace, with the tokens of its prompts."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import islice
from pathlib import Path

from tidemill.errors import ConfigError
from tidemill.planning.trace import Row
from tidemill.record.format import SEGMENT_LEN, Ended
from tidemill.record.reader import RecordedRequest, RecordedServer, Recording
from tidemill.types.inputs import content_ids, name_of, overlapping
from tidemill.types.sampling import MAX_N


class _Numbers:
    """A number for each key, in the order in which they first come."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}

    def of(self, key: Hashable) -> int:
        return self._known.setdefault(key, len(self._known) + 1)


def rows_of(folder: Path, limit: int, key: bytes | None = None) -> list[Row]:
    """The requests that have ended, of all servers of a recording."""
    return rows_of_servers(Recording(folder, key).servers, limit)


def rows_of_servers(servers: Sequence[RecordedServer], limit: int, model: str = "") -> list[Row]:
    """The requests that have ended, in the order of their files. Those that no engine began are
    none of the load. `model`: only its requests."""
    blocks, tenants = _Numbers(), _Numbers()
    rows: list[Row] = []
    for server in servers:
        to_day_s = server.start.wall_s - server.start.clock_s
        several = len(server.models) > 1
        asked = [
            request for request in server.requests if not model or request.begun.model == model
        ]
        for request in islice(asked, limit - len(rows)):
            if (
                request.ended is None
                or request.prompt is None
                or (request.ended.error and not request.num_output)
            ):
                continue
            rows.append(
                _row(
                    request,
                    request.ended,
                    to_day_s,
                    request.begun.model if several else "",
                    blocks,
                    tenants,
                )
            )
    if not rows:
        raise ConfigError("The recording holds no request that has ended.", param="trace")
    return rows


def _row(
    request: RecordedRequest,
    ended: Ended,
    to_day_s: float,
    model: str,
    blocks: _Numbers,
    tenants: _Numbers,
) -> Row:
    begun = request.begun
    asked = begun.request
    beams = asked.params.beams
    chain = 0
    numbers: list[int] = []
    # pages depend on the adapter, too
    salt = f"{asked.adapter}\n{asked.salt}" if asked.adapter else asked.salt
    root = (begun.model, salt)
    for number, digest in enumerate(begun.segments):
        inputs = overlapping(asked.segments, number * SEGMENT_LEN, (number + 1) * SEGMENT_LEN)
        chain = blocks.of((root if not numbers else chain, digest, *map(name_of, inputs)))
        numbers.append(chain)
    took_s = ended.time_s - begun.time_s
    return Row(
        begun.time_s + to_day_s,
        begun.num_prompt,
        round(request.num_output / max(len(ended.outputs), 1)),
        tuple(numbers),
        asked.priority,
        str(tenants.of(asked.tenant)) if asked.tenant else "",
        min(asked.params.n if beams is None else beams.width, MAX_N),
        took_s if ended.error else None,
        SEGMENT_LEN,
        None if ended.first_s is None else ended.first_s - begun.time_s,
        None if ended.first_s is None else took_s,
        model,
        tuple(content_ids(request.prompt_ids(), asked.segments)),
        salt,
        ()
        if beams
        else tuple(tuple(request.output_ids(index)) for index in range(len(ended.outputs))),
    )
