"""AdapterNames: the LoRA adapters of one engine as its client knows them, by name. Loads no torch.

Each load has a number of its own, which requests carry: another adapter of the same name is another
one. An adapter that is unloaded can no longer be asked for by name; the engine keeps it until the
requests that have its number are done. An engine that is started again gets them all again, before
any request.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Iterator

from tidemill.config import EngineOptions
from tidemill.engine.link import error_from
from tidemill.errors import InvalidRequest, TidemillError
from tidemill.types.wire import AdapterInfo, AdapterReply, LoadAdapter, ToEngine, UnloadAdapter

MAX_ADAPTERS = 1000
MAX_NAME_CHARS = 128
_log = logging.getLogger("tidemill.engine")


class AdapterNames:
    def __init__(self, send: Callable[[ToEngine], None], is_used: Callable[[int], bool]) -> None:
        """`send`: to the engine, if there is one. `is_used`: whether requests have an adapter's
        number."""
        self._send, self._is_used = send, is_used
        self._by_name: dict[str, AdapterInfo] = {}
        self._leaving: dict[int, AdapterInfo] = {}  # not known by name any more
        self._asked: dict[int, asyncio.Future[AdapterInfo]] = {}  # loads under way
        self._num_readers: Counter[int] = Counter()  # who may still submit requests with a number
        self._last_id = 0
        self._was_started = False

    def __iter__(self) -> Iterator[AdapterInfo]:
        return iter(self._by_name.values())

    def get(self, name: str) -> AdapterInfo | None:
        return self._by_name.get(name)

    def enter(self, info: AdapterInfo) -> None:
        """Somebody makes a request of it; `leave` when that is submitted or given up."""
        self._num_readers[info.adapter_id] += 1

    def leave(self, info: AdapterInfo) -> None:
        self._num_readers[info.adapter_id] -= 1
        if not self._num_readers[info.adapter_id]:
            del self._num_readers[info.adapter_id]
            self.requests_ended()

    # ---- engines start and end

    def expect(self, options: EngineOptions) -> None:
        """The adapters that the first engine will have."""
        for number, (name, path) in enumerate(options.lora_paths.items(), 1):
            self._by_name[name] = AdapterInfo(number, name, path, "", 0)
            self._last_id = number

    def options(self, options: EngineOptions) -> EngineOptions:
        """The first engine reads the adapters of its options, or fails; later ones are sent what
        there is by then."""
        return dataclasses.replace(options, loras=()) if self._was_started else options

    def engine_started(self, read: list[AdapterInfo]) -> None:
        """To be called before it gets any request. `read`: the adapters it has."""
        if not self._was_started:
            self._was_started = True
            self._by_name |= {info.name: info for info in read}
            self._last_id = max(self._last_id, len(read))
            return
        self.engine_lost(
            InvalidRequest(
                "The engine was restarted while the adapter was loaded.", fix="Load it again."
            )
        )
        for info in (*self._by_name.values(), *self._leaving.values()):
            self._send(LoadAdapter(info.adapter_id, info.name, info.path, info.digest))

    def engine_lost(self, why: TidemillError) -> None:
        for future in self._asked.values():
            if not future.done():
                future.set_exception(why)
        self._asked.clear()

    # ---- adapters come and go

    async def load(self, name: str, path: str, in_place: bool = False) -> AdapterInfo:
        """`in_place`: instead of another of this name, whose requests end with what they have."""
        if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
            raise InvalidRequest(
                f"An adapter's name has 1 to {MAX_NAME_CHARS} printable characters.",
                param="lora_name",
            )
        if name in self._by_name and not in_place:
            fix = "Unload it first, or send load_inplace."
            raise InvalidRequest(
                f"The adapter {name!r} is loaded already.", fix=fix, param="lora_name"
            )
        if len(self._by_name) + len(self._asked) >= MAX_ADAPTERS:
            raise InvalidRequest(
                f"There are {MAX_ADAPTERS} adapters already.", fix="Unload some.", param="lora_name"
            )
        self._last_id += 1
        adapter_id = self._last_id
        future = self._asked[adapter_id] = asyncio.get_running_loop().create_future()
        self._send(LoadAdapter(adapter_id, name, path))
        try:
            info = await future
        except asyncio.CancelledError:
            self._send(UnloadAdapter(adapter_id))
            raise
        finally:
            self._asked.pop(adapter_id, None)
        with contextlib.suppress(KeyError):
            self.unload(name)
        self._by_name[name] = info
        return info

    def unload(self, name: str) -> None:
        """Raises KeyError if there is none."""
        info = self._by_name.pop(name)
        self._leaving[info.adapter_id] = info
        self.requests_ended()

    def requests_ended(self) -> None:
        """Adapters that nobody uses any more leave the engine."""
        for number in [
            number
            for number in self._leaving
            if not self._num_readers[number] and not self._is_used(number)
        ]:
            del self._leaving[number]
            self._send(UnloadAdapter(number))

    def take(self, reply: AdapterReply) -> None:
        future = self._asked.get(reply.adapter_id)
        if future is not None and not future.done():
            if reply.info is not None:
                future.set_result(reply.info)
            elif reply.error is not None:
                future.set_exception(error_from(reply.error))
        elif reply.error is not None:  # of an engine that was started again
            _log.error("an adapter cannot be loaded again: %s", reply.error.message)
            self._by_name = {
                name: info
                for name, info in self._by_name.items()
                if info.adapter_id != reply.adapter_id
            }
            self._leaving.pop(reply.adapter_id, None)
