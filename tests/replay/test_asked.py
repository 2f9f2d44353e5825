"""Which requests of a recording are computed again."""

import pytest

from tests.record.test_files import MODEL, put
from tidemill.errors import ConfigError
from tidemill.record.reader import Recording
from tidemill.record.writer import RecordingWriter
from tidemill.replay import replay as replay_module
from tidemill.replay.replay import ReplayOptions, replay


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Asks for requests of two servers: "common" and "first" or "second"."""
    for own in ("first", "second"):
        writer = RecordingWriter(tmp_path)
        writer.put(MODEL, 100)
        put(writer, "cmpl/common", [1])
        put(writer, f"cmpl/{own}", [1])
        writer.close()
    recording = Recording(tmp_path)

    def chosen(_, server, requests, options):
        return recording.servers.index(server), [request.request_id for request in requests]

    monkeypatch.setattr(replay_module, "_replay_server", chosen)
    return lambda *names: replay(
        recording, recording.servers, ReplayOptions(requests=frozenset(names))
    )


def test_a_request_is_found_whichever_server_had_it(asked):
    assert asked("second") == [(1, ["cmpl/second"])]
    assert asked("cmpl/common") == asked("0") == [(0, ["cmpl/common"]), (1, ["cmpl/common"])]
    assert len(asked()) == 2


def test_a_name_that_nobody_has_is_told(asked):
    with pytest.raises(ConfigError, match="no request 2, third"):
        asked("first", "third", "2")
