"""instructor, over the clients of openai and anthropic."""

import anthropic
import instructor
import openai
import pytest
from asked import MESSAGES, ROOM, Pilot, Tide, Water


@pytest.fixture(scope="module")
def client(base):
    return openai.OpenAI(base_url=base, api_key="none", max_retries=0)


MODES = ["TOOLS", "JSON_SCHEMA", "RESPONSES_TOOLS"]  # JSON asks for any object


@pytest.mark.parametrize("mode", MODES)
def test_instructor(client, mode):
    asked = instructor.from_openai(client, mode=instructor.Mode[mode])
    tide, raw = asked.create_with_completion(
        model="tiny", messages=MESSAGES, response_model=Tide, max_retries=0
    )
    assert isinstance(tide, Tide)
    assert raw.usage.total_tokens > 0


def test_instructor_streams(client):
    asked = instructor.from_openai(client)
    parts = list(
        asked.create_partial(model="tiny", messages=MESSAGES, response_model=Water, **ROOM)
    )
    whole = Water.model_validate(parts[-1].model_dump())
    # each is a part of the whole: of 12, the 1 comes first
    told = [part.model_dump(exclude_none=True) for part in parts]
    assert all(
        str(whole.model_dump()[name]).startswith(str(value))
        for part in told
        for name, value in part.items()
    )
    several = asked.create_iterable(model="tiny", messages=MESSAGES, response_model=Water, **ROOM)
    assert all(isinstance(water, Water) for water in several)


def test_instructor_retries_with_the_answer_in_the_history(client):
    from instructor.exceptions import InstructorRetryException

    for mode in ("TOOLS", "JSON_SCHEMA"):
        asked = instructor.from_openai(client, mode=instructor.Mode[mode])
        with pytest.raises(InstructorRetryException) as caught:
            asked.create(
                model="tiny", messages=MESSAGES, response_model=Pilot, max_retries=2, **ROOM
            )
        assert "Ann is ill" in str(caught.value)
        assert caught.value.n_attempts > 1


async def test_instructor_async_and_anthropic(url, base):
    async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as client:
        assert isinstance(
            await instructor.from_openai(client).create(
                model="tiny", messages=MESSAGES, response_model=Water
            ),
            Water,
        )
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        asked = instructor.from_anthropic(client)
        assert isinstance(
            asked.create(
                model="tiny", max_tokens=400, messages=MESSAGES, response_model=Tide, max_retries=0
            ),
            Tide,
        )
