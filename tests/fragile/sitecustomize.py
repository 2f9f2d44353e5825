"""First on PYTHONPATH (see tests/fragile/__init__.py), this makes an engine process that dies or
waits at certain prompts, and that sees as much memory as a test says. Everything else in it is the
real engine."""

import importlib
import os
import signal
import sys
import time
from pathlib import Path

# Python loads one module of this name: this one
importlib.import_module("tests.seeded.sitecustomize")

if "tidemill.engine" in sys.orig_argv:
    from dataclasses import replace

    from tests.fragile import DEADLY, GATED
    from tidemill.kernels import machine, native
    from tidemill.runner.cpu_runner import CpuRunner

    folder = Path(os.environ["FRAGILE_FOLDER"])
    gate_from: dict[int, int] = {}  # by row: the position
    real_launch, real_detect = CpuRunner.launch, machine.detect

    def launch(self, plan):
        for row in plan.new_rows:
            gate_from.pop(row.row, None)
            if row.token_ids[0] == DEADLY:
                time.sleep(0.05)  # the message before the step has left
                os.kill(os.getpid(), signal.SIGKILL)
            if row.token_ids[0] == GATED:
                gate_from[row.row] = 10 * row.token_ids[1]
        while any(item.start + item.count > gate_from.get(item.row, 10**9) for item in plan.items):
            if (folder / "gate").exists():
                break
            time.sleep(0.005)
        return real_launch(self, plan)

    def detect():
        found, told = real_detect(), folder / "available"
        return replace(found, available_bytes=int(told.read_text())) if told.exists() else found

    CpuRunner.launch, machine.detect = launch, detect
    if (folder / "no-kernels").exists():
        native.lib, native.why = None, "a test has taken them away"
