"""Routes of other servers that this one does not have: each is refused by name, with the reason and
what to use instead."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter
from starlette.responses import Response

from tidemill.errors import NotOffered

ROUTES: dict[str, tuple[str, str]] = {
    "/v1/responses/compact": (
        "Its result is an encrypted summary that only OpenAI's models read.",
        "Ask for a summary by /v1/responses and begin a new conversation with it, or send "
        "truncation auto.",
    ),
    "/inference/v1/generate": (
        "Its requests bear what vLLM's own renderer makes of pictures and prompts.",
        "Send token ids to /v1/completions with return_token_ids, or to /generate.",
    ),
    "/v1/chat": (
        "Cohere's chat API is not implemented.",
        "Use /v1/chat/completions, /v1/responses or /v1/messages.",
    ),
    "/v2/chat": (
        "Cohere's chat API is not implemented.",
        "Use /v1/chat/completions, /v1/responses or /v1/messages.",
    ),
}


def make_router() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    for path, (reason, fix) in ROUTES.items():
        router.add_api_route(path, partial(_refuse, path, reason, fix), methods=["POST"])
    return router


async def _refuse(path: str, reason: str, fix: str) -> Response:
    raise NotOffered(f"{path} is not offered. {reason}", fix=fix)
