"""The prompt of a response: the conversation so far and the new items, as messages of the model's
chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidemill.errors import InvalidRequest
from tidemill.server.api.responses.types import (
    MAX_REFERENCES,
    ResponsePrompt,
    ResponseRequest,
    is_reference,
    messages_of,
)
from tidemill.server.generation.conversation import (
    template_tools,
    template_variables,
    with_one_system,
)
from tidemill.server.generation.service import Service
from tidemill.server.http.aside import aside
from tidemill.server.http.context import RequestContext
from tidemill.server.store.responses import Item, Store

_BYTES_PER_ITEM = 256  # of JSON, to estimate


def items_of(
    store: Store, body: ResponsePrompt, tenant: str
) -> tuple[tuple[Item, ...], list[dict[str, Any]]]:
    """The items of the conversation so far, and those of this request."""
    new, before_id, conversation_id = (
        body.new_items(),
        body.previous_response_id,
        body.conversation_id,
    )
    if sum(map(is_reference, new)) > MAX_REFERENCES:
        what = f"More than {MAX_REFERENCES} item references."
        raise InvalidRequest(what, fix="Send the items.", param="input")
    new = [
        store.output_item(tenant, item["id"]).members() if is_reference(item) else item
        for item in new
    ]
    if before_id is not None and conversation_id is not None:
        what = "previous_response_id and conversation are both given."
        raise InvalidRequest(what, fix="Give one.", param="conversation")
    if conversation_id is not None:
        return store.get_to_continue(tenant, conversation_id, "conversation").items, new
    if before_id is None:
        return (), new
    if not before_id.startswith("resp"):
        what = "previous_response_id is not the id of a response."
        raise InvalidRequest(what, param="previous_response_id")
    if (tenant, before_id) in store.running:
        what = "The previous response is in progress."
        raise InvalidRequest(what, fix="Wait for its end.", param="previous_response_id")
    earlier = store.get_to_continue(tenant, before_id)
    return (*earlier.items, *earlier.outputs), new


async def prompt_of(
    service: Service,
    body: ResponseRequest,
    before: Sequence[Item],
    new: list[dict[str, Any]],
    call: RequestContext,
) -> list[int]:
    """The prompt's token ids."""
    size = sum(len(item.text) for item in before) + _BYTES_PER_ITEM * (len(before) + len(new))
    messages = await aside(lambda: messages_of([*(item.members() for item in before), *new]), size)
    if not messages:
        raise InvalidRequest("The parameter 'input' is required.", param="input")
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    template = service.tokenizer.chat_template
    effort = body.reasoning.effort if body.reasoning else None
    source = template.source if template else None
    variables, unknown = template_variables(source, effort, None)
    call.ignored |= {"reasoning.effort"} if unknown else set()
    tools = template_tools(callee.function() for callee in body.callable_tools())
    options: dict[str, Any] = {
        "tools": tools,
        "variables": variables | (body.chat_template_kwargs or {}),
    }
    messages = with_one_system(messages)
    if body.truncation != "auto":
        return await service.encode_chat(messages, **options)
    return await _truncated(service, messages, options, body.max_output_tokens or 1)


async def _truncated(
    service: Service, messages: list[dict[str, Any]], options: dict[str, Any], room: int
) -> list[int]:
    """Without as many of the oldest turns as must go for the prompt to fit. A turn begins with a
    message of the user."""
    context = service.max_context
    room = min(room, context // 2)
    begin = int(messages[0]["role"] == "system")
    users = (i for i, message in enumerate(messages) if message["role"] == "user" and i > begin)
    cuts = [begin, *users]

    async def encoded(cut: int) -> list[int]:
        return await service.encode_chat([*messages[:begin], *messages[cut:]], **options)

    kept: list[int] | None = None
    low, high = 0, len(cuts) - 1
    middle = low  # most prompts fit as they are
    while low <= high:
        ids: list[int] | None = None
        try:
            ids = await encoded(cuts[middle])
        except InvalidRequest as error:  # too long to be tokenized, or something else
            if error.param != "prompt":
                raise
        if ids is not None and len(ids) + room <= context:
            kept, high = ids, middle - 1
        else:
            low = middle + 1
        middle = (low + high) // 2
    return kept if kept is not None else await encoded(cuts[-1])
