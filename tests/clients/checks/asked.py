"""Fixtures that the checks of all libraries share.

The model `tiny` is random, so grammars fix what it writes: a tool that must be called, an answer of
a schema.
"""

import enum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

QUESTION = "When is high water?"
MESSAGES = [{"role": "user", "content": QUESTION}]
LIMITS = {"max_tokens": 20, "temperature": 0}  # less than the random model wants to write
ROOM = {"max_tokens": 400, "temperature": 0}  # for JSON, of which each character is a token


class Port(enum.Enum):
    BREST = "Brest"
    HULL = "Hull"


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")  # a random model would invent members without end


class Water(Closed):
    """A level of the sea."""

    hour: Literal[6, 12]
    is_spring: bool


class Tide(Closed):
    """A tide of a port."""

    port: Port
    high: Water
    low: Water | None = None
    remarks: list[Literal["calm", "rough"]] = Field(max_length=1)


class Pilot(Closed):
    """Any answer of a model that follows the schema is wrong for its program."""

    name: Literal["Ann"]

    @field_validator("name")
    @classmethod
    def never(cls, value):
        raise ValueError("Ann is ill")


PARAMETERS = {
    "type": "object",
    "properties": {"port": {"enum": ["Brest"]}},
    "required": ["port"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "high_water", "description": "Says when.", "parameters": PARAMETERS},
}
ANSWER = {"type": "json_schema", "json_schema": {"name": "port", "schema": PARAMETERS}}
