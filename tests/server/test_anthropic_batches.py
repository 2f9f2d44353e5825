"""Anthropic's Message Batches by its official client, over the batches of /v1/batches."""

import anthropic
import httpx
import pytest

from tests.server.conftest import KEYS
from tests.waiting import until
from tidemill.cluster.router.owners import referred

ASK = {
    "model": "tiny",
    "max_tokens": 5,
    "messages": [{"role": "user", "content": "How high is the water?"}],
}
GREEDY = {"temperature": 0}
# It cannot end earlier, and a batch of them is under way until it is cancelled.
LONG = ASK | {
    "max_tokens": 3500,
    "output_format": {"type": "json_schema", "schema": {"type": "string", "minLength": 3400}},
}


@pytest.fixture(scope="module")
def client(roomy):
    return anthropic.Anthropic(base_url=roomy.url, api_key="none", max_retries=0)


def end(client, batch):
    until(lambda: client.messages.batches.retrieve(batch.id).processing_status == "ended")
    return client.messages.batches.retrieve(batch.id)


def requests_of(*params):
    return [{"custom_id": f"line {i}", "params": one} for i, one in enumerate(params)]


def test_a_batch_and_its_results(client):
    begun = client.messages.batches.create(
        requests=requests_of(ASK | GREEDY, ASK | {"colour": 1}, ASK | {"model": "other"})
    )
    assert begun.request_counts.processing == 3
    assert (begun.processing_status, begun.results_url) == ("in_progress", None)
    batch = end(client, begun)
    assert batch.request_counts.model_dump() == {
        "canceled": 0,
        "errored": 2,
        "expired": 0,
        "processing": 0,
        "succeeded": 1,
    }
    good, wrong, unknown = client.messages.batches.results(batch.id)
    assert good.custom_id == "line 0"
    assert good.result.message.content == client.messages.create(**ASK, extra_body=GREEDY).content
    assert (wrong.result.type, wrong.result.error.error.type) == (
        "errored",
        "invalid_request_error",
    )
    assert "colour" in wrong.result.error.error.message
    assert unknown.result.error.error.type == "not_found_error"
    assert client.messages.batches.delete(batch.id).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.retrieve(batch.id)


def test_lists_have_batches_of_messages_only(client, roomy):
    ids = [
        end(client, client.messages.batches.create(requests=requests_of(ASK))).id for _ in range(3)
    ]
    line = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 1}}'
    file = httpx.post(
        f"{roomy.url}/v1/files", files={"file": ("lines.jsonl", line)}, data={"purpose": "batch"}
    ).json()
    asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    other = httpx.post(f"{roomy.url}/v1/batches", json=asked).json()["id"]
    assert [one.id for one in client.messages.batches.list(limit=2)][:3] == ids[::-1]
    assert client.messages.batches.list(limit=1, after_id=ids[1]).data[0].id == ids[0]
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.retrieve(other)


def test_a_batch_is_cancelled(client):
    batch = client.messages.batches.create(requests=requests_of(*[LONG] * 100))
    with pytest.raises(anthropic.BadRequestError, match="not ended"):
        client.messages.batches.delete(batch.id)
    with pytest.raises(anthropic.BadRequestError, match="not ended"):
        client.get(f"/v1/messages/batches/{batch.id}/results", cast_to=object)
    batch = end(client, client.messages.batches.cancel(batch.id))
    assert batch.cancel_initiated_at is not None
    assert batch.request_counts.canceled + batch.request_counts.succeeded == 100
    assert batch.request_counts.canceled > 0
    assert {one.result.type for one in client.messages.batches.results(batch.id)} <= {
        "canceled",
        "succeeded",
    }


def test_what_cannot_be_a_batch(client, tenants):
    twice = [{"custom_id": "a", "params": ASK}] * 2
    for wrong in (
        [],
        twice,
        requests_of(ASK | {"stream": True}),
        [{"custom_id": "", "params": ASK}],
        [{"params": ASK}],
    ):
        with pytest.raises(anthropic.BadRequestError, match="requests"):
            client.messages.batches.create(requests=wrong)
    one, other = (
        anthropic.Anthropic(base_url=tenants.url, api_key=key, max_retries=0) for key in KEYS
    )
    made = one.messages.batches.create(requests=requests_of(ASK))
    with pytest.raises(anthropic.NotFoundError):
        other.messages.batches.retrieve(made.id)
    end(one, made)


def test_a_router_finds_the_server_of_a_batch():
    assert referred("/v1/messages/batches/batch-1/results") == ("messages/batches", "batch-1")
    assert referred("/v1/messages") is None
