"""Messages between the server and its engines arrive as they were sent."""

from pathlib import Path

import pytest

from bench.tiny_models import KINDS, make
from tidemill.engine.load import inspect
from tidemill.kernels import machine
from tidemill.types.wire import Inspected, decode_from_engine, encode


@pytest.mark.parametrize("kind", KINDS)
def test_layers_arrive_as_the_kinds_that_they_are(kind: str, tmp_path: Path):
    make(tmp_path, kind)
    sent = Inspected(inspect(str(tmp_path))[2], machine.detect())
    assert decode_from_engine(encode(sent)) == sent
