"""Measured steps become a profile, and a profile becomes times."""

import itertools
import random
from dataclasses import replace

import msgspec
import pytest

from tests.helpers import load_model, make_core, make_llama, model_with_cache
from tests.models.test_state_models import make_reference
from tidemill.cli.options import BY_NAME
from tidemill.cli.simulate import _OPTIONS
from tidemill.cli.simulate_case import engine_of
from tidemill.errors import ConfigError
from tidemill.planning.calibration import Calibration, drive, profile_of, shared_unit, timed
from tidemill.planning.cost import Curve, FittedCost, Heat, StepShape
from tidemill.planning.fit import Sample, fit
from tidemill.planning.profile import Profile, check_target, shipped_profiles
from tidemill.planning.simulator import Arrival, SimConfig, simulate

DECODE, MIXED = Curve([1, 64], [0.004, 0.006]), Curve([16, 512], [0.005, 0.020])
HOST = {"host_s": 7e-4, "host_new_s": 5e-4, "host_token_s": 4e-6}
PARTS = {"shared_s": 4e-9, "longest_prompt_s": 4e-7, "sharing_s": 5e-4, **HOST}
TRUE = FittedCost(DECODE, MIXED, 3e-8, 1e-8, 4e-8, 1e-9, 2e-6, 1e-8, **PARTS)


def measured(num=1500, noise=0.01, seed=0):
    """Steps as a machine with these costs would make them; one in a hundred was interrupted."""
    draw, samples = random.Random(seed), []
    for _ in range(num):
        num_decoding, context = draw.randint(0, 64), draw.randint(16, 4000)
        num_prompt = draw.randint(16, 448) if draw.random() < 0.5 or not num_decoding else 0
        seen = draw.randint(100, 4000) if num_prompt else 0
        pairs, new = num_prompt * draw.randint(100, 4000), num_prompt if draw.random() < 0.5 else 0
        shared = num_decoding * 512 if num_decoding > 1 and draw.random() < 0.3 else 0
        shape = StepShape(
            num_decoding,
            num_decoding * context,
            context,
            num_prompt,
            pairs,
            num_decoding + 1,
            new,
            shared,
            seen,
        )
        seconds, follows = TRUE.shape_s(shape) * draw.gauss(1, noise), draw.random() < 0.95
        seconds *= 5 if draw.random() < 0.01 else 1
        host_s = (TRUE.host_s + TRUE.starting_s(new)) * draw.gauss(1, 0.1)
        samples.append(Sample(shape, seconds + (0 if follows else host_s), follows, host_s))
    return samples


def test_a_fit_finds_what_steps_cost_in_spite_of_noise_and_outliers():
    cost, errors = fit(measured(), steps_ahead=1)
    assert errors.median < 0.02
    fresh = [sample.shape for sample in measured(200, seed=1)]
    off = [abs(cost.shape_s(shape) / TRUE.shape_s(shape) - 1) for shape in fresh]
    assert max(off) < 0.05
    for name in PARTS:
        assert getattr(cost, name) == pytest.approx(getattr(TRUE, name), rel=0.25), name
    idle = [replace(one, submit_s=3e-4) for one in measured(200)]
    assert fit(idle)[0].submit_s == 3e-4
    assert fit(measured())[0].host_s == 0  # nothing is hidden where the host waits for every step


def test_beyond_the_last_point_a_curve_rises_as_over_its_last_half():
    # of the last two, the larger one takes less
    curve = Curve([1, 128, 240, 256], [0.004, 0.005, 0.0084, 0.008])
    assert curve.value(512) == pytest.approx(0.008 + 256 * 0.003 / 128)
    assert [curve.value(num) for num in (1, 256)] == [0.004, 0.008]
    assert curve.value(184) == pytest.approx(0.0067)
    assert Curve([4, 6], [0.02, 0.01]).value(60) == 0.01  # never less than nothing more
    cost = Profile.load("h200-llama8b").cost
    assert cost.decode.value(1024) > cost.decode.value(512) > cost.decode.value(256)


def test_a_fit_of_noisy_steps_is_as_long_as_they_are_in_sum():
    """Steps that took long count as much as those that took as much less."""
    samples = [
        Sample(one.shape, TRUE.shape_s(one.shape) * (1.0, 1.0, 1.4)[i % 3])
        for i, one in enumerate(measured(1500))
    ]
    _, errors = fit(samples)
    assert abs(errors.total) < 0.01


def test_sizes_that_steps_are_padded_to_have_levels_of_their_own():
    sizes, draw = [64, 128, 192, 256], random.Random(0)
    level = dict(zip(sizes, [0.01, 0.02, 0.015, 0.03], strict=True))  # a larger one may be faster
    samples = []
    for _ in range(400):
        num = draw.randint(10, 256)
        size = next(size for size in sizes if size >= num)
        samples.append(
            Sample(StepShape(0, 0, 0, num, num * 50, 1, 0), level[size] * draw.gauss(1, 0.003))
        )
        samples.append(Sample(StepShape(4, 400, 100, 0, 0, 4, 0), 0.005))
    cost, _ = fit(samples, mixed_sizes=sizes)
    assert cost.shape_s(StepShape(0, 0, 0, 150, 150 * 50, 1, 0)) == pytest.approx(0.015, rel=0.05)
    assert cost.shape_s(StepShape(0, 0, 0, 100, 100 * 50, 1, 0)) == pytest.approx(0.02, rel=0.05)


def test_every_small_size_has_a_point_of_its_own():
    """A CPU computes rows in tiles, so three sequences may take as long as two, and a prompt of
    five tokens as one of eight."""
    took = {1: 0.026, 2: 0.044, 3: 0.044, 4: 0.053, 5: 0.060, 6: 0.060, 7: 0.060, 8: 0.060}
    samples = [
        Sample(StepShape(num, num * 100, 100, 0, 0, num, 0), took[num])
        for num in took
        for _ in range(4)
    ]
    samples += [
        Sample(StepShape(0, 0, 0, num, num * num // 2, 1, num), took[num])
        for num in took
        for _ in range(4)
    ]
    cost, _ = fit(samples)
    for num, seconds in took.items():
        assert cost.shape_s(StepShape(num, num * 100, 100, 0, 0, num, 0)) == pytest.approx(
            seconds, rel=0.02
        )
        assert cost.shape_s(StepShape(0, 0, 0, num, num * num // 2, 1, num)) == pytest.approx(
            seconds, rel=0.02
        )


def test_steps_with_prompts_leave_heat_that_a_fit_finds():
    """As a machine at the limit of its power: the same step takes longer after others with prompts."""
    sizes, draw, heat, now, samples = [256, 1024], random.Random(0), Heat(0.05), 0.0, []
    for i in range(1200):
        has_prompt = (i // 20) % 2 == 1  # in rows of 20
        size = draw.choice(sizes)
        shape = StepShape(4, 400, 100, size - 4 if has_prompt else 0, 0, 4, 0)
        rise = 0.12 if has_prompt else 0.04
        seconds = (
            (0.004 + 2e-5 * size * has_prompt) * (1 + rise * heat.level(now)) * draw.gauss(1, 0.003)
        )
        samples.append(Sample(shape, seconds))
        if has_prompt:
            heat.add(now, now + seconds, size)
        now += seconds
    cost, errors = fit(samples, [4], sizes, steps_ahead=1)
    assert errors.p90 < 0.01
    assert cost.heat == (0.05, pytest.approx(0.04, abs=0.01), pytest.approx(0.12, abs=0.02))


def test_too_few_steps_are_refused():
    with pytest.raises(ConfigError, match="too few"):
        fit(measured(5))


def test_a_model_of_states_alone_is_refused_before_it_is_measured(tmp_path):
    """Its profile could not be read: it has no heads, and tokens take no bytes."""
    with pytest.raises(ConfigError, match="states of constant size"):
        Calibration(make_core(model_with_cache("states", tmp_path)))


def test_an_engine_is_measured_and_its_profile_is_read_back(tmp_path):
    make_llama(tmp_path)
    core = make_core(
        load_model(tmp_path), max_context=128, token_budget=32, max_requests=4, speculate="off"
    )
    ticks = itertools.count()  # a clock that no other work on the machine can disturb
    samples = Calibration(core, seconds=0.3, now=lambda: 1e-4 * next(ticks)).run()
    assert not core.has_work
    assert {one.shape.num_decoding for one in samples} >= {1, 2}
    assert any(one.shape.num_prompt and one.shape.num_decoding for one in samples)
    made = profile_of(core, samples, "tiny", "here")
    made.save(tmp_path / "made.json")
    read = Profile.load(tmp_path / "made.json")
    assert read == made
    assert read.engine.token_budget == 32
    assert read.shape_s(StepShape(4, 200, 50, 0, 0, 4, 0)) > 0


def test_a_calibration_in_parts_measures_what_a_whole_one_does(tmp_path):
    make_llama(tmp_path, max_position_embeddings=512)
    core = make_core(
        load_model(tmp_path), max_context=512, token_budget=32, max_requests=4, speculate="off"
    )

    def kinds(num_parts):
        ticks = itertools.count()
        calibration = Calibration(core, seconds=10.0, now=lambda: 1e-4 * next(ticks))
        for part in range(num_parts):
            calibration.run(part, num_parts)
        assert any(one.shape.num_shared for one in calibration.samples)
        return {(one.shape.num_decoding, one.shape.num_prompt > 0) for one in calibration.samples}

    assert kinds(3) == kinds(1)


def test_a_cpu_engine_tells_a_common_prefix_from_others(tmp_path):
    make_llama(tmp_path, max_position_embeddings=512)
    core = make_core(
        load_model(tmp_path), max_context=512, token_budget=32, max_requests=4, speculate="off"
    )
    assert shared_unit(core) == core.config.page_size
    prompt, ticks = list(range(10, 10 + 4 * core.config.page_size)), itertools.count()
    with timed(core) as timer:
        drive(core, timer, [(0, [*prompt, 5], 20), (8, [*prompt, 6], 4)])
    shared = [one.shape for one in timer.samples if one.shape.num_decoding == 2]
    # of two, the first pays for its own
    assert {shape.num_shared for shape in shared} == {len(prompt)}
    samples = Calibration(core, seconds=1.0, now=lambda: 1e-4 * next(ticks)).run()
    assert profile_of(core, samples, "tiny", "here").first_pays
    assert all(shape.decode_context < 2 * shape.longest for shape in shared)


@pytest.mark.parametrize("kind", ["llama", "windows", "Qwen3Next"])
def test_an_engine_simulated_from_a_profile_has_the_groups_and_decisions_of_the_one_that_was_measured(
    kind, tmp_path
):
    """Above all, on a GPU it fills no steps with parts of prompts if there are states."""
    if kind == "Qwen3Next":
        make_reference(kind, tmp_path)
    model = load_model(tmp_path) if kind == "Qwen3Next" else model_with_cache(kind, tmp_path)
    core = make_core(
        model, max_context=128, token_budget=32, max_requests=4, page_size=32, speculate="off"
    )
    made = profile_of(core, measured(), "tiny", "here")
    made.save(tmp_path / "made.json")
    settings = {name: BY_NAME[name].default for name in _OPTIONS}
    simulated = engine_of(settings, Profile.load(tmp_path / "made.json"))
    real = SimConfig.of(core.config, core.runner.steps_ahead)
    assert simulated.engine().layout.groups == real.groups
    assert simulated.engine().step_cost == core.config.step_cost == 0
    assert replace(simulated, device="cuda").engine().step_cost == (
        0 if kind == "Qwen3Next" else 256
    )
    assert replace(simulated, groups=()) == replace(
        real, groups=(), background_tokens=1.0, background_budget=None
    )
    result = simulate(
        [Arrival(f"r{i}", 0.01 * i, num_prompt=50, num_output=20) for i in range(8)],
        simulated,
        made,
    )
    assert all(len(times) == 20 for times in result.token_times_s.values())
    if made.engine.groups:
        with pytest.raises(ConfigError, match="page_size"):
            engine_of(settings | {"page-size": 16}, made)


def test_shipped_profiles_are_right():
    assert "h200-llama8b" in shipped_profiles()
    for name in shipped_profiles():
        profile = Profile.load(name)
        assert profile.errors.median < 0.05
        assert 0.003 < profile.decode_line(1)[0] < profile.decode_line(256)[0] < 0.05


def test_wrong_profiles_are_refused(tmp_path):
    good = msgspec.json.encode(Profile.load("h200-llama8b"))
    cases = {
        "old": good.replace(b'"format":1', b'"format":0'),
        "half": good[:500],
        "other": b'{"tokens": 3}',
        "curve": good.replace(b'"decode":{"at":[1,', b'"decode":{"at":[5,'),
        "large": b" " * (1 << 20) + good,
        "group": good.replace(b'"groups":[]', b'"groups":[{"page_size":48}]'),
        "bytes": good.replace(b'"groups":[]', b'"groups":[{"page_size":64}]'),
    }
    for name, data in cases.items():
        (tmp_path / f"{name}.json").write_bytes(data)
        with pytest.raises(ConfigError) as caught:
            Profile.load(tmp_path / f"{name}.json")
        assert "tidemill calibrate" in caught.value.fix, name
    with pytest.raises(ConfigError, match="format 0"):
        Profile.load(tmp_path / "old.json")
    with pytest.raises(ConfigError) as caught:
        Profile.load("h200-lama8b")
    assert "h200-llama8b" in caught.value.fix
    with pytest.raises(ConfigError, match="cannot be read"):
        Profile.load(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("engine", "page_size", 0),
        ("engine", "num_pages", 1),
        ("engine", "num_pages", 2**31 + 1),
        ("engine", "max_requests", 0),
        ("engine", "max_requests", 2**20 + 1),
        ("engine", "token_budget", 0),
        ("model", "kv_bytes_per_token", 0),
        ("cost", "pair_s", -1e-9),
        ("cost", "host_s", 1e6),
        ("cost", "decode_sizes", [-1]),
        ("errors", "median", 1e300),
    ],
)
def test_a_profile_with_a_number_out_of_range_names_the_field(part, field, value, tmp_path):
    data = msgspec.to_builtins(Profile.load("h200-llama8b"))
    data[part][field] = value
    (tmp_path / "p.json").write_bytes(msgspec.json.encode(data))
    with pytest.raises(ConfigError, match=rf"{part}\.{field}"):
        Profile.load(tmp_path / "p.json")


def test_a_place_where_no_profile_can_be_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "x.json", tmp_path):
        with pytest.raises(ConfigError, match="cannot be written"):
            check_target(path)
        with pytest.raises(ConfigError, match="cannot be written"):
            Profile.load("h200-llama8b").save(path)
