"""A Ray Serve application: each replica is a server with an engine of its own, behind Serve's
proxy.

    serve run tidemill.cluster.ray:app model=smollm2 num_replicas=2

What a server stores (files, batches, stored responses) is of one process, and Serve sends each
request to any replica; files and batches are therefore refused. `tidemill serve --ray` has one
server in front of all replicas, and has them.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
from ray import serve

from tidemill.cluster.ray import entry
from tidemill.cluster.ray.entry import Entry
from tidemill.config import EngineOptions
from tidemill.errors import ConfigError, EngineDead
from tidemill.server.api.endpoints import ENDPOINTS
from tidemill.server.app import create_app
from tidemill.server.generation.models import Models, Served
from tidemill.server.generation.service import ResponseDefaults
from tidemill.server.http.access import Access
from tidemill.server.run import DATA_QUOTA_BYTES, ModelEngine
from tidemill.server.store.batches import Batches
from tidemill.server.store.storage import Storage
from tidemill.weights.locate import locate

_NUM_AT_ONCE = 256  # requests of a replica, unless Serve is told otherwise
_OWN = {
    "num_replicas": int,
    "num_cpus": float,
    "num_gpus": float,
    "max_ongoing_requests": int,
    "api_keys": str,
    "allowed_hosts": str,
}


@serve.deployment(max_ongoing_requests=_NUM_AT_ONCE)
@serve.ingress(Entry())
class Tidemill:
    """A replica."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, options: EngineOptions, api_keys: list[str], allowed_hosts: list[str]
    ) -> None:
        served = Served(options)
        await asyncio.to_thread(locate, served.engine.model, fetch=True)
        self._engine = engine = ModelEngine(served, 60.0, 300.0, None, ("auto", "auto", None))
        starting = asyncio.create_task(engine.start(None))
        try:
            self._models = models = Models([await engine.service()])
            await starting
        except BaseException:
            starting.cancel()
            await asyncio.wait([starting])
            await engine.client.close()
            raise
        models.default.response_defaults = ResponseDefaults()
        access = Access.of(api_keys, None, [], allowed_hosts, [])
        access.check_keys_are_long("where Ray Serve listens")
        self._data = Storage(Path(tempfile.mkdtemp(prefix="tidemill-serve-")), DATA_QUOTA_BYTES)
        batches = Batches(models, ENDPOINTS, self._data, access.caller_of, None)
        entry.Entry.app = create_app(models, access, self._data, batches, None)

    async def check_health(self) -> None:
        """Serve replaces a replica whose engine cannot be kept running."""
        if not self._engine.client.alive:
            raise EngineDead(self._engine.client.death or "The engine is not running.")

    async def __del__(self) -> None:
        if hasattr(self, "_models"):
            self._models.close()
            self._data.close()
        if hasattr(self, "_engine"):
            await self._engine.client.close()


def app(args: dict[str, Any]) -> serve.Application:
    """The application. Arguments: options of the engine by their names (`model`, `max_context`,
    `kv_memory_bytes` …), and num_replicas, num_cpus, num_gpus, max_ongoing_requests, api_keys and
    allowed_hosts (several with commas between)."""
    known = {field.name for field in fields(EngineOptions)}
    own: dict[str, Any] = {}
    engine: dict[str, Any] = {}
    for name, value in args.items():
        key = name.replace("-", "_")
        if key in _OWN:
            own[key] = _read(key, _OWN[key], value)
        elif key in known:
            engine[key] = value
        else:
            raise ConfigError(
                f"There is no argument {name!r}.",
                fix=f"Possible: {', '.join(sorted({*_OWN, *known}))}.",
                param=name,
            )
    try:
        # the command line of Serve gives text
        options = msgspec.convert(engine, EngineOptions, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"An argument cannot be used: {error}.",
            fix="Give it as the option of that name takes it.",
        ) from None
    actor = {
        "num_cpus": own.get("num_cpus", options.threads or 1),
        "num_gpus": own.get("num_gpus", 0),
    }
    deployed_class: Any = Tidemill
    deployment = deployed_class.options(
        num_replicas=own.get("num_replicas", 1),
        max_ongoing_requests=own.get("max_ongoing_requests", _NUM_AT_ONCE),
        ray_actor_options=actor,
    )
    keys, hosts = (_listed(own.get(name, "")) for name in ("api_keys", "allowed_hosts"))
    return deployment.bind(options, keys, hosts)


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _read(name: str, kind: type, value: Any) -> Any:
    try:
        return kind(value)
    except (TypeError, ValueError):
        raise ConfigError(
            f"{name} is {value!r}.", fix=f"It must be of type {kind.__name__}.", param=name
        ) from None
