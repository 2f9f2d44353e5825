"""`tidemill plan`: the search equals simulating everything; estimates; what is printed; wrong
input."""

import json
import math
import random
import re
from dataclasses import replace

import msgspec
import pytest
from typer.testing import CliRunner

from tidemill.cli.main import app
from tidemill.cli.options import BY_NAME
from tidemill.config.options import EngineOptions
from tidemill.config.resolve import resolve
from tidemill.errors import ConfigError
from tidemill.machine import Machine
from tidemill.planning.cluster import DECODE, PREFILL, Cluster, Job
from tidemill.planning.commands import commands
from tidemill.planning.cost import Curve, FittedCost, StepShape
from tidemill.planning.costs import Costs
from tidemill.planning.hardware import HARDWARE, Seen, Shape, estimate, parse_devices
from tidemill.planning.load import Lengths, parse_lengths, poisson, read_trace
from tidemill.planning.plans import Case, Evaluator, Limits, Plan, Pool, Slo, parse_slo
from tidemill.planning.profile import FORMAT, EngineShape, FitErrors, ModelShape, Profile
from tidemill.planning.report import why
from tidemill.planning.search import Floors, search
from tidemill.planning.shapes import SHAPES
from tidemill.planning.space import Space
from tidemill.runner.rank import largest_part

H200 = HARDWARE["H200"]
LARGE = Machine(
    num_cores=8,
    memory_bytes=2**38,
    available_bytes=2**38,
    gpu="a large one",
    gpu_bytes=2**40,
    gpu_free_bytes=2**40,
    num_gpus=1,
)


def random_case(seed, models=("llama8b", "qwen14b", "llama70b"), num_models=1, num=16):
    rng = random.Random(seed)
    names = rng.sample(models, num_models)
    jobs = poisson(
        [(name, rng.choice([1, 4, 10, 30])) for name in names],
        num,
        Lengths(50, 5000),
        Lengths(1, 30),
        seed,
    )
    slo = Slo(
        rng.choice([0.1, 0.3, 1.0]), rng.choice([0.005, 0.01, 0.04]), rng.choice([0.5, 0.9, 1.0])
    )
    budget = rng.choice([math.inf, math.inf, 5.0])
    return Case(
        {name: SHAPES[name] for name in names},
        jobs,
        slo,
        H200,
        rng.randint(1, 4),
        budget,
        page_size=512,
    )


def random_space(seed):
    rng = random.Random(seed)
    policies = rng.sample(["continuous", "prefill-first", "splitfuse"], rng.randint(1, 2))
    return Space(
        policies, rng.sample([256, 2048, 8192], rng.randint(1, 2)), [64], unbuilt=rng.random() < 0.3
    )


def check_equals_brute_force(case, space):
    """That it attains, its winner, its runner-up; with no more simulations."""
    if not any(space.plans(case, num) for num in range(1, case.num_devices + 1)):
        with pytest.raises(ConfigError, match="does not fit"):
            search(case, space)
        return 0
    found = search(case, space)
    brute = search(case, space, "exhaustive")
    assert (found.winner, found.runner_up, found.attains) == (
        brute.winner,
        brute.runner_up,
        brute.attains,
    )
    assert {pool.num_devices > 0 for pool in found.winner.plan.pools} == {True}
    return 1


def test_the_search_equals_brute_force():
    assert (
        sum(
            check_equals_brute_force(random_case(seed, num=10), random_space(seed))
            for seed in range(4)
        )
        >= 2
    )


@pytest.mark.slow
def test_the_search_equals_brute_force_on_many_cases():
    assert (
        sum(
            check_equals_brute_force(random_case(seed), random_space(seed))
            for seed in range(100, 180)
        )
        > 60
    )


@pytest.mark.slow
def test_the_search_equals_brute_force_with_models_that_share_devices():
    small = Space(["continuous"], [2048], [64])
    for seed in range(12):
        check_equals_brute_force(random_case(seed, ("qwen06b", "llama8b", "qwen14b"), 2), small)


def test_no_plan_is_better_than_its_floor():
    for seed in range(4):
        case = random_case(seed, ("llama8b", "qwen14b"), num=8)
        plans = [plan for num in (1, 2) for plan in random_space(seed).plans(case, num)]
        floors, evaluator = Floors(case), Evaluator(case)
        assert all(floors.strain(plan) <= evaluator.evaluate(plan).strain for plan in plans[:4])


def test_limits_that_nothing_can_keep_name_the_nearest():
    case = Case(
        {"": SHAPES["llama8b"]},
        [Job(i, i / 4, 4000, 20) for i in range(12)],
        Slo(0.02, 0.001),
        H200,
        2,
    )
    found = search(case, Space(["continuous"], [2048], [64]))
    text = " ".join(why(case, found))
    assert not found.attains
    assert found.winner.plan.name == "1 × TP2"
    assert "Not attainable with 2 x H200. Nearest is 1 × TP2: 0.0% of the requests" in text
    assert "times the limit" in text


def test_a_budget_leaves_out_what_costs_more():
    jobs = [Job(i, i / 40, 2000, 50) for i in range(20)]
    space = Space(["continuous"], [2048], [64])
    dear = search(Case({"": SHAPES["llama8b"]}, jobs, Slo(0.05, 0.01), H200, 2), space)
    cheap = search(
        Case({"": SHAPES["llama8b"]}, jobs, Slo(0.05, 0.01), H200, 2, dear.winner.gpu_hours / 2),
        space,
    )
    assert not cheap.attains
    assert cheap.winner.strain > 1


@pytest.mark.slow
def test_more_load_needs_more_devices_also_beyond_what_is_searched_one_by_one():
    space = Space(["continuous"], [2048], [256], disaggregated=False)
    nums = []
    for rate in (20.0, 80.0):
        jobs = poisson([("", rate)], 60, Lengths(1000, 3000), Lengths(5, 20))
        found = search(
            Case({"": SHAPES["llama8b"]}, jobs, Slo(0.4, 0.03), H200, 9, page_size=512), space
        )
        assert found.attains
        assert not found.is_exact
        nums.append(found.winner.plan.num_devices)
    assert nums[0] < nums[1]


@pytest.mark.slow
def test_models_are_placed_on_many_devices_one_after_the_other():
    models = {name: SHAPES[name] for name in ("qwen06b", "llama8b")}
    jobs = poisson([("qwen06b", 10.0), ("llama8b", 10.0)], 30, Lengths(500, 1500), Lengths(5, 20))
    found = search(Case(models, jobs, Slo(0.5, 0.05), H200, 5), Space(["continuous"], [2048], [64]))
    assert found.attains
    assert {name for pool in found.winner.plan.pools for name in pool.models} == set(models)


def test_estimates_are_near_what_was_measured_on_an_h200():
    cost = estimate(SHAPES["llama8b"], H200, Shape())
    assert cost.seconds(1, 1, 256, 0) == pytest.approx(4.29e-3, rel=0.1)
    # decode_b256: 512 steps in 6.3 s
    assert cost.seconds(256, 256, 256 * 400, 0) == pytest.approx(12.3e-3, rel=0.2)
    # prefill_4k
    assert 4 * cost.seconds(2048, 1, 0, 2048 * 2048) / 8192 == pytest.approx(
        6.36 / 262_144, rel=0.2
    )
    twice = estimate(SHAPES["llama8b"], H200, Shape(2))
    assert 0.5 < twice.seconds(1, 1, 256, 0) / cost.seconds(1, 1, 256, 0) < 0.75


def test_what_layers_with_windows_read_is_an_average_over_the_load():
    lengths = [(300, 40), (2500, 900), (5, 1)]
    contexts = [
        context for prompt, output in lengths for context in range(prompt + 1, prompt + output + 1)
    ]
    for window in (1, 512, 10_000):
        assert Seen(lengths).by_outputs(window) == sum(min(one, window) for one in contexts) / sum(
            contexts
        )
        assert (
            Seen(lengths).at_once(window)
            == sum(min(prompt, window) for prompt, _ in lengths) / 2805
        )
    assert Seen(lengths).by_prompts(0) == Seen().by_prompts(7) == 1
    long, whole = (
        estimate(SHAPES["gemma27b"], H200, Shape(), Seen(seen)) for seen in ([(20_000, 100)], [])
    )
    assert long.kv_token_s / whole.kv_token_s == pytest.approx(
        (10 + 52 * 1024 / 20_050) / 62, rel=1e-3
    )
    assert estimate(SHAPES["qwen80b"], H200, Shape()).state_s == pytest.approx(
        2 * 79e6 / 4e12, rel=0.1
    )


@pytest.mark.parametrize(
    ("name", "shape", "num"),
    [("gemma27b", Shape(), 21), ("qwen80b", Shape(2), 72), ("llama8b", Shape(), 41)],
)
def test_the_kv_cache_of_a_plan_has_the_engines_groups(name, shape, num):
    case = Case({name: SHAPES[name]}, [Job(0, 0.0, 20_000, 100, model=name)], Slo(1, 1), H200, 2)
    options = EngineOptions(device="cuda", max_context=case.longest[name], kv_memory_bytes=10**11)
    real = resolve(options, SHAPES[name], LARGE)
    (spec,) = case.specs(Plan((Pool(1, shape, models=(name,)),)))
    assert spec.config.groups == real.layout.groups
    # requests at once
    assert spec.config.num_pages // real.layout.num_pages_for(20_100, 2048) == num


# A hybrid of which one device holds several requests.
HYBRID = replace(SHAPES["qwen80b"], layers=SHAPES["qwen80b"].layers[:16], experts=(None,) * 16)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("qwen80b", 4), ("qwen80b", 8), ("gemma27b", 4), ("gemma27b", 8), ("hybrid", 2)],
)
def test_ranks_have_the_engines_pages(name, tensor):
    """A rank's state is a part of it, and its keys and values at least one head."""
    model = HYBRID if name == "hybrid" else SHAPES[name]
    case = Case({"": model}, [Job(0, 0.0, 20_000, 100)], Slo(1, 1), H200, tensor)
    options = EngineOptions(
        device="cuda", max_context=case.longest[""], kv_memory_bytes=10**11, tensor_parallel=tensor
    )
    real = resolve(options, largest_part(options, model), replace(LARGE, num_gpus=tensor))
    layout, page_bytes = case.cache("", Shape(tensor))
    assert (layout.groups, page_bytes) == (real.layout.groups, real.kv_bytes // real.num_pages)


def test_stages_have_whole_pages_where_groups_lie_within_one():
    case = Case({"": SHAPES["gemma27b"]}, [Job(0, 0.0, 2000, 100)], Slo(1, 1), HARDWARE["CPU"], 16)
    (whole, whole_bytes), (staged, staged_bytes) = (
        case.cache("", shape) for shape in (Shape(), Shape(1, 16))
    )
    assert staged.groups == whole.groups
    # of 16 stages, a page of one group has half of its layers in one
    assert staged_bytes > whole_bytes // 8
    dense = Case({"": SHAPES["llama8b"]}, [Job(0, 0.0, 2000, 100)], Slo(1, 1), HARDWARE["CPU"], 16)
    # the largest of 16 stages has three layers
    assert dense.cache("", Shape(1, 16))[1] == 3 * dense.cache("", Shape())[1] // 32


@pytest.mark.parametrize("shape", [Shape(32), Shape(3), Shape(1, 64)])
def test_what_cannot_be_cut_so_is_no_plan(shape):
    case = Case({"": HYBRID}, [Job(0, 0.0, 2000, 100)], Slo(1, 1), H200, 64)
    assert case.cache("", shape) is None
    assert not case.fits(Pool(1, shape))


def test_long_prompts_hold_windows_of_a_step_not_of_the_prompt():
    case = Case(
        {"": SHAPES["gemma27b"]}, [Job(0, 0.0, 60_000, 100)], Slo(60, 0.5), HARDWARE["A100"], 1
    )
    assert case.fits(Pool(1, limits=Limits(token_budget=2048)))


def test_the_search_equals_brute_force_with_windows_and_states():
    space = Space(["continuous"], [2048], [64])
    jobs = poisson([("", 4.0)], 6, Lengths(1000, 3000), Lengths(5, 20))
    for model in (SHAPES["gemma27b"], HYBRID):
        case = Case({"": model}, jobs, Slo(0.3, 0.03), H200, 2)
        assert any(plan.is_disaggregated for plan in space.plans(case, 2))
        assert check_equals_brute_force(case, space)


@pytest.mark.parametrize("name", ["llama8b", "gemma27b", "hybrid"])
def test_what_was_sent_is_found(name):
    """Windows and states, too: a decode engine computes the last page of a prompt at most."""
    jobs = poisson([("", 1.0)], 4, Lengths(4000, 4000), Lengths(20, 20))
    case = Case({"": HYBRID if name == "hybrid" else SHAPES[name]}, jobs, Slo(1, 1), H200, 2)
    cluster = Cluster(case.specs(Plan((Pool(1, role=PREFILL), Pool(1, role=DECODE)))))
    assert cluster.run(jobs) is not None
    tally = cluster._nodes[1].engine.tally
    assert tally.num_cached == 4 * (4000 // 64) * 64
    assert case.specs(Plan((Pool(1),)))[0].state_bytes == (
        case.models[""].state_bytes if name == "hybrid" else 0
    )


def test_pages_fit_between_states():
    case = Case({"": HYBRID}, [Job(0, 0.0, 2000, 100)], Slo(1, 1), H200, 1, page_size=512)
    assert Evaluator(case).evaluate(Plan((Pool(1),))) is not None


def test_many_hosts_of_one_device():
    result = CliRunner().invoke(app, [
        "plan", "--model", "smollm2", "--rate", "1", "--devices", "16xCPU", "--requests", "10", "--slo", "ttft=100,tpot=10",
    ])  # fmt: skip
    assert result.exit_code == 0, result.output


def test_pipelines_help_prompts_and_not_single_tokens():
    one, two = (estimate(SHAPES["llama8b"], H200, shape) for shape in (Shape(), Shape(1, 2)))
    assert two.seconds(1, 1, 100, 0) >= one.seconds(1, 1, 100, 0)
    assert two.seconds(2048, 1, 0, 2**21) < 0.8 * one.seconds(2048, 1, 0, 2**21)
    fixed_s, context_s, _ = two.decode_line(100)
    assert fixed_s + 5000 * context_s == pytest.approx(two.seconds(100, 100, 5000, 0))


PLANS = [
    Plan((Pool(4),)),
    Plan((Pool(1, Shape(2)),)),
    Plan((Pool(2, Shape(4), limits=Limits("prefill-first", 512, 64)),)),
    Plan((Pool(1, role=PREFILL), Pool(3, role=DECODE))),
    Plan((Pool(24),)),
    Plan((Pool(6, role=PREFILL, cells=2), Pool(10, role=DECODE, cells=2))),
    Plan((Pool(1, models=("a", "b")), Pool(2, models=("b",)))),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_commands_have_options_that_exist_and_all_devices(plan):
    names = {"": "org/model", "a": "org/a", "b": "org/b"}
    lines = commands(plan, names, H200, 5000)
    flags = {flag for line in lines for flag in re.findall(r"--([a-z-]+)", line)}
    assert flags - BY_NAME.keys() <= {"prefill", "decode"}
    num = 0
    for line in lines:
        if " serve " in line:
            given = {name: int(value) for name, value in re.findall(r"--([a-z-]+) (\d+)", line)}
            engines = given.get("prefill", 0) + given.get("decode", 0) or given.get(
                "data-parallel", 1
            )
            num += engines * given.get("tensor-parallel", 1)
    assert num == plan.num_devices
    assert (len(lines) > 1) == any(" route " in line for line in lines)


def run_plan(*args):
    return CliRunner().invoke(app, ["plan", *args])


LOAD = ("--input-tokens", "500-1000", "--output-tokens", "5-10", "--requests", "20")


def test_the_command_prints_json_and_draws(tmp_path):
    picture = tmp_path / "plan.svg"
    done = run_plan(
        "--model",
        "llama8b:8",
        "--devices",
        "2xH200",
        "--json",
        "--plot",
        str(picture),
        *LOAD,
        "--token-budgets",
        "2048",
    )
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["attains"]
    assert result["winner"]["devices"] == 1
    assert "tidemill serve" in result["commands"][0]
    assert picture.read_text().lstrip().startswith("<?xml")


def test_the_command_explains_itself():
    done = run_plan(
        "--model",
        "llama8b",
        "--rate",
        "8",
        "--devices",
        "1xH200",
        *LOAD,
        "--slo",
        "ttft=0.001,tpot=0.05",
    )
    assert done.exit_code == 0
    assert "simulated" in done.stdout
    assert "Not attainable with 1 x H200" in done.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--devices", "8xTPU", "--rate", "1"), "is not a number and a device"),
        (("--devices", "0xH200", "--rate", "1"), "is not a number and a device"),
        (("--devices", "1xH200"), "Say once how many requests come"),
        (("--devices", "1xH200", "--rate", "-1"), "is no rate"),
        (("--devices", "1xH200", "--rate", "1", "--slo", "ttft=1"), "needs ttft and tpot"),
        (("--devices", "1xH200", "--rate", "1", "--slo", "ttft=1,tpot=nan"), "out of range"),
        (
            ("--devices", "1xH200", "--rate", "1", "--policies", "fastest"),
            "There is no scheduling policy",
        ),
        (("--devices", "1xH200", "--rate", "1", "--input-tokens", "9-3"), "ends before it begins"),
        (("--devices", "1xH200", "--rate", "1", "--search", "lucky"), "is not known"),
        (("--devices", "1xH200", "--rate", "1", "--plot", "plan.pdf"), "must end in .svg or .png"),
        (("--devices", "1xH200", "--rate", "1", "--link", "0"), "--link must be above 0"),
        (("--devices", "1xH200", "--trace", "/nowhere.jsonl"), "cannot be read: No such file"),
        (("--devices", "1xH200", "--rate", "1", "--model", "llama70b"), "does not fit"),
    ],
)
def test_wrong_input_is_a_typed_error(args, message):
    given = args if "--model" in args else ("--model", "llama8b", *args)
    done = run_plan(*given, "--requests", "10")
    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)


def test_traces_are_read_and_hostile_ones_refused(tmp_path):
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 2000, "input_length": 700, "output_length": 0, "hash_ids": [5, 6]},
        {"timestamp": 500, "input_length": 3, "output_length": 2, "hash_ids": []},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = read_trace(path, speed=3.0)
    assert (first.at_s, first.num_prompt, second.at_s, second.num_output, second.blocks) == (
        0.0,
        3,
        0.5,
        1,
        (5, 6),
    )
    assert len(second.prompt_ids()) == 700
    csv = tmp_path / "trace.csv"
    csv.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n")
    assert [(job.num_prompt, job.num_output) for job in read_trace(csv)] == [(374, 44)]
    for bad in (
        '{"timestamp": 0, "input_length": 1e12, "output_length": 1, "hash_ids": []}',
        "[1]",
        '{"timestamp": 0}',
        "x" * 100,
    ):
        path.write_text(bad)
        with pytest.raises(ConfigError, match="cannot be read as a trace"):
            read_trace(path)


def test_what_is_written_is_read():
    assert parse_devices("8xh200") == (8, H200)
    assert parse_slo("ttft=0.5, tpot=0.05") == Slo(0.5, 0.05, 0.9)
    assert parse_lengths("20", "--input-tokens") == Lengths(20, 20)


def profile_of(tmp_path, **more):
    """As `tidemill calibrate` would have made it of a machine that is as fast as the estimate."""
    one = estimate(SHAPES["llama8b"], H200, Shape())
    decode = Curve([1, 64, 256], [one.seconds(num, num, 0, 0) for num in (1, 64, 256)])
    mixed = Curve([2, 2048], [one.seconds(num, 1, 0, 0) for num in (2, 2048)])
    cost = FittedCost(decode, mixed, one.kv_token_s, 0.0, one.kv_token_s, one.pair_s, 0.0, 0.0)
    shape = ModelShape.of("llama8b", SHAPES["llama8b"], 16_000_000_000, "bfloat16")
    engine = EngineShape("cuda", "bfloat16", "dense", "bfloat16", 64, 1000, 8192, 256, 2048, 1)
    made = Profile(
        FORMAT, "0", "2026-11-17", "a machine", shape, engine, cost, FitErrors(0, 0, 0, 0)
    )
    path = tmp_path / "profile.json"
    msgspec.structs.replace(made, **more).save(path)
    return str(path)


def test_measured_costs_are_taken_and_those_of_several_devices_derived(tmp_path):
    costs = Costs({"llama8b": SHAPES["llama8b"]}, H200, [profile_of(tmp_path)])
    case = Case(
        costs.models, [Job(0, 0.0, 100, 10, model="llama8b")], Slo(1, 1), H200, 4, costs=costs
    )
    assert "measured for llama8b on a machine (2026-11-17)" in costs.source
    for shape in (Shape(), Shape(4)):
        made, own = case.cost("llama8b", shape), estimate(SHAPES["llama8b"], H200, shape)
        fixed_s, context_s, _ = made.decode_line(64)
        assert fixed_s + 64_000 * context_s == pytest.approx(
            own.seconds(64, 64, 64_000, 0), rel=1e-6
        )
        prompt = StepShape(0, 0, 0, 2048, 2**21, 1, 0)
        assert made.shape_s(prompt) == pytest.approx(own.shape_s(prompt), rel=1e-3)


def test_a_profile_of_another_model_is_refused(tmp_path):
    path = profile_of(tmp_path)
    with pytest.raises(ConfigError, match="another shape"):
        Costs({"qwen14b": SHAPES["qwen14b"]}, H200, [path])
    with pytest.raises(ConfigError, match="for no model"):
        Costs({"llama8b": SHAPES["llama8b"]}, H200, [f"gpt={path}"])
