"""A process that streams the weights of a model, and says what it generated and by how much its
memory grew.

    python -m tests.engine.streamed_process OPTIONS REQUESTS    JSON: fields of EngineOptions; prompts by name
"""

import json
import sys

from bench.streaming import anonymous_bytes
from tests.helpers import Answer, greedy, take
from tidemill.config import EngineOptions
from tidemill.engine.load import load_core
from tidemill.types.wire import Submit


def main() -> None:
    options, asked = map(json.loads, sys.argv[1:])
    before = anonymous_bytes()
    core = load_core(EngineOptions(**options))
    grown = anonymous_bytes() - before
    answers = {name: Answer() for name in asked}
    for name, prompt in asked.items():
        core.submit(Submit(name, prompt, greedy(64, ignore_eos=True)))
    while core.has_work:
        take(core, answers)
        grown = max(grown, anonymous_bytes() - before)
    streaming = core.runner.model.streaming
    print(
        json.dumps(
            {
                "grown": grown,
                "weights": core.config.weight_bytes,
                "streamed": 0 if streaming is None else streaming.streamed_bytes,
                "tokens": {name: answer.tokens for name, answer in answers.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
