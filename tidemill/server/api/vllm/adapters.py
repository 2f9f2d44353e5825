"""LoRA adapters over HTTP: an adapter is a model of its own by name; vLLM's routes load and unload
it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends
from pydantic import Field
from starlette.responses import PlainTextResponse, Response

from tidemill.engine.adapter_names import MAX_NAME_CHARS
from tidemill.errors import EngineDead, InvalidRequest
from tidemill.server.generation.models import AdapterService, Models, ModelUnknown
from tidemill.server.http.body import Body, body_of, schema_of


class LoadRequest(Body):
    lora_name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)
    lora_path: str = Field(min_length=1, max_length=4096)  # a folder on the server
    load_inplace: bool = False  # also if there is one of this name
    base_model_name: str | None = None  # of the models served


class UnloadRequest(Body):
    without_effect = frozenset({"lora_int_id"})

    lora_name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)


def make_router(models: Models) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/load_lora_adapter",
        openapi_extra=schema_of(LoadRequest),
        response_class=PlainTextResponse,
    )
    async def load(body: LoadRequest = Depends(body_of(LoadRequest))) -> Response:
        service = models.of(body.base_model_name)
        if isinstance(service, AdapterService):
            raise InvalidRequest(
                f"{body.base_model_name!r} is an adapter itself.", param="base_model_name"
            )
        if any(body.lora_name in (service.model_name, *service.aliases) for service in models):
            raise InvalidRequest(f"{body.lora_name!r} is the name of a model.", param="lora_name")
        if any(
            other is not service and other.client.adapters.get(body.lora_name) for other in models
        ):
            raise InvalidRequest(
                f"{body.lora_name!r} is the name of another model's adapter.", param="lora_name"
            )
        if not service.client.working:
            raise EngineDead(
                f"The model {service.model_name!r} is not loaded at the moment.",
                fix="Try again in a moment.",
            )
        info = await service.client.adapters.load(body.lora_name, body.lora_path, body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{info.name}' added successfully.")

    @router.post(
        "/v1/unload_lora_adapter",
        openapi_extra=schema_of(UnloadRequest),
        response_class=PlainTextResponse,
    )
    async def unload(body: UnloadRequest = Depends(body_of(UnloadRequest))) -> Response:
        service = models.adapter(body.lora_name)
        if service is None:
            known = ", ".join(repr(adapter.model_name) for adapter in models.adapters()) or "none"
            raise ModelUnknown(
                f"There is no adapter {body.lora_name!r}.",
                fix=f"Loaded are: {known[:1000]}.",
                param="lora_name",
            )
        service.client.adapters.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return router


def adapter_card(card: dict[str, Any], service: AdapterService) -> dict[str, Any]:
    """The adapter's entry in /v1/models. `card`: the entry of a model of its name."""
    base = service.base.model_name
    return card | {"root": base, "parent": base, "aliases": [], "lora": {"rank": service.info.rank}}
