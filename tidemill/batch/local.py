"""Lines of a batch, executed by an engine of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tidemill.batch.lines import Request
from tidemill.engine.client import STALL_S
from tidemill.engine.link import START_S
from tidemill.errors import TidemillError
from tidemill.server.api.endpoints import ENDPOINTS
from tidemill.server.generation.models import Models, Served
from tidemill.server.http.access import Caller, NotFound
from tidemill.server.http.context import RequestContext
from tidemill.server.http.errors import error_body
from tidemill.server.run import ModelEngine
from tidemill.server.store import batch_lines
from tidemill.server.store.batches import respond_to_line
from tidemill.types.wire import Loading

_PER_SLOT = 2  # lines at once: those that wait for a slot keep all slots busy


class Local:
    """The parts of a server that a line needs: tokenizer, engine and routes."""

    def __init__(
        self,
        served: Served,
        num_at_once: int | None = None,
        stall_s: float = STALL_S,
        start_s: float = START_S,
    ) -> None:
        self._engine = ModelEngine(served, stall_s, start_s, None, ("auto", "auto", None))
        self._models: Models | None = None
        self._given = num_at_once
        self.num_at_once = 0

    async def start(self, on_loading: Callable[[str, Loading], None] | None = None) -> None:
        starting = asyncio.create_task(self._engine.start(on_loading))
        try:
            self._models = Models([await self._engine.service()])
            await starting
        finally:
            starting.cancel()
            await asyncio.wait([starting])
        config = self._models.default.ready.config
        self.num_at_once = self._given or min(_PER_SLOT * config.max_requests, config.max_waiting)

    async def respond(self, request: Request) -> tuple[int, bytes]:
        assert self._models is not None
        endpoint = ENDPOINTS.get(request.url)
        if endpoint is None:
            known = ", ".join(ENDPOINTS)
            error: TidemillError = NotFound(
                f"The url is {request.url[:100]!r}.", fix=f"It may be {known}.", param="url"
            )
            return error.status, batch_lines.encode(error_body(error))
        call = RequestContext(request.result_id, path=request.url)
        return await respond_to_line(
            self._models, Caller(is_admin=True, call=call), endpoint, request.body
        )

    async def close(self) -> None:
        if self._models is not None:
            self._models.close()
        await self._engine.client.close()
