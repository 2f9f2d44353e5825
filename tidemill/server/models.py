"""Models: the models that this server serves, by name. The one place where a request gets the service of its model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from pydantic import BaseModel

from tidemill.errors import InvalidRequest
from tidemill.server.explain import Story
from tidemill.server.guard import Caller
from tidemill.server.service import Service

WholeResponse = Callable[[Any, Caller], Awaitable[bytes]]


class Models:
    def __init__(self, services: Sequence[Service]) -> None:
        """The first is for requests that name no model."""
        self._services = list(services)
        self._by_name = {service.model_name: service for service in services}
        self.default = self._services[0]
        # Whole responses by route: the model of the body and the function that makes the response. Batches use them, too.
        self.whole_responses: dict[str, tuple[type[BaseModel], WholeResponse]] = {}

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
            known = ", ".join(repr(one) for one in self._by_name)
            raise ModelUnknown(f"There is no model {name[:100]!r} here.", fix=f"Ask for {known}.", param="model")
        return service

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
        return any(service.client.alive for service in self)

    def cancel(self, request_id: str, tenant: str | None) -> int:
        """Ends a request by its id; returns how many of its requests in engines there were. `tenant`: only if it is theirs."""
        return sum(service.cancel(request_id, tenant) for service in self)

    def stories(self, request_id: str, tenant: str | None) -> list[Story]:
        """What is known of a request, whichever model it was for. `tenant`: only of this one."""
        return [story for service in self for story in service.explainer.find(request_id, tenant)]

    def close(self) -> None:
        for service in self:
            service.close()


class ModelUnknown(InvalidRequest):
    """A model this server does not serve."""

    status = 404
    code = "model_not_found"
