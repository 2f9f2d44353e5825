"""The recording that is shipped for this kind of CPU: a part of it is computed again. All of it:
`make replay`."""

import pytest

from bench.mixed_load import ADAPTERS
from bench.replay_gate import RECORDINGS, certify, shipped
from bench.tiny_models import KINDS
from tidemill.record.reader import Recording

EVERY = 3


@pytest.fixture(scope="module")
def recording():
    return shipped() or pytest.skip("no recording is shipped for this CPU's kernels")


def test_a_third_of_the_requests_has_every_token(recording, tmp_path):
    certificate = certify(recording, tmp_path / "models", "together", EVERY)
    assert list(certificate.lines()) == [
        line for line in certificate.lines() if "different" not in line
    ]
    assert certificate.is_equal
    assert certificate.num_compared > 1000 // EVERY


@pytest.mark.parametrize("folder", sorted(RECORDINGS.iterdir()), ids=lambda folder: folder.name)
def test_what_is_shipped_is_of_every_kind(folder):
    (server,) = Recording(folder).servers
    assert len(server.requests) >= 1000
    assert set(server.models) == {*KINDS, "smollm2"}
    names = {info.name for adapters in server.adapters.values() for info in adapters.values()}
    assert names == set(ADAPTERS)
    params = [request.begun.request.params for request in server.requests]
    for wanted in (
        lambda each: each.grammar, lambda each: each.beams, lambda each: each.kv_policy, lambda each: each.n > 1,
        lambda each: each.pooling, lambda each: each.logprobs is not None, lambda each: each.stop,
        lambda each: each.prompt_logprobs,
    ):  # fmt: skip
        assert sum(bool(wanted(each)) for each in params) > 10
    assert len({request.begun.api for request in server.requests}) >= 10
    assert any(request.ended.error for request in server.requests)
