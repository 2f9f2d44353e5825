"""ReplayEngine: an engine of this process that computes recorded requests again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, cast

import msgspec

from tidemill.config import EngineOptions
from tidemill.engine.core import EngineCore
from tidemill.engine.load import load_core
from tidemill.engine.parts.adapters import AdapterStore
from tidemill.errors import ConfigError, TidemillError
from tidemill.record.format import ModelStart
from tidemill.record.reader import RecordedRequest, RecordedServer
from tidemill.replay.outcome import Running, samples_of
from tidemill.runner.base import Runner
from tidemill.sched.clock import Clock
from tidemill.types.events import Event
from tidemill.types.wire import Abort, Finish, Resumed, Submit

# Of several engines one is enough: tokens do not depend on which computed them.
_ALONE: dict[str, Any] = {
    "data_parallel": 1, "prefill_engines": 0, "decode_engines": 0, "kv_transfer_bytes": None, "kv_export": None,
    "kv_import": None, "kv_key_file": None,
}  # fmt: skip
_ENDED = "as recorded"


def unknown_options(start: ModelStart) -> list[str]:
    """Recorded options that this build does not have."""
    return sorted(set(start.options) - {each.name for each in fields(EngineOptions)})


def options_of(
    start: ModelStart, changed: Mapping[str, Any], paths: Mapping[str, str], disk: str
) -> EngineOptions:
    """The recorded options of an engine. `changed`: fields with other values. `paths`: of models
    and adapters that were moved. `disk`: a folder in place of the server's own."""
    unknown = unknown_options(start)
    given = {name: value for name, value in start.options.items() if name not in unknown}
    try:
        options = msgspec.convert(given, EngineOptions, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"The options of the recorded engine cannot be used: {error}.") from error
    loras = tuple(f"{name}={paths.get(name, path)}" for name, path in options.lora_paths.items())
    options = replace(options, **_ALONE, model=paths.get(start.model, start.path), loras=loras)
    if options.kv_disk is not None:  # what is on the server's disk is its own
        options = replace(options, kv_disk=f"{disk}:{options.kv_disk.rpartition(':')[2]}")
    if options.remote_workers:
        what = "The recorded engine had ranks on other hosts."
        raise ConfigError(
            what,
            fix="Give --option remote-workers=0 and the ranks that this machine has.",
            param="option",
        )
    return replace(options, **changed)


class CollectedRunner:
    """A runner that says when a step's results were taken."""

    def __init__(self, runner: Any, on_collected: Callable[[], None]) -> None:
        self._runner, self._on_collected = runner, on_collected

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def collect(self, launched: Any) -> Any:
        result = self._runner.collect(launched)
        self._on_collected()
        return result


class ReplayEngine:
    def __init__(
        self,
        options: EngineOptions,
        server: RecordedServer,
        model: str,
        paths: Mapping[str, str],
        clock: Clock | None = None,
    ) -> None:
        """`paths`: of adapters that were moved."""
        self.core: EngineCore = load_core(options, None, clock)
        self.problems: dict[int, str] = {}  # adapters that cannot be used, by number
        known = {adapter.adapter_id for adapter in self.core.part(AdapterStore)}
        for number, info in server.adapters.get(model, {}).items():
            if number not in known:
                try:
                    self.core.part(AdapterStore).load_now(
                        number, info.name, paths.get(info.name, info.path)
                    )
                except TidemillError as error:
                    self.problems[number] = error.message
        for adapter in self.core.part(AdapterStore):
            then = server.adapters.get(model, {}).get(adapter.adapter_id)
            if then is not None and then.digest and then.digest != adapter.digest:
                self.problems[adapter.adapter_id] = (
                    f"the adapter {then.name} is not the one that was recorded"
                )
        self.running: dict[str, Running] = {}
        self.core.take_events()

    def tell_collected(self, on_collected: Callable[[], None]) -> None:
        """Calls it whenever the results of a step were taken, before they are looked at."""
        self.core.runner = cast(Runner, CollectedRunner(self.core.runner, on_collected))

    def close(self) -> None:
        self.core.close()

    def why_not(self, request: RecordedRequest) -> str:
        """The reason why a request cannot be compared; empty: it can."""
        if request.ended is None:
            return "the server stopped before it ended"
        if request.prompt is None:
            return "its prompt is in a file that was dropped"
        if request.begun.request.adapter in self.problems:
            return self.problems[request.begun.request.adapter]
        if not request.num_output and request.ended.error:
            return f"it had no output: {request.ended.error}"
        return ""

    def submit(
        self,
        request: RecordedRequest,
        name: str,
        salt: str | None = None,
        resumed: list[Resumed] | None = None,
    ) -> Running:
        """`salt`: another than recorded, so that it shares no prefix."""
        submit = request.submit()
        more: dict[str, Any] = {"request_id": name, "resumed": resumed}
        if salt is not None:
            more |= {"salt": salt, "prefix_leases": []}
        submit = msgspec.structs.replace(submit, **more)
        running = self.running.get(name)
        if running is None or resumed is None:
            running = self.running[name] = Running(
                request, samples_of(request), request.ended is None or bool(request.ended.error)
            )
        self._submit(submit, running)
        return running

    def _submit(self, submit: Submit, running: Running) -> None:
        try:
            self.core.submit(submit)
        except TidemillError as error:
            running.refused = error.message

    def step(self, ends: bool = True) -> list[Event]:
        """One step of the engine. `ends`: requests that something else than the engine ended are
        ended when they have the recorded tokens."""
        output, failed = self.core.step()
        for refused in failed:
            if refused.request_id in self.running:
                self.running[refused.request_id].refused = refused.message
        for delta in output.deltas:
            running = self.running.get(delta.request_id)
            if running is None:
                continue
            sample = running.samples[delta.index]
            sample.take(delta)
            if (ends or running.is_leaving) and sample.is_complete and delta.finish_reason is None:
                self._end(delta.request_id, delta.index, running)
        return output.events

    def _end(self, name: str, index: int, running: Running) -> None:
        assert running.request.ended is not None
        if running.request.ended.outputs[index].by_text:
            self.core.finish(Finish(name, index))
        elif running.ends_early and running.is_complete:
            self.core.abort(Abort(name, _ENDED))

    def drop_all(self) -> None:
        """Ends all that runs, as a new start of the engine would."""
        for name in [*self.running]:
            self.core.abort(Abort(name, "the engine was restarted"))
        while self.core.is_in_flight:
            self.core.step()
        self.core.scheduler.kv.clear_prefixes()
