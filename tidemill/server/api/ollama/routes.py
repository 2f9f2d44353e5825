"""Ollama's API: chat, generate and embed, streamed as JSON lines, and what its clients ask about
models."""

from __future__ import annotations

import asyncio
import hashlib
import json
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Depends
from starlette.responses import Response

from tidemill.errors import InvalidRequest
from tidemill.frontend.infill import infill_tokens
from tidemill.server.api.ollama.codec import (
    LATEST,
    ChatCodec,
    EmbeddingsEndpoint,
    EmbedEndpoint,
    GenerateCodec,
    can_think,
    served,
)
from tidemill.server.api.ollama.types import Pull, Show
from tidemill.server.generation.models import Models, ModelUnknown
from tidemill.server.generation.pipeline import add_endpoint
from tidemill.server.generation.service import Service
from tidemill.server.http.body import body_of
from tidemill.server.http.responses import JSONLines, json_response
from tidemill.version import __version__

API_VERSION = "0.12.6"  # of Ollama, whose API this is; clients refuse older ones
_NEVER = "9999-12-31T23:59:59Z"

_json = msgspec.json.Encoder().encode


def make_router(models: Models) -> APIRouter:
    router = APIRouter(include_in_schema=False)  # it is described by Ollama

    for path, endpoint in (
        ("/api/chat", ChatCodec),
        ("/api/generate", GenerateCodec),
        ("/api/embed", EmbedEndpoint),
        ("/api/embeddings", EmbeddingsEndpoint),
    ):
        add_endpoint(router, models, path, endpoint, untyped=True)

    @router.api_route("/api/version", methods=["GET", "HEAD"])
    async def version() -> Response:
        return json_response({"version": API_VERSION, "tidemill": __version__})

    @router.api_route("/api/tags", methods=["GET", "HEAD"])
    async def tags() -> Response:
        return json_response(
            {"models": [_listed(service) for service in (*models, *models.adapters())]}
        )

    @router.get("/api/ps")
    async def running() -> Response:
        return json_response(
            {"models": [_running(service) for service in models if service.state == "loaded"]}
        )

    @router.post("/api/show")
    async def show(body: Show = Depends(body_of(Show, untyped=True))) -> Response:
        here = served(models, body.model or body.name)
        return json_response(await asyncio.to_thread(_shown, here))

    @router.post("/api/pull")
    async def pull(body: Pull = Depends(body_of(Pull, untyped=True))) -> Response:
        try:
            served(models, body.model or body.name)
        except ModelUnknown as error:
            raise ModelUnknown(
                error.message,
                fix="Models are loaded at start: tidemill serve MODEL.",
                param="model",
            ) from None
        line = _json({"status": "success"})
        return (
            Response(line + b"\n", media_type=JSONLines.media_type)
            if body.stream
            else json_response({"status": "success"})
        )

    for path, method, fix in (
        ("/api/create", "POST", "Start the server with the model file: tidemill serve MODEL."),
        ("/api/copy", "POST", "Start the server with --served-name NAME."),
        ("/api/push", "POST", "Upload models with the tools of their hub."),
        ("/api/delete", "DELETE", "Stop the server, and delete the model's files."),
    ):
        router.add_api_route(path, partial(_refuse, path, fix), methods=[method])
    return router


async def _refuse(path: str, fix: str) -> Response:
    raise InvalidRequest(f"{path} is not supported: this server does not change models.", fix=fix)


# ---- what is said about a model


def _listed(service: Service) -> dict[str, Any]:
    name, model, config = service.model_name, service.ready.model, service.ready.config
    full = name if ":" in name.rpartition("/")[2] else name + LATEST
    return {
        "name": full,
        "model": full,
        "modified_at": _since(service),
        "size": config.weight_bytes,
        "digest": hashlib.sha256(
            name.encode() + msgspec.json.encode(model)
        ).hexdigest(),  # of its description
        "details": _details(service),
    }


def _running(service: Service) -> dict[str, Any]:
    config = service.ready.config
    size = 0 if config.device == "cpu" else config.weight_bytes
    return _listed(service) | {
        "expires_at": _NEVER,
        "size_vram": size,
        "context_length": config.max_context,
    }


def _since(service: Service) -> str:
    return datetime.fromtimestamp(service.created_s, UTC).isoformat().replace("+00:00", "Z")


def _details(service: Service) -> dict[str, Any]:
    model, path, family = service.ready.model, service.tokenizer.path, _family(service)
    return {
        "parent_model": "",
        "format": "gguf" if path is not None and path.is_file() else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": _size(model.num_parameters),
        "quantization_level": max(
            model.stored, key=lambda kind: model.stored[kind], default="unknown"
        ),
    }


def _family(service: Service) -> str:
    """The model's family, named as in GGUF files: llama, not LlamaForCausalLM."""
    return (
        service.ready.model.architecture.partition("For")[0]
        .removesuffix("Model")
        .removesuffix("LMHead")
        .lower()
    )


def _size(num: int) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if num >= unit:
            return f"{num / unit:.1f}{name}"
    return str(num)


def _shown(service: Service) -> dict[str, Any]:
    tokenizer, model = service.tokenizer, service.ready.model
    rotation = model.token_layers[-1].rotation if model.token_layers else None
    kind = _family(service)
    ends = [text for token in tokenizer.eos_token_ids if (text := tokenizer.token_text(token))]
    can = {
        "completion": True,
        "tools": tokenizer.chat_template is not None,
        "thinking": can_think(service),
        "insert": infill_tokens(tokenizer) is not None,
    }
    capabilities = [name for name, is_there in can.items() if is_there]
    if model.own_pooling is not None:  # it generates nothing
        capabilities = [] if model.own_pooling == "score" else ["embedding"]
    template = tokenizer.chat_template.source if tokenizer.chat_template else ""
    return {
        "modelfile": f"FROM {service.model_name}",
        "parameters": "\n".join(
            [f"num_ctx {service.max_context}", *(f"stop {json.dumps(text)}" for text in ends)]
        ),
        "template": template,
        "details": _details(service),
        "model_info": {
            "general.architecture": kind,
            "general.parameter_count": model.num_parameters,
            f"{kind}.attention.head_count": model.num_heads,
            f"{kind}.attention.head_count_kv": model.num_kv_heads,
            f"{kind}.attention.layer_norm_rms_epsilon": model.norm_eps,
            f"{kind}.block_count": model.num_layers,
            f"{kind}.context_length": service.max_context,
            f"{kind}.embedding_length": model.hidden_size,
            f"{kind}.feed_forward_length": model.intermediate_size,
            **({f"{kind}.rope.freq_base": rotation.theta} if rotation else {}),
            f"{kind}.vocab_size": model.vocab_size,
            "tokenizer.ggml.bos_token_id": tokenizer.bos_token_id,
            "tokenizer.ggml.eos_token_id": next(iter(tokenizer.eos_token_ids), None),
        },
        "capabilities": capabilities,
        "modified_at": _since(service),
    }
