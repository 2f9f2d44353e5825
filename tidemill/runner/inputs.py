"""InputRows: the rows of embeddings of segments, and the one place where they are put over those
that are looked up by id."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from tidemill.runner.state import upload
from tidemill.sched.plan import Encode, StepPlan


class InputRows:
    """In a step, a token's id less than zero is the number of its row here: -1 is the first."""

    def __init__(
        self,
        num_rows: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        self._rows_RH = torch.zeros(num_rows + 1, hidden_size, dtype=dtype, device=device)

    def take(self, plan: StepPlan) -> None:
        """Makes the rows that the step needs and that are not here yet."""
        for encode in plan.encodes:
            rows = upload(np.array(encode.rows, np.int64), self._rows_RH.device)
            self._rows_RH[rows] = self._encoded(encode)

    def _encoded(self, encode: Encode) -> torch.Tensor:
        """The rows of a segment, [N, H], from its content: float32."""
        content = np.frombuffer(encode.content, np.float32).reshape(len(encode.rows), -1)
        return upload(content.copy(), self._rows_RH.device).to(self._rows_RH.dtype)

    def embed(
        self, ids_T: torch.Tensor, look_up: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """The embeddings of a step. `look_up`: those of ids that are tokens."""
        rows_TH = self._rows_RH[(-ids_T).clamp(min=0).long()]
        return torch.where((ids_T < 0).unsqueeze(1), rows_TH, look_up(ids_T.clamp(min=0)))
