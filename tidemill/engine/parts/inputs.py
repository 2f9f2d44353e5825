"""RequestInputs: refuses segments of prompts that this engine cannot compute."""

from __future__ import annotations

from tidemill.engine.moments import Engine, EngineComponents, Part, Submission
from tidemill.sched.request import BACKGROUND
from tidemill.types.inputs import check_segments


class RequestInputs(Part):
    @classmethod
    def of(cls, engine: Engine, components: EngineComponents) -> RequestInputs:
        return cls()

    def submit(self, submission: Submission) -> None:
        request, config, shape = submission.request, self.engine.config, self.engine.model_config
        in_background = request.priority >= BACKGROUND
        budget = config.background_budget if in_background else config.token_budget
        most = budget - config.max_requests + 1  # others that decode leave so many tokens of a step
        check_segments(
            request.segments,
            request.contents,
            len(request.prompt_ids),
            shape.input_row_bytes,
            most,
            shape.num_input_rows(config.token_budget),
        )
