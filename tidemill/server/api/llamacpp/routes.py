"""llama.cpp's own API: completion, infill, embedding, and what its clients ask about the server."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends

from tidemill.errors import TidemillError
from tidemill.server.api.llamacpp.codec import (
    InfillCodec,
    LlamaCompletionCodec,
    LlamaEmbeddings,
    settings,
)
from tidemill.server.api.openai.messages import ChatMessages
from tidemill.server.generation.models import Models
from tidemill.server.generation.pipeline import add_endpoint
from tidemill.server.generation.service import Service
from tidemill.server.http.body import body_of, schema_of
from tidemill.server.observe.timeline import RequestTimeline
from tidemill.types.sampling import SamplingParams
from tidemill.version import __version__


def make_router(models: Models) -> APIRouter:
    router = APIRouter()
    add_endpoint(router, models, "/completion", LlamaCompletionCodec)
    add_endpoint(router, models, "/completions", LlamaCompletionCodec, include_in_schema=False)
    add_endpoint(router, models, "/infill", InfillCodec)
    add_endpoint(router, models, "/embedding", LlamaEmbeddings)
    add_endpoint(router, models, "/embeddings", LlamaEmbeddings, include_in_schema=False)

    @router.post("/apply-template", openapi_extra=schema_of(ChatMessages))
    async def apply_template(body: ChatMessages = Depends(body_of(ChatMessages))) -> dict[str, str]:
        """Renders the prompt of a chat for /completion, which puts the first token before it."""
        service = models.of(body.model)
        return {
            "prompt": service.tokenizer.as_prompt(
                await service.render_chat(body.conversation, **body.template_options())
            )
        }

    @router.get("/props")
    async def props(model: str | None = None) -> dict[str, Any]:
        return _props(models.of(model))

    @router.get("/slots")
    async def slots(fail_on_no_slot: str = "", model: str | None = None) -> list[dict[str, Any]]:
        """Requests that are being computed, without their texts, then the free slots."""
        service = models.of(model)
        if not service.response_defaults.shows_slots:
            raise SlotsHidden(
                "This server does not show its slots.", fix="Start it without --no-slots."
            )
        slots_now = _slots(service)
        if fail_on_no_slot == "1" and all(slot["is_processing"] for slot in slots_now):
            raise NoSlot("No slot is free.")
        return slots_now

    return router


class SlotsHidden(TidemillError):
    kind = "not_supported_error"
    status = 501


class NoSlot(TidemillError):
    kind = "unavailable_error"
    status = 503


# ---- what is said about the server


def _props(service: Service) -> dict[str, Any]:
    tokenizer, config = service.tokenizer, service.ready.config
    eos = next(iter(tokenizer.eos_token_ids), None)
    defaults = settings(
        service, service.defaults.fill(SamplingParams(), config.max_context, null_is_absent=True)
    )
    return {
        "default_generation_settings": {"id": 0, "n_ctx": config.max_context, "params": defaults},
        "total_slots": config.max_requests,
        "model_alias": service.model_name,
        "model_path": service.model_name,  # where its files are is nobody's business
        "chat_template": tokenizer.chat_template.source if tokenizer.chat_template else "",
        "bos_token": ""
        if tokenizer.bos_token_id is None
        else tokenizer.token_text(tokenizer.bos_token_id),
        "eos_token": "" if eos is None else tokenizer.token_text(eos),
        "modalities": {"vision": False, "audio": False},
        "build_info": f"tidemill {__version__}",
    }


def _slots(service: Service) -> list[dict[str, Any]]:
    config = service.ready.config
    running = [
        story
        for story in service.explainer.under_way()
        if story.state not in ("queued", "preempted")
    ]
    busy = [_slot(i, config.max_context, story) for i, story in enumerate(running)]
    return busy + [
        _slot(i, config.max_context, None) for i in range(len(busy), config.max_requests)
    ]


def _slot(number: int, num_context: int, story: RequestTimeline | None) -> dict[str, Any]:
    slot = {
        "id": number,
        "n_ctx": num_context,
        "speculative": False,
        "is_processing": story is not None,
    }
    if story is None:
        return slot
    decode = story.spans.get("decode")
    num_decoded = (story.first_token_s is not None) + (decode.num_tokens if decode else 0)
    return slot | {
        "id_task": story.request_id.partition("/")[2],  # without the tenant
        "n_prompt_tokens": story.num_prompt,
        "n_prompt_tokens_cached": story.num_cached,
        "next_token": [{"has_next_token": True, "n_decoded": num_decoded}],
    }
