"""The release gate: computes a shipped recording again, and fails on one token that differs.

    make replay                                      all of it, like then and alone
    python -m bench.replay_gate --every 3 --mode like-then

Bits differ between kinds of CPU kernels, so there is a recording of each kind that releases were
made on (tests/replay/recordings). On a machine of another kind a load is recorded first, and then
computed again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.mixed_load import ADAPTERS
from bench.tiny_models import KINDS, make_all
from tidemill.kernels import machine
from tidemill.record.build import about_machine
from tidemill.record.reader import Recording
from tidemill.replay.outcome import Certificate
from tidemill.replay.replay import ReplayOptions, replay

ROOT = Path(__file__).parents[1]
RECORDINGS = ROOT / "tests" / "replay" / "recordings"
MODES = ("like then", "alone")
_NUM_OWN = 300  # requests that are recorded where no recording is shipped


def shipped() -> Path | None:
    """The recording of this machine's kind of kernels."""
    folder = RECORDINGS / machine.detect().kernels
    return folder if folder.is_dir() else None


def certify(recording: Path, models: Path, mode: str, every: int) -> Certificate:
    """`every`: only each so-many-th request is compared."""
    make_all(models)
    paths = {name: str(models / name) for name in (*KINDS, *ADAPTERS)} | {"smollm2": "smollm2"}
    read = Recording(recording)
    (server,) = read.servers
    chosen = frozenset(str(request.number) for request in server.requests[::every])
    # Where torch has other instructions, log-probabilities differ in their last bits.
    tokens_only = server.start.machine.get("cpu") != about_machine()["cpu"]
    options = ReplayOptions(mode=mode, requests=chosen, paths=paths, tokens_only=tokens_only)
    (certificate,) = replay(read, read.servers, options)
    return certificate


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mode", choices=[mode.replace(" ", "-") for mode in MODES], help="one of both"
    )
    parser.add_argument("--every", type=int, default=1, help="compare each so-many-th request")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, recording = Path(name), shipped()
        if recording is None:
            print(
                f"no recording is shipped for {machine.detect().kernels or 'torch'}: {_NUM_OWN} requests are recorded here"
            )
            command = [
                sys.executable,
                "-m",
                "bench.mixed_load",
                name,
                "--requests",
                str(_NUM_OWN),
                "--smollm2",
                "10",
            ]
            subprocess.run(command, check=True)
            recording = folder / "day"
        modes = [mode for mode in MODES if given.mode in (None, mode.replace(" ", "-"))]
        certificates = [certify(recording, folder / "models", mode, given.every) for mode in modes]
    for certificate in certificates:
        for line in certificate.lines():
            print(line)
        print(f"{certificate.took_s:.0f} s")
    if not all(certificate.is_equal for certificate in certificates):
        sys.exit(1)


if __name__ == "__main__":
    main()
