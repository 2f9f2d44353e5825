"""The endpoints whose requests may be lines of a batch, by their routes."""

from __future__ import annotations

from collections.abc import Mapping

from tidemill.server.api.anthropic.codec import MessagesCodec
from tidemill.server.api.openai.chat import ChatCodec
from tidemill.server.api.openai.completions import CompletionCodec
from tidemill.server.api.openai.embeddings import Embeddings
from tidemill.server.api.responses.codec import ResponseCodec
from tidemill.server.api.vllm.rerank import Rerank, Score
from tidemill.server.generation.pipeline import Endpoint

ENDPOINTS: Mapping[str, type[Endpoint]] = {
    "/v1/chat/completions": ChatCodec,
    "/v1/completions": CompletionCodec,
    "/v1/embeddings": Embeddings,
    "/v1/messages": MessagesCodec,
    "/v1/rerank": Rerank,
    "/v1/responses": ResponseCodec,
    "/v1/score": Score,
}
