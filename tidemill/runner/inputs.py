"""InputRows: the rows of embeddings of segments, and the one place where they are put over those that are looked up by id."""

from __future__ import annotations

import numpy as np
import torch

from tidemill.models.base import Model
from tidemill.runner.batch import Batch
from tidemill.runner.state import upload
from tidemill.sched.plan import Encode, StepPlan


class InputRows:
    """In a step, a token's id less than zero is the number of its row here: -1 is the first."""

    def __init__(self, num_rows: int, hidden_size: int, dtype: torch.dtype, device: torch.device | None = None) -> None:
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

    def put_over(self, embedded_TH: torch.Tensor, ids_T: torch.Tensor) -> torch.Tensor:
        """The embeddings of a step, of which those of ids less than zero are looked up here."""
        return torch.where((ids_T < 0).unsqueeze(1), self._rows_RH[(-ids_T).clamp(min=0).long()], embedded_TH)


def embed(model: Model, batch: Batch, inputs: InputRows | None) -> torch.Tensor:
    """The hidden states that the first layer starts from."""
    if inputs is None or not batch.has_inputs:
        return model.embed_at(batch.ids_T, batch.positions_T, batch.types_T)
    embedded_TH = model.embed_at(batch.ids_T.clamp(min=0), batch.positions_T, batch.types_T)
    return inputs.put_over(embedded_TH, batch.ids_T)
