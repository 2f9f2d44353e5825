"""Tests do not fail by chance: what gives no seed has the same one everywhere."""

import subprocess
import sys

from tests.seeded import SEED
from tidemill.types.sampling import SamplingParams

SCRIPT = """
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit

print(*[Submit("x", [1], SamplingParams(seed=seed)).params.seed for seed in (None, 9)])
"""


def seeds_of_a_child() -> list[int]:
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    return [int(seed) for seed in done.stdout.split()]


def test_requests_without_a_seed_have_the_same_one_in_every_process():
    assert SamplingParams().seeded().seed == SEED
    assert seeds_of_a_child() == [SEED, 9]


def test_a_test_of_randomness_has_random_seeds_in_every_process(random_seeds):
    seeds = [SamplingParams().seeded().seed, SamplingParams().seeded().seed, seeds_of_a_child()[0]]
    assert len({*seeds, SEED}) == 4
