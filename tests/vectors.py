"""A family whose prompts have pictures: random vectors in the place of tokens, which no encoder
makes."""

from dataclasses import replace

import numpy as np

from tidemill.models.llama import Llama
from tidemill.types.inputs import PICTURE, Segment, key_of


class VectorLlama(Llama):
    @classmethod
    def read_config(cls, checkpoint):
        return replace(super().read_config(checkpoint), takes_embeddings=True)


def with_vectors(prompt, places, hidden_size, kind=PICTURE, seed=0, scale=1.0):
    """A prompt, its segments and their contents: each place is where random vectors begin and how
    many there are."""
    draw, segments, contents, prompt = np.random.default_rng(seed), [], {}, list(prompt)
    for start, length in places:
        content = (scale * draw.standard_normal((length, hidden_size))).astype(np.float32).tobytes()
        segments.append(Segment(start, length, kind, key_of(content)))
        contents[key_of(content)] = content
        prompt[start : start + length] = [3] * length
    return prompt, segments, contents
