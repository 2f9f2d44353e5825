"""Loading streams: the peak stays near what remains."""

import json
import subprocess
import sys

import pytest

from tests.helpers import make_llama
from tidemill.kernels import native

SCRIPT = """
import json, re, sys
from pathlib import Path
from tests.helpers import load_model

def memory_bytes(name):  # getrusage would count the process this one was forked from
    return int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

before = memory_bytes("VmRSS")
model = load_model(Path(sys.argv[1]), sys.argv[2])
after, peak = memory_bytes("VmRSS"), memory_bytes("VmHWM")
weights = model.config.weight_bytes(sys.argv[2], True)
print(json.dumps({"before": before, "after": after, "peak": peak, "file": memory_bytes("RssFile"), "weights": weights}))
"""


def measure(path, dtype):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path), dtype], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("dtype", "spare"),
    [
        ("float32", 0.35),
        pytest.param(
            "quantized", 1.1, marks=pytest.mark.skipif(native.lib is None, reason=native.why)
        ),
    ],
)
def test_peak_memory_while_loading_is_near_the_final_size(smollm2_path, dtype, spare):
    """Quantized loading also holds the codes of the largest tensor, which is a large part of a
    small model."""
    seen = measure(smollm2_path, dtype)
    assert seen["after"] - seen["before"] < (1 + spare) * seen["weights"], seen
    assert seen["peak"] - seen["after"] < spare * seen["weights"], seen


@pytest.mark.skipif(native.lib is None, reason=native.why)
def test_of_safetensors_in_16_bits_nothing_is_in_memory_twice(tmp_path):
    """Neither are pages of the file, nor a second copy of its largest tensor, which is half of this
    model."""
    make_llama(
        hidden_size=512, intermediate_size=2048, vocab_size=60_000
    ).bfloat16().save_pretrained(tmp_path)
    seen = measure(tmp_path, "float32")
    assert seen["weights"] > 80 * 2**20
    assert seen["peak"] - seen["before"] < 1.3 * seen["weights"], seen
    assert seen["after"] - seen["before"] > 0.9 * seen["weights"], seen
