"""Bodies of very many parts: how a request is routed is decided in bounded time."""

import pytest

from tidemill.cluster.router.keys import Prompt, read_prompt


@pytest.mark.parametrize(
    "body",
    [
        b'{"input":[' + b'{"id":1},' * 70_000 + b'{"id":1}]}',
        b'{"conversation":{"a":[' + b"1," * 2_000_000 + b"1]}}",
    ],
)
def test_bodies_of_too_many_parts_are_not_looked_at(body):
    """The server refuses them."""
    assert read_prompt(body, b"t") == Prompt()


def test_messages_of_a_body_with_very_many_items_are_not_looked_at():
    known = read_prompt(b'{"model":"m","messages":[' + b"1," * 200_000 + b"1]}", b"t")
    assert (known.model, len(known.keys)) == ("m", 0)
