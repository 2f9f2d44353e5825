"""Models: the models that this server serves, by name. The one place where a request gets the
service of its model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tidemill.config import EngineOptions
from tidemill.engine.ledger import Ledger
from tidemill.engine.metrics import render_by_model
from tidemill.engine.replicas import Replicas
from tidemill.errors import ConfigError, Draining, EngineDead, InvalidRequest, TidemillError
from tidemill.server.generation.service import Service
from tidemill.server.observe.usage import Usage
from tidemill.server.store.responses import Store
from tidemill.types.wire import AdapterInfo

_MAX_NAMED = 100  # models in an error


@dataclass(frozen=True)
class Served:
    """A model to serve, and the names it is asked for by."""

    engine: EngineOptions
    aliases: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.engine.served_name or self.engine.model

    @staticmethod
    def check_names(models: Sequence[Served]) -> None:
        names = [
            name
            for model in models
            for name in (model.name, *model.aliases, *model.engine.lora_paths)
        ]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(
                    f"Two models are named {name!r}.",
                    fix="Name them apart, like NAME=PATH.",
                    param="model",
                )


class AdapterService(Service):
    """The service of an adapter: all but its name and number is that of its base model."""

    def __init__(self, base: Service, info: AdapterInfo) -> None:
        self.__dict__.update(
            base=base, info=info, model_name=info.name, adapter=info.adapter_id, aliases=()
        )
        base.client.adapters.enter(info)

    base: Service
    info: AdapterInfo

    def __del__(self) -> None:
        self.base.client.adapters.leave(self.info)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["base"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.base, name, value)


class Models:
    def __init__(self, services: Sequence[Service]) -> None:
        """The first is for requests that name no model."""
        self._services = list(services)
        self._by_name = {
            name: service for service in services for name in (service.model_name, *service.aliases)
        }
        for service in services:
            service.live.states = self.states
        self.default = self._services[0]
        self.responses = Store()
        self.usage = Usage(self._ledgers)

    def _ledgers(self) -> list[Ledger]:
        return [ledger for service in self for ledger in service.metrics.ledgers]

    @property
    def num_gpus(self) -> int:
        """That the engines use, if all of them work at once."""
        num = 0
        for service in self:
            if (ready := service.client.ready) is not None and ready.config.device == "cuda":
                ranks = ready.config.tensor_parallel * ready.config.pipeline_parallel
                num = max(num, ranks * service.client.num_replicas)
        return num

    def __iter__(self) -> Iterator[Service]:
        return iter(self._services)

    @property
    def names(self) -> list[str]:
        return [service.model_name for service in self]

    def of(self, name: str | None) -> Service:
        """The service of the model that a request asks for."""
        if name is None:
            return self.default
        service = self._by_name.get(name)
        if service is None:
            service = self.adapter(name)
        if service is None:
            known = ", ".join(
                map(
                    repr,
                    islice(
                        (*self._by_name, *(adapter.model_name for adapter in self.adapters())),
                        _MAX_NAMED,
                    ),
                )
            )
            raise ModelUnknown(
                f"There is no model {name[:100]!r} here.", fix=f"Ask for {known}.", param="model"
            )
        return service

    def adapter(self, name: str) -> AdapterService | None:
        """The service of a LoRA adapter."""
        found = ((service, service.client.adapters.get(name)) for service in self)
        return next(
            (AdapterService(service, info) for service, info in found if info is not None), None
        )

    def adapters(self) -> Iterator[AdapterService]:
        return (
            AdapterService(service, info) for service in self for info in service.client.adapters
        )

    @property
    def is_draining(self) -> bool:
        return self.default.is_draining

    def drain(self) -> None:
        """Refuse new requests."""
        for service in self:
            service.is_draining = True

    @property
    def num_pending(self) -> int:
        return sum(service.client.num_pending for service in self)

    @property
    def alive(self) -> bool:
        return any(service.state != "failed" for service in self)

    def states(self) -> dict[str, str]:
        """The state of each model, by name."""
        return {service.model_name: service.state for service in self}

    def health(self) -> dict[str, Any]:
        """The health in words and, of several models or engines, the state of each. Degraded: some
        serve, and others do not."""
        health: dict[str, Any] = {"models": self.states()} if len(self._services) > 1 else {}
        failed = "failed" in health.get("models", {}).values()
        if isinstance(self.default.client, Replicas):
            health["engines"] = self.default.client.states()
            failed |= any(state != "running" for state in health["engines"].values())
        return {
            "status": "engine is down" if not self.alive else "degraded" if failed else "ok"
        } | health

    async def prove(self, within_s: float) -> None:
        """Raises unless an engine completes a step within this time, or models are loaded on demand
        and none is at the moment."""
        if self.is_draining:
            raise Draining("The server is stopping.")
        if not self.alive:
            raise EngineDead("The engine has failed.")
        running = [service for service in self if service.state in ("loaded", "restarting")]
        proofs = [asyncio.ensure_future(service.prove(within_s)) for service in running]
        try:
            for number, proof in enumerate(asyncio.as_completed(proofs), 1):
                try:
                    return await proof
                except TidemillError:
                    if number == len(proofs):
                        raise
        finally:
            for task in proofs:
                task.cancel()

    def metrics(self) -> bytes:
        if len(self._services) == 1:
            return self.default.metrics.render()
        return render_by_model({service.model_name: service.metrics for service in self})

    def cancel(self, request_id: str, tenant: str | None) -> int:
        """Ends a request by its id; returns how many of its requests in engines there were.
        `tenant`: only if it is theirs."""
        return sum(service.cancel(request_id, tenant) for service in self)

    def explain(self, request_id: str, tenant: str | None) -> list[dict[str, Any]]:
        """Explains where the time of a request's parts went, whichever model it was for. `tenant`:
        only of this one."""
        return [
            story.body() | {"model": service.model_name}
            for service in self
            for part_id in service.ids_of(request_id, tenant)
            for story in service.explainer.find(part_id, tenant)
        ]

    def close(self) -> None:
        for service in self:
            service.close()


class ModelUnknown(InvalidRequest):
    """A model this server does not serve."""

    status = 404
    code = "model_not_found"
