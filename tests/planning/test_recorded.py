"""A recording in a simulation: with its own engine and profile, its prefixes, and what would have
kept its SLO."""

import json
import random
from dataclasses import asdict, replace

import msgspec
import pytest
from typer.testing import CliRunner

from tests.helpers import greedy, make_core
from tidemill.cli.main import app
from tidemill.errors import ConfigError
from tidemill.planning.cost import Curve, FittedCost
from tidemill.planning.fleet import run_rows
from tidemill.planning.recorded_engine import _speculation, extended, recorded_engine
from tidemill.planning.recorded_steps import DraftCounts, steps_of
from tidemill.planning.simulator import Arrival, SimConfig, SimEngine
from tidemill.planning.what_if import Slo, busiest, likely
from tidemill.record.format import Begun, Ended, Events, ModelStart, Output, bytes_of, encode
from tidemill.record.reader import Recording
from tidemill.record.writer import RecordingWriter, read_key
from tidemill.types import events
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit

LADDER = [1, 8, 64, 512]
COST = FittedCost(
    Curve(LADDER, [0.01, 0.011, 0.02, 0.09]),
    Curve(LADDER, [0.01, 0.011, 0.02, 0.09]),
    1e-6,
    0.0,
    1e-6,
    0.0,
    0.0,
    0.0,
)
BEFORE_S, AFTER_S = 0.002, 0.005


def start_of(config: SimConfig, model="tiny", **options) -> ModelStart:
    engine = msgspec.to_builtins(
        asdict(replace(config.engine(), kv_bytes=config.num_pages * config.page_size * 1024))
    )
    return ModelStart(model, "/gone", b"w", b"t", b"v", {"model": model, **options}, engine, "")


def put_request(
    writer, name, prompt, output, begin_s, first_s, end_s, model="tiny", **more
) -> None:
    request = Submit(name, [], SamplingParams(seed=3, max_tokens=len(output)), **more)
    writer.put(Begun(model, begin_s, request, [], len(prompt)), 100, prompt=prompt)
    writer.put(
        Ended(model, name, end_s, [Output(bytes_of(output), "length", False, b"")], "", first_s),
        100,
    )


def put_events(writer, happened, model="tiny") -> None:
    writer.put(Events(model, msgspec.Raw(encode(happened))), 100)


def record(folder, arrivals, config, cost=COST, model="tiny", key=None, **options):
    """What a server would record of a simulated engine."""
    engine = SimEngine(config, cost, jumps=False)
    for arrival in arrivals:
        engine.run_until(arrival.arrival_s)
        engine.submit(arrival)
    engine.run_until(1e9)
    result = engine.result()
    writer = RecordingWriter(folder, key=key)
    writer.put(start_of(config, model, **options), 100)
    for arrival in arrivals:
        times = result.token_times_s[arrival.request_id]
        begin_s = arrival.arrival_s - BEFORE_S
        put_request(
            writer, arrival.request_id, list(arrival.prompt_ids), [7] * len(times), begin_s, times[0] + AFTER_S,
            times[-1] + AFTER_S, model, salt=arrival.salt,
        )  # fmt: skip
    put_events(writer, result.events, model)
    writer.close()
    return result


def load(num=60, gap_s=0.05, num_output=24, seed=0):
    draw = random.Random(seed)
    prompts = [
        tuple(draw.randrange(500) for _ in range(draw.randrange(5, 150))) for _ in range(num)
    ]
    outputs = [draw.randrange(2, 2 * num_output) for _ in range(num)]
    return [
        Arrival(f"r{i}", 1.0 + gap_s * i, len(prompt), output, prompt_ids=prompt)
        for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]


def simulate(*arguments):
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)], catch_exceptions=False)


def test_a_recording_has_its_own_engine_and_costs(tmp_path):
    config = SimConfig(
        num_rows=4, token_budget=96, num_pages=200, max_context=512, prefix_caching=False
    )
    record(tmp_path / "day", load(), config)
    figures = json.loads(simulate(tmp_path / "day", "--json").stdout)
    told = figures["engine"]
    assert (told["num_rows"], told["token_budget"], told["num_pages"], told["prefix_caching"]) == (
        4,
        96,
        200,
        False,
    )
    recorded = figures["recorded"]
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        for percent in ("p50", "p90"):
            assert figures[name][percent] == pytest.approx(recorded[name][percent], rel=0.08), (
                name,
                percent,
            )
    more = json.loads(simulate(tmp_path / "day", "--json", "--max-requests", 8).stdout)
    assert (more["engine"]["num_rows"], more["engine"]["token_budget"]) == (8, 96)
    assert more["ttft_s"]["p90"] < 0.8 * figures["ttft_s"]["p90"]


def test_the_smallest_change_that_keeps_the_slo_is_found_and_does(tmp_path):
    few, arrivals = SimConfig(num_rows=2, token_budget=96, num_pages=400, max_context=512), load()
    record(tmp_path / "day", arrivals, few)
    result = simulate(tmp_path / "day", "--what-if", "--slo-ttft-ms", 1000, "--json")
    answer = json.loads(result.stdout)
    assert result.exit_code == 0
    assert answer["recorded"]["attainment"] < 0.5
    found = answer["found"]
    assert list(found["options"]) == ["max-requests"]
    assert found["attainment_low"] >= 0.9
    assert not any(tried["keeps"] for tried in answer["tried"][:-1])
    applied = record(
        tmp_path / "again", arrivals, replace(few, num_rows=found["options"]["max-requests"])
    )
    ttfts = [applied.token_times_s[each.request_id][0] - each.arrival_s for each in arrivals]
    part = sum(ttft_s + BEFORE_S + AFTER_S <= 1.0 for ttft_s in ttfts) / len(ttfts)
    assert found["attainment_low"] - 0.05 <= part <= found["attainment_high"] + 0.05
    assert "--max-requests" in simulate(tmp_path / "day", "--what-if", "--slo-ttft-ms", 1000).stdout
    kept = simulate(tmp_path / "again", "--what-if", "--slo-ttft-ms", 1000)
    assert (kept.exit_code, "kept as it is" in kept.stdout) == (0, True)


def test_what_no_option_keeps_more_replicas_may(tmp_path):
    record(
        tmp_path / "day",
        load(gap_s=0.02),
        SimConfig(num_rows=16, token_budget=128, num_pages=400, max_context=512),
    )
    asked = [tmp_path / "day", "--what-if", "--slo-ttft-ms", 400, "--slo-tpot-ms", 30, "--json"]
    none = simulate(*asked, "--max-replicas", 1)
    assert none.exit_code == 1
    assert json.loads(none.stdout)["found"] is None
    found = json.loads(simulate(*asked, "--max-replicas", 8).stdout)["found"]
    assert found["replicas"] > 1


def test_a_search_without_an_slo_is_refused(tmp_path):
    record(tmp_path / "day", load(), SimConfig(max_context=512))
    with pytest.raises(ConfigError, match="SLO"):
        simulate(tmp_path / "day", "--what-if")


def test_cached_tokens_are_those_of_the_engine(tmp_path):
    """Short prefixes, turns of conversations, and salts."""
    core = make_core(load_tiny(tmp_path), max_requests=4)
    draw, clock = random.Random(1), 0
    writer = RecordingWriter(tmp_path / "day")
    writer.put(
        ModelStart(
            "tiny", "/gone", b"", b"", b"", {}, msgspec.to_builtins(asdict(core.config)), ""
        ),
        100,
    )
    asked, happened = [], []
    prompt = [draw.randrange(2, 250) for _ in range(37)]
    texts = [
        (prompt, ""),
        (prompt[:20] + [5, 6, 7], ""),
        (prompt, "other"),
        (prompt[:33], "other"),
        (prompt[:15] + [9], ""),
    ]
    turns: list[int] = []
    for number in range(9):
        ids, salt = texts[number] if number < len(texts) else (turns, "")
        name = f"r{number}"
        core.submit(Submit(name, ids, greedy(20, ignore_eos=True), salt=salt))
        output: list[int] = []
        begin = clock
        while core.has_work:
            step, _ = core.step()
            happened += step.events
            output += [token for delta in step.deltas for token in delta.token_ids]
        clock += 10
        put_request(writer, name, ids, output, float(begin), begin + 1.0, begin + 2.0, salt=salt)
        asked.append(name)
        if number == 0:
            turns = [*prompt, *output, 4, 4, 4]
        elif number >= len(texts):
            turns = [*turns, *output, 4, 4, 4]
    put_events(writer, happened)
    writer.close()
    found = recorded_engine(Recording(tmp_path / "day"), "tiny", 1000)
    truth = found.cached
    assert [truth[name] for name in asked][:5] == [0, 16, 0, 32, 0]
    assert truth["r6"] > truth["r5"] == 48
    run = run_rows(found.rows, found.config, found.profile)
    assert run.engines[0].tally.num_cached == sum(truth.values())


def load_tiny(tmp_path):
    from tests.helpers import load_model as of_folder
    from tests.helpers import make_llama

    make_llama(tmp_path / "tiny", max_position_embeddings=512)
    return of_folder(tmp_path / "tiny")


def test_several_models_are_simulated_one_by_one(tmp_path):
    config = SimConfig(num_rows=4, num_pages=200, max_context=512)
    record(tmp_path / "day", load(), config, model="a")
    record(tmp_path / "day", load(num=40, seed=1), replace(config, num_rows=8), model="b")
    both = json.loads(simulate(tmp_path / "day", "--json").stdout)["models"]
    assert {name: (one["requests"], one["engine"]["num_rows"]) for name, one in both.items()} == {
        "a": (60, 4),
        "b": (40, 8),
    }
    assert json.loads(simulate(tmp_path / "day", "--json", "--model", "b").stdout)["requests"] == 40
    with pytest.raises(ConfigError, match="no request of a model 'c'"):
        simulate(tmp_path / "day", "--model", "c")


def test_an_engine_that_was_changed_meanwhile_is_asked_for(tmp_path):
    config = SimConfig(num_rows=4, num_pages=200, max_context=512)
    record(tmp_path / "day", load(), config, max_requests=4)
    record(tmp_path / "day", load(), replace(config, num_rows=8), max_requests=8)
    with pytest.raises(ConfigError, match="another max_requests"):
        simulate(tmp_path / "day")
    assert (
        json.loads(simulate(tmp_path / "day", "--server", 1, "--json").stdout)["engine"]["num_rows"]
        == 4
    )
    assert (
        json.loads(simulate(tmp_path / "day", "--server", -1, "--json").stdout)["engine"][
            "num_rows"
        ]
        == 8
    )
    with pytest.raises(ConfigError, match="2 servers' lives"):
        simulate(tmp_path / "day", "--server", 3)


def test_a_sealed_recording_needs_its_key(tmp_path):
    key = read_key(tmp_path / "own.key", creates=True)
    record(tmp_path / "day", load(), SimConfig(max_context=512), key=key)
    assert (
        json.loads(simulate(tmp_path / "day", "--key", tmp_path / "own.key", "--json").stdout)[
            "requests"
        ]
        == 60
    )
    read_key(tmp_path / "other.key", creates=True)
    with pytest.raises(ConfigError, match="another key"):
        simulate(tmp_path / "day", "--key", tmp_path / "other.key")


def test_a_recording_that_is_too_short_for_a_profile_is_refused(tmp_path):
    record(tmp_path / "day", load(num=2, num_output=2), SimConfig(max_context=512))
    with pytest.raises(ConfigError, match="too few"):
        simulate(tmp_path / "day")
    assert (
        json.loads(simulate(tmp_path / "day", "--profile", "h200-llama8b", "--json").stdout)[
            "requests"
        ]
        == 2
    )


def test_engines_with_roles_are_refused(tmp_path):
    record(tmp_path / "day", load(), SimConfig(max_context=512))
    writer = RecordingWriter(tmp_path / "day")
    writer.put(start_of(SimConfig(max_context=512)), 100)
    put_events(writer, [events.Placed(1.0, "r0", "prefill", "")])
    writer.close()
    with pytest.raises(ConfigError, match="engines for prefill"):
        simulate(tmp_path / "day")


def test_shapes_and_times_of_steps_with_drafts_and_samples():
    """Drafts that were wrong are no context; what the loop waited is none of a step's time."""
    happened = [
        events.Submitted(0.9, "a:0", 20),
        events.Submitted(0.9, "a:1", 20),
        events.LoopTimed(1.0, idle_s=0.8, messages_s=0.01),
        events.Admitted(1.0, "a:0", 0, 16, 20, 0.1, ""),
        events.StepPlanned(1.0, 1, 4, 64, 0, 1, 1, 1, 9, (("a:0", 4),)),
        events.FirstToken(1.1, "a:0", 0.2),
        events.StepDone(1.1, 1, 0.1, 1),
        events.Forked(1.1, "a:1", "a:0", 1),
        events.Admitted(1.11, "a:1", 1, 19, 20, 0.2, ""),
        events.LoopTimed(1.11, outputs_s=0.01),
        events.StepPlanned(1.11, 2, 4, 64, 2, 0, 2, 0, 9, (("a:0", 3), ("a:1", 1)), (("a:0", 2),)),
        events.DraftsVerified(1.2, 2, "ngram", (("a:0", 2, 1),)),
        events.StepDone(1.2, 2, 0.09, 3),
        events.StepPlanned(1.2, 3, 2, 64, 2, 0, 2, 0, 9, (("a:0", 1), ("a:1", 1))),
        events.StepDone(1.25, 3, 0.05, 2),
    ]
    found = steps_of(happened)
    prompt, drafted, plain = found.samples
    assert prompt.shape[:5] == (0, 0, 0, 4, 4 * 16 + 10)
    assert (prompt.seconds, prompt.follows, prompt.submit_s) == (pytest.approx(0.1), False, 0.01)
    assert (drafted.shape.num_decoding, drafted.shape.longest, drafted.shape.num_new) == (4, 23, 0)
    assert (drafted.seconds, drafted.follows) == (pytest.approx(0.1), True)
    assert (plain.shape.num_decoding, plain.shape.decode_context) == (2, 23 + 21)
    assert (found.drafts.num_drafts, found.drafts.num_right, found.drafts.num_drafted) == (2, 1, 1)
    assert found.cached == {"a:0": 16, "a:1": 19}


def test_drafts_yield_as_many_tokens_as_they_did():
    config = replace(SimConfig().engine(), speculate=("ngram",))
    found = _speculation(
        config, DraftCounts(num_steps=100, num_drafted=80, num_drafts=240, num_right=120)
    )
    assert found.max_drafts == 3
    assert sum(found.acceptance**i for i in (1, 2, 3)) == pytest.approx(1.2)
    assert (
        _speculation(config, DraftCounts(num_steps=100, num_drafted=10, num_drafts=10, num_right=1))
        is None
    )


def test_a_part_of_few_requests_is_less_certain_than_one_of_many():
    few, many = likely(0.95, 20), likely(0.95, 2000)
    assert few[0] < many[0] < 0.95 < many[1] < few[1] <= 1.0


def test_more_sequences_than_were_recorded_cost_what_as_many_tokens_did():
    decode, mixed = Curve([1, 2], [0.01, 0.011]), Curve([16, 64], [0.015, 0.04])
    cost = extended(FittedCost(decode, mixed, *[0.0] * 6))
    assert cost.decode.value(16) == 0.015
    assert 0.011 < cost.decode.value(8) < 0.015
    assert cost.decode.value(128) == pytest.approx(0.04 + 64 * 0.025 / 48)
    assert cost.mixed.value(128) == pytest.approx(cost.decode.value(128))
    assert cost.mixed.value(1) == 0.01


def test_a_long_recording_is_searched_where_most_missed_the_slo(tmp_path):
    from tidemill.cli.simulate_case import recorded_of
    from tidemill.planning.trace import Row

    rows = [
        Row(float(i), 10, 10, ttft_s=9.0 if 3000 <= i < 4500 else 0.1, e2e_s=10.0)
        for i in range(6000)
    ]
    stretch = busiest(rows, recorded_of, Slo(1.0, None, 0.9))
    assert len(stretch) == 2000
    assert stretch[0].at_s == 0
    assert sum(row.ttft_s == 9.0 for row in stretch) == 1500
