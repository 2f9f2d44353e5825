"""Extraction in several turns: a conversation about one text, in which each reply is JSON of its
own schema.

python examples/extract_json.py [--model MODEL | --url URL]
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from measure import backend_of, compare

from tidemill import assistant, gen, program, system, user
from tidemill.programs import State

TEXT = """Eling Tide Mill stands on the edge of Southampton Water in Hampshire. A mill at this place is named in the
Domesday Book of 1086. The building of today is from about 1785. It had two wheels, each of which drove its
own stones. It was given up in 1946 and repaired in 1975, and it grinds again since 1980. One of the wheels
turns on most days, for about four hours after high water."""


def record(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


NAME = {"type": "string", "maxLength": 40}
YEAR = {"type": "integer", "minimum": 0, "maximum": 2100}
QUESTIONS = {
    "place": ("Where is the mill?", record(name=NAME, county=NAME)),
    "years": ("When was it first named, and when was it built?", record(named=YEAR, built=YEAR)),
    "wheels": (
        "How many wheels has it, and does it still grind?",
        record(wheels={"type": "integer"}, grinds={"type": "boolean"}),
    ),
}


@program
def extract(s: State, text: str) -> dict[str, Any]:
    s += system("You extract facts from a text as JSON.")
    found = {}
    for i, (name, (question, schema)) in enumerate(QUESTIONS.items()):
        s += user(f"{text}\n\n{question}" if i == 0 else question)
        s += assistant(gen(name, json=schema, max_tokens=160, temperature=0))
        found[name] = json.loads(s[name])
    return found


def main(given: Sequence[str] | None = None) -> None:
    state = compare(extract, backend_of(__doc__ or "", given), TEXT)
    print(json.dumps(state.returned, indent=2))


if __name__ == "__main__":
    main()
