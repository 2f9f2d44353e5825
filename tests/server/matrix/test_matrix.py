"""Every API with every feature: what it promises, or that it says it does not have it."""

import pytest

from tests.server.matrix.cells import cells
from tests.server.matrix.checks import ROWS, check_lack
from tests.server.matrix.client import API


@pytest.mark.parametrize(("dialect", "is_streamed", "feature"), cells())
def test_cell(plain, dialect, is_streamed, feature):
    api = API(plain.url, dialect, is_streamed)
    if feature in dialect.lacks:
        check_lack(api, feature, dialect.lacks[feature])
    else:
        ROWS[feature](api)
