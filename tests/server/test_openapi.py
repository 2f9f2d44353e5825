"""What /openapi.json says is true: schemathesis asks whatever it allows, and whatever it forbids."""

from contextlib import suppress
from typing import Any

import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from pydantic import ValidationError
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from tests.helpers import LONG_S
from tidemill.server.http.body import Body, schema_of

CHECKS = [
    not_a_server_error,
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
]


class Sample(Body):
    name: str
    number: int = 1
    anything: Any = None


@pytest.fixture(scope="module")
def api(server):
    made = schemathesis.openapi.from_url(f"{server.url}/openapi.json", timeout=LONG_S)
    made.config.checks.negative_data_rejection.expected_statuses = [
        "400",
        "404",
        "405",
        "413",
        "415",
    ]
    return made


def ask_all(api, mode, num_examples, every=1):
    """Of every route (or fewer), by hypothesis; its plugin for pytest is not used, since it follows
    pytest's insides."""
    operations = [result.ok() for result in api.get_all_operations()]
    assert len(operations) > 15
    for operation in operations[::every]:

        @settings(
            max_examples=num_examples,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
            database=None,
            phases=[Phase.generate],
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case):
            response = case.call(timeout=LONG_S)
            case.validate_response(response, checks=CHECKS)
            if response.status_code >= 400 and mode is GenerationMode.POSITIVE:
                # What the description allows may still be too long, of another model, at odds with
                # itself, or have no time.
                error = response.json()["error"]
                # vLLM's own routes and parameter
                is_vllms = case.path in ("/pooling", "/classify") or "max_model_len" in error
                usual = "BadRequestError" if is_vllms else "invalid_request_error"
                if case.path.startswith("/v1/messages"):  # Anthropic's
                    usual = {404: "not_found_error", 408: "timeout_error"}.get(
                        response.status_code, usual
                    )
                if case.path.startswith("/v1beta/"):  # Google's
                    assert error["status"] in ("INVALID_ARGUMENT", "NOT_FOUND")
                else:
                    assert error["type"] in (usual, "deadline_exceeded")
                assert error["message"]

        with suppress(Unsatisfiable):  # there may be nothing that is forbidden
            ask()


@pytest.mark.parametrize(
    ("num_examples", "every"), [(1, 2), pytest.param(100, 1, marks=pytest.mark.slow)]
)
def test_what_is_allowed(api, num_examples, every):
    ask_all(api, GenerationMode.POSITIVE, num_examples, every)


@pytest.mark.parametrize(
    ("num_examples", "every"), [(1, 12), pytest.param(100, 1, marks=pytest.mark.slow)]
)
def test_what_is_forbidden(api, num_examples, every):
    ask_all(api, GenerationMode.NEGATIVE, num_examples, every)


def test_null_is_allowed_for_what_may_be_absent():
    """Unknown parameters, too; what is required is not."""
    schema = schema_of(Sample)["requestBody"]["content"]["application/json"]["schema"]
    assert schema["additionalProperties"] == {"type": "null"}
    allowed = {"name": "x", "number": None, "anything": None, "unknown": None}
    jsonschema.validate(allowed, schema)
    Sample.model_validate(allowed)
    for wrong in ({"name": None}, {"name": "x", "number": "1"}, {"name": "x", "unknown": 0}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
        with pytest.raises(ValidationError):
            Sample.model_validate(wrong)
