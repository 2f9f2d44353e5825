"""Every API with every feature: what it promises, or that it says it does not have it."""

import pytest

from tests.server.matrix.cells import cells
from tests.server.matrix.checks import ROWS, check_lack, lack_of
from tests.server.matrix.client import API


@pytest.mark.parametrize(("dialect", "is_streamed", "feature"), cells())
def test_cell(request, dialect, is_streamed, feature):
    server = request.getfixturevalue(ROWS[feature].server)
    api = API(server.url, dialect, is_streamed)
    if (lack := lack_of(dialect, feature)) is not None:
        check_lack(api, feature, lack)
    else:
        ROWS[feature].check(api)
