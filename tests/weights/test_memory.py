"""Loading streams: the peak stays near what remains."""

import json
import subprocess
import sys

SCRIPT = """
import json, resource, sys
from pathlib import Path
from tests.helpers import load_model

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

before = resident_bytes()
model = load_model(Path(sys.argv[1]))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"before": before, "after": resident_bytes(), "peak": peak, "weights": model.config.weight_bytes("float32")}))
"""


def test_peak_memory_while_loading_is_near_the_final_size(smollm2_path):
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(smollm2_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["after"] - seen["before"] < 1.35 * seen["weights"], seen
    assert seen["peak"] - seen["after"] < 0.35 * seen["weights"], seen
