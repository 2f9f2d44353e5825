"""Each way of quantizing against rounding to nearest at its bits: verdicts of bench.compression on
a model that has learned."""

import pytest

from bench import compression
from bench.small import add_outliers
from tidemill.compress.decoder import Decoder
from tidemill.compress.quality import hidden_states
from tidemill.compress.source import Source

pytestmark = pytest.mark.slow

# it has a table for a matrix; rounding has a scale for each row, which here is 64 values
SKIPPED = {"GOBO 3 bits"}
FOR_OUTLIERS = {"SmoothQuant W8A8 per tensor", "fp8 per channel and token"}


def measured(folder, pairs, tmp_path):
    decoder = Decoder(Source.open(str(folder)))
    # which the model has learned
    calibration, held_out = compression.texts(decoder.source.path, 4096, 16384, length=128)
    truth = hidden_states(decoder, held_out)
    names = {name: None for pair in pairs for name in pair}
    found = {
        name: compression.measure(decoder, name, calibration, held_out, truth, tmp_path)
        for name in names
    }
    print("\n" + compression.table(found), *compression.verdicts(found), sep="\n")
    return found


def test_on_a_small_model(small_model, tmp_path):
    """By the distance to the original: at 8 bits, perplexities differ in the fourth digit."""
    pairs = [pair for pair in compression.EXPECTED if pair[0] not in SKIPPED | FOR_OUTLIERS]
    assert len(pairs) >= 8
    found = measured(small_model, pairs, tmp_path)
    for better, worse in pairs:
        assert found[better]["kl"] < found[worse]["kl"], (better, worse)


def test_on_a_small_model_with_outliers(small_model, tmp_path):
    """A few channels of large activations, as large models have them. SmoothQuant and LLM.int8()
    were made for these."""
    add_outliers(small_model, tmp_path / "outliers")
    pairs = [pair for pair in compression.EXPECTED if pair[0] not in SKIPPED]
    found = measured(tmp_path / "outliers", pairs, tmp_path)
    for better, worse in pairs:
        assert found[better]["ppl"] < found[worse]["ppl"], (better, worse)
        assert found[better]["kl"] < found[worse]["kl"], (better, worse)
    for name in ("SmoothQuant W8A8 per tensor", "LLM.int8()"):
        assert found[name]["kl"] < 0.1 * found["W8A8 per tensor"]["kl"]
