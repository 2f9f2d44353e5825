"""The server whose clients are checked: it serves `tiny`, `scripted` (it thinks, then says ok) and
`smollm2`."""

import os

import pytest

for variable in ("ANONYMIZED_TELEMETRY", "LANGSMITH_TRACING", "PYDANTIC_AI_NO_TELEMETRY"):
    os.environ[variable] = "false"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise its import asks GitHub


def pytest_addoption(parser):
    parser.addoption("--server", required=True, help="the server's address")


@pytest.fixture(scope="session")
def url(request) -> str:
    return request.config.getoption("--server")


@pytest.fixture(scope="session")
def base(url) -> str:
    """Returns the base URL for OpenAI's clients."""
    return f"{url}/v1"
