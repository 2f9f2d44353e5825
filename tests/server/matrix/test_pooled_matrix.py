"""Every API of vectors and scores with every feature."""

import pytest

from tests.server.matrix.pooled import POOLED, POOLED_ROWS, PooledAPI, check_pooled_lack


@pytest.mark.parametrize("feature", POOLED_ROWS)
@pytest.mark.parametrize("dialect", POOLED, ids=lambda dialect: dialect.name)
def test_cell(request, dialect, feature):
    server = dialect.other if feature == "wrong kind of model" else dialect.server
    api = PooledAPI(request.getfixturevalue(server).url, dialect)
    if feature in dialect.lacks:
        check_pooled_lack(api, feature, dialect.lacks[feature])
    else:
        POOLED_ROWS[feature](api)
