"""What quantized matmuls cost in quality: perplexity of the same GGUF on the same text, in float32
and quantized.

    python -m bench.perplexity --tokens 20480

The text is Python's own documentation as the standard library carries it (pydoc_data), so anyone
has it.
"""

from __future__ import annotations

import argparse
import math

from tidemill import LLM
from tidemill.compress.evaluate import default_text, measure_quality
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.weights.locate import locate

WINDOW = 1024


def text_ids(model: str, num_tokens: int) -> list[int]:
    ids = Tokenizer.load(locate(model)).encode(default_text())
    if len(ids) < num_tokens:
        raise SystemExit(f"The text has {len(ids)} tokens; {num_tokens} were requested.")
    return ids[:num_tokens]


def mean_logprob(model: str, dtype: str, ids: list[int]) -> float:
    """Of every token but the first of each window, given the tokens before it in the window."""
    llm = LLM(model, progress=False, dtype=dtype, prefix_caching=False, kv_memory_bytes=2**30)
    windows = [ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW)]
    return -math.log(measure_quality(llm, None, windows, lambda _: None).perplexity)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=20 * WINDOW)
    arguments = parser.parse_args()
    ids = text_ids(arguments.model, arguments.tokens)
    values = {
        dtype: math.exp(-mean_logprob(arguments.model, dtype, ids))
        for dtype in ("float32", "quantized")
    }
    for dtype, value in values.items():
        print(f"{dtype:8} perplexity {value:.4f} on {len(ids):,} tokens")
    print(f"quantized / float32: {values['quantized'] / values['float32']:.5f}")


if __name__ == "__main__":
    main()
