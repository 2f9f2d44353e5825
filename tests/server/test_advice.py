"""Advice on roles of engines, from events."""

from __future__ import annotations

from types import SimpleNamespace

from tidemill.config import EngineOptions
from tidemill.engine.metrics import Metrics
from tidemill.server.observe.advice import Advisor, in_words
from tidemill.types import events

CONFIG = SimpleNamespace(token_budget=2048, max_requests=256, device="cuda", page_size=16)


def history(seconds, every_s, num_prompt, num_output):
    """A request every so often; its prompt in a step of its own beside 20 others that decode."""
    now, step, made = 0.0, 0, []
    for number in range(int(seconds / every_s)):
        name, now = f"r{number}", number * every_s
        made.append(events.Admitted(now, name, 0, 0, num_prompt, 0.0, "first"))
        for prompt in (num_prompt, 0, 0):
            num_decoding = 10 + number % 10
            took = 0.01 + 0.00005 * prompt + 0.0001 * num_decoding
            step, now = step + 1, now + took
            plan = events.StepPlanned(
                now, step, prompt + num_decoding, 2048, num_decoding, 1, 20, 0, 99, ()
            )
            made += [plan, events.StepDone(now, step, took, num_decoding)]
        made.append(events.Finished(now, name, "length", num_prompt, num_output, 0, 0.0, 0.0, 1.0))
    return made


def test_long_prompts_are_told_and_counted():
    advisor, metrics = Advisor(EngineOptions()), Metrics()
    first = advisor.begin(CONFIG, 0.0)
    assert (first.disaggregate, in_words(first)) == (
        False,
        "no load is measured yet: engines do both",
    )
    said = advisor.take(history(70, 0.25, 2000, 200))
    assert [one.disaggregate for one in said] == [True]
    assert "2000 new prompt tokens and 200 output tokens" in said[0].figures
    assert "50.0 µs a prompt token" in said[0].figures
    assert "1 prefill + 1 decode" in in_words(said[0])
    metrics.take(said)
    assert metrics.registry.get_sample_value("tidemill_disaggregation_advised") == 1
    assert metrics.registry.get_sample_value("tidemill_disaggregation_gain") == said[0].gain > 2


def test_short_prompts_and_few_requests():
    advisor = Advisor(EngineOptions(prefill_engines=1, decode_engines=1))
    assert advisor.begin(CONFIG, 0.0).disaggregate
    assert advisor.take(history(70, 10, 2000, 200)) == []  # too few to say anything
    said = advisor.take([event for event in history(200, 0.25, 30, 200) if event.time_s > 70])
    assert [one.disaggregate for one in said] == [False]
    assert "too little" in said[0].reason
