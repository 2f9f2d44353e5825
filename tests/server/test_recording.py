"""The load of a real server as a trace, and what reads it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import stat

import httpx
import pytest
from typer.testing import CliRunner

from tests.server.conftest import KEYS, Server
from tests.waiting import until
from tidemill import events
from tidemill.bench.workload import read_trace
from tidemill.cli.main import app
from tidemill.engine.client import PROBE
from tidemill.errors import ConfigError
from tidemill.planning.load import read_trace as read_jobs
from tidemill.sampling import Beams, SamplingParams
from tidemill.sched.request import HANDED_OVER
from tidemill.server.observe import recording
from tidemill.server.observe.recording import BLOCK_LEN, IdAllocator, TraceFile
from tidemill.sim.trace import Row, line_of, read_rows
from tidemill.wire import Submit

SECRET = "the launch code is 7421. "
SHARED = SECRET * 8  # 200 tokens: one for each character


def complete(server, prompt, key=KEYS[0], **more) -> dict:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True} | more
    reply = httpx.post(f"{server.url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
    assert reply.status_code == 200, reply.text
    return reply.json()


def leave(server, prompt, num_tokens) -> None:
    """Ask for many tokens, and go away after the first."""
    body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=headers) as reply:
        next(line for line in reply.iter_lines() if line.startswith("data: {"))


@pytest.fixture(scope="module")
def recorded(roomy_folder, tmp_path_factory):
    """A file of requests in a known order, and its rows."""
    path = tmp_path_factory.mktemp("recorded") / "load.jsonl"
    keys = [word for key in KEYS for word in ("--api-key", key)]
    server = Server(roomy_folder, *keys, "--admin-key", "key-of-the-administrator", "--speculate", "off",
                    "--record-trace", str(path)).wait()  # fmt: skip
    complete(server, SHARED + "a" * 20)
    complete(server, SHARED + "b" * 20, n=2, temperature=1, max_tokens=6)
    complete(server, SHARED + "a" * 20, KEYS[1], priority=5)  # another tenant's cache is another
    complete(server, SHARED + "a" * 20)
    complete(server, ["x" * 30, "y" * 31], max_tokens=3)
    ended = complete(server, "z", max_tokens=40, seed=1)["choices"][0]["text"]
    complete(server, "z", max_tokens=4000, seed=1, stop=[ended[8:12]])
    leave(server, "w" * 100, 3900)
    for body in ({"prompt": "v" * 5000}, {"prompt": "v", "temperature": -1}):  # refused
        assert httpx.post(f"{server.url}/v1/completions", json=body, headers={"x-api-key": KEYS[0]}).status_code == 400
    assert server.stop(signal.SIGTERM) == 0
    return path, read_rows(path)


def test_a_line_for_each_request(recorded):
    path, rows = recorded
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(row.num_prompt for row in rows) == [1, 1, 30, 31, 100, 220, 220, 220, 220]
    first, second, other, again, *lists = rows[:6]
    assert [(row.num_output, row.n, row.priority) for row in (first, second, other, again)] == [
        (4, 1, 0), (6, 2, 0), (4, 1, 5), (4, 1, 0)]  # fmt: skip
    assert {(row.num_prompt, row.num_output) for row in lists} == {(30, 3), (31, 3)}
    whole, stopped, left = rows[6:]
    assert whole.num_output == 40
    assert stopped.num_output < 4000  # it may be computed further before the engine hears of the stop string
    assert [row.abort_s for row in rows[:8]] == [None] * 8
    assert 1 <= left.num_output < 3900
    assert left.abort_s >= left.ttft_s > 0
    assert all(row.e2e_s >= row.ttft_s > 0 for row in rows)
    assert rows[0].at_s == 0
    assert [first.tenant, other.tenant] == ["1", "2"]
    assert {row.tenant for row in rows} == {"1", "2"}


def test_prefixes_are_shared_as_they_were(recorded):
    first, second, other, again = recorded[1][:4]
    num_shared = 200 // BLOCK_LEN
    assert len(first.blocks) == -(-220 // BLOCK_LEN)
    assert first.blocks == again.blocks
    assert first.blocks[:num_shared] == second.blocks[:num_shared]
    assert first.blocks[num_shared] != second.blocks[num_shared]
    assert not {*first.blocks} & {*other.blocks}
    assert {block for row in recorded[1] for block in row.blocks} == set(range(1, 15))


def test_no_text_is_in_it(recorded):
    path, _ = recorded
    text = path.read_text()
    fields = {name for line in text.splitlines() for name in json.loads(line)}
    assert fields <= {"timestamp", "input_length", "output_length", "block_size", "hash_ids", "priority", "tenant", "n",
                      "abort_ms", "ttft_ms", "e2e_ms"}  # fmt: skip
    assert not any(word in text for word in ("launch", *KEYS))


def test_it_is_simulated_and_planned(recorded):
    path, rows = recorded
    whole = ["--requests", "8"]  # without the last, whose client may have left before its first simulated token
    printed = CliRunner().invoke(app, ["simulate", str(path), *whole, "--json"], catch_exceptions=False).stdout
    figures = json.loads(printed)
    assert figures["requests"] == figures["recorded"]["requests"] == 9  # samples
    assert figures["cached_tokens"] >= 2 * 128  # of pages of 64 tokens
    assert figures["recorded"]["ttft_s"]["p50"] > 0
    assert "as recorded" in CliRunner().invoke(app, ["simulate", str(path)], catch_exceptions=False).stdout
    assert [job.num_prompt for job in read_jobs(path)] == [row.num_prompt for row in rows]


def test_it_is_sent_to_a_server(recorded, roomy):
    path, rows = recorded
    items = read_trace(path, limit=100, max_context=4096, vocab=300)
    assert [len(one.prompt_ids) for one in items] == [row.num_prompt for row in rows]
    assert items[0].prompt_ids == items[3].prompt_ids
    assert items[0].prompt_ids[:192] == items[1].prompt_ids[:192] != items[2].prompt_ids[:192]
    arguments = ["--base-url", f"{roomy.url}/v1", "--model", "tiny", "--trace", str(path), "--time-scale", "0.001"]
    more = ["--max-context", "300", "--vocab", "300", "--json", str(path.parent / "figures.json")]
    result = CliRunner().invoke(app, ["bench", "serve", *arguments, *more], catch_exceptions=False)
    assert result.exit_code == 0, result.stdout
    assert '"failed": 0' in (path.parent / "figures.json").read_text()


def test_an_engine_that_dies_doubles_no_request(tiny_folder, tmp_path):
    path = tmp_path / "load.jsonl"
    server = Server(tiny_folder, "--speculate", "off", "--record-trace", str(path)).wait()
    body = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=None) as reply:
        lines = reply.iter_lines()
        next(line for line in lines if line.startswith("data: {"))
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert '"finish_reason":"length"' in "".join(lines)
    assert server.stop(signal.SIGTERM) == 0
    (row,) = read_rows(path)
    assert (row.num_prompt, row.num_output, row.abort_s) == (5, 400, None)


def test_what_the_end_of_the_server_cuts_is_an_aborted_request(roomy_folder, tmp_path):
    path = tmp_path / "load.jsonl"
    server = Server(roomy_folder, "--speculate", "off", "--drain-seconds", "0", "--record-trace", str(path)).wait()
    body = {"prompt": "hello", "max_tokens": 3900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=None) as reply:
        lines = reply.iter_lines()
        next(line for line in lines if line.startswith("data: {"))
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(httpx.HTTPError):
            list(lines)
    assert server.stop(signal.SIGTERM) == 0
    (row,) = read_rows(path)
    assert row.num_output >= 1
    assert row.abort_s is not None or row.num_output == 3900


def test_several_engines_and_models_have_one_file(tiny_folder, roomy_folder, tmp_path):
    alike, roles, models = (tmp_path / f"{name}.jsonl" for name in ("alike", "roles", "models"))
    with_roles = "--prefill", "1", "--decode", "1", "--token-budget", "64"
    for path, options in ((alike, ("--data-parallel", "2")), (roles, with_roles)):
        server = Server(roomy_folder, *options, "--record-trace", str(path)).wait()
        for number in range(4):
            complete(server, SHARED + str(number), max_tokens=5)
        assert server.stop(signal.SIGTERM) == 0
        rows = read_rows(path)
        assert [(row.num_prompt, row.num_output, row.abort_s) for row in rows] == [(201, 5, None)] * 4
        assert len({row.blocks[:3] for row in rows}) == 1
        assert len({row.blocks[3] for row in rows}) == 4
    server = Server(None, f"one={tiny_folder}", f"two={roomy_folder}", "--record-trace", str(models)).wait()
    for model in ("one", "two"):
        complete(server, SHARED, model=model)
    assert server.stop(signal.SIGTERM) == 0
    one, two = read_rows(models)
    assert (one.model, two.model) == ("one", "two")
    assert not {*one.blocks} & {*two.blocks}


def test_a_file_that_cannot_be_written_is_told_at_start(tmp_path):
    (tmp_path / "notes.txt").write_text("milk, bread\n")
    (tmp_path / "foreign.jsonl").write_text('{"timestamp": 0, "input_length": 5, "output_length": 2}\n')
    os.mkfifo(tmp_path / "pipe")
    for name in ("notes.txt", "foreign.jsonl", "pipe", "", "missing/load.jsonl"):
        result = CliRunner().invoke(app, ["serve", "smollm2", "--record-trace", str(tmp_path / name)])
        assert isinstance(result.exception, ConfigError), name
        assert "--record-trace" in str(result.exception)
    assert (tmp_path / "notes.txt").read_text() == "milk, bread\n"
    first = TraceFile(tmp_path / "load.jsonl")
    with pytest.raises(ConfigError, match="Another server"):
        TraceFile(tmp_path / "load.jsonl")
    first.close()


def test_a_full_disk_stops_the_recording_and_nothing_else(tiny_folder, tmp_path):
    path = tmp_path / "load.jsonl"
    patch = f"""
import errno, tidemill.server.observe.recording as recording
real = recording.os.write
class Full:
    def __getattr__(self, name):
        return getattr(real_os, name)
    def write(self, fd, text):
        if real_os.path.getsize({str(path)!r}):
            real(fd, text[:5])
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, text)
real_os, recording.os = recording.os, Full()
"""
    server = Server(tiny_folder, "--record-trace", str(path), patch=patch).wait()
    complete(server, "the first")
    until(lambda: path.stat().st_size)
    complete(server, "the second")

    def is_told():
        complete(server, "another")
        return server.gauge("recordings_stopped_total") == 1

    until(is_told)
    complete(server, "the last")
    assert server.stop(signal.SIGTERM) == 0
    (row,) = read_rows(path)
    assert row.num_prompt == len("the first")
    assert server.process.stdout.read().count("not recorded any more") == 1


# ---- without a server


def written(path, *rows, keys=((),)) -> None:
    file = TraceFile(path)
    for row, its in zip(rows, keys, strict=True):
        file.put(row, its)
    file.close()


def test_what_is_written_is_read(tmp_path):
    row = Row(1.5, 130, 7, (4, 5, 6), 3, "2", 2, 0.25, 64, 0.125, 0.25, "small")
    (tmp_path / "x.jsonl").write_bytes(line_of(Row(0.0, 1, 1)) + line_of(row))
    assert read_rows(tmp_path / "x.jsonl")[1] == row
    assert row.long_blocks == ()
    assert Row(0.0, 0, 0, tuple(range(20)), block_len=64).long_blocks == (7, 15)
    assert Row(0.0, 0, 0, (3, 4)).long_blocks == (3, 4)


@pytest.mark.parametrize("size", [0, -64, 100, 1024])
def test_a_wrong_block_size_is_refused(tmp_path, size):
    (tmp_path / "x.jsonl").write_text(f'{{"timestamp": 0, "input_length": 1, "output_length": 1, "block_size": {size or 0.5}}}\n')
    with pytest.raises(ConfigError, match="block_size"):
        read_rows(tmp_path / "x.jsonl")


def test_a_file_is_continued_with_other_numbers(tmp_path):
    path = tmp_path / "load.jsonl"
    row = Row(0.0, 100, 5, tenant="someone", block_len=BLOCK_LEN)
    written(path, row, row, keys=([11, 12], [11, 13]))
    with path.open("ab") as file:
        file.write(line_of(row)[:30])  # the machine stopped
    assert len(read_rows(path)) == 2
    written(path, row, row, keys=([11, 12], [11, 14]))
    first, second, third, fourth = read_rows(path)
    assert first.blocks[0] == second.blocks[0]
    assert third.blocks[0] == fourth.blocks[0]
    assert third.tenant == fourth.tenant
    assert not {first.tenant, *map(str, first.blocks + second.blocks)} & {third.tenant, *map(str, third.blocks + fourth.blocks)}
    for number in range(30):
        written(path, row, keys=([number],))
    assert len({read.blocks for read in read_rows(path)[4:]}) == 30


def test_ids_that_were_not_asked_for_are_forgotten():
    ids = IdAllocator(7, 3)
    assert ids.of("abc") == (7, 8, 9)
    assert ids.of("ad") == (7, 10)  # c goes first: it is the end of a prompt
    assert ids.of("ab") == (7, 8)
    assert ids.of("c") == (11,)
    assert len(ids) == 3


def test_a_disk_that_hangs_takes_no_memory(tmp_path, monkeypatch, caplog):
    import threading

    released = threading.Event()
    monkeypatch.setattr(recording, "MAX_BEHIND", 1000)
    monkeypatch.setattr(TraceFile, "_write", lambda self, text: released.wait())
    file = TraceFile(tmp_path / "load.jsonl")
    for _ in range(100):
        file.put(Row(0.0, 1, 1), ())
    assert 1000 < file._num_put < 1200
    (told,) = file.stopped()
    assert told.reason == "the disk does not keep up"
    assert file.stopped() == []
    released.set()
    file.close()
    assert caplog.text.count("not recorded any more") == 1


def test_half_a_line_is_never_left(tmp_path, monkeypatch):
    path = tmp_path / "load.jsonl"
    written(path, Row(0.0, 1, 1))
    real = os.write

    def some(fd, text):
        if path.stat().st_size > 200:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, text[:20])

    monkeypatch.setattr(recording.os, "write", some)
    written(path, *[Row(0.0, 1, 1)] * 9, keys=[()] * 9)
    lines = path.read_bytes().splitlines(keepends=True)
    assert all(line.endswith(b"}\n") for line in lines)
    assert 1 <= len(lines) < 10


def follow(path, request: Submit, *steps) -> list[Row]:
    """A request through a recording: events, or what the server says at the end."""
    file = TraceFile(path)
    made = file.recording()
    asyncio.run(made.begin(request))
    for step in steps:
        if isinstance(step, tuple):
            made.end(request.request_id, *step)
        else:
            made.take([step])
    made.close()
    file.close()
    return read_rows(path) if path.stat().st_size else []


def test_a_request_that_goes_on_in_another_engine_is_one_line(tmp_path):
    request = Submit("t/r/0", [5] * 70, SamplingParams(max_tokens=9), tenant="t")
    submitted, first = events.Submitted(0.0, "t/r/0", 70), events.FirstToken(0.0, "t/r/0", 0.1)
    over = events.Finished(0.0, "t/r/0", "length", 70, 9, 0, 0.0, 0.0, 0.0)
    for number, end in enumerate(
        [
            events.Finished(0.0, "t/r/0", HANDED_OVER, 70, 1, 0, 0.0, 0.0, 0.0),
            events.Aborted(0.0, "t/r/0", "its engine was lost: it goes on in another", 0),
        ]
    ):
        (row,) = follow(tmp_path / f"{number}.jsonl", request, submitted, first, end, submitted, over, (9, True))
        assert (row.num_output, row.n, row.abort_s) == (9, 1, None)


def test_a_client_that_leaves_before_its_engine_speaks_has_a_line(tmp_path, monkeypatch):
    request = Submit("/r/0", [5] * 70, SamplingParams(max_tokens=9))
    taken, over = events.Submitted(0.0, "/r/0", 70), events.Aborted(0.0, "/r/0", "its client left", 0)
    (row,) = follow(tmp_path / "left.jsonl", request, (0, False), taken, over)
    assert (row.num_output, row.abort_s is None, row.ttft_s) == (0, False, None)
    assert follow(tmp_path / "refused.jsonl", request, (0, False, True), taken, over) == []
    monkeypatch.setattr(recording, "MAX_UNKNOWN", 0)
    assert follow(tmp_path / "forgotten.jsonl", request, (0, False), taken, over) == []


@pytest.mark.parametrize("end", ["", "\n"])
def test_a_log_of_another_program_stays_as_it_is(tmp_path, end):
    path, line = tmp_path / "log.jsonl", '{"timestamp":1700000000,"level":"info","msg":"precious"}' + end
    path.write_text(line)
    with pytest.raises(ConfigError, match="something other than a recorded trace"):
        TraceFile(path)
    assert path.read_text() == line


def test_samples_beams_and_refusals(tmp_path):
    two = Submit("/r/0", [5], SamplingParams(n=2, max_tokens=9))
    ended = [events.Finished(0.0, f"/r/0:{i}", "stop", 1, num, 0, 0.0, 0.0, 0.0) for i, num in ((0, 4), (1, 8))]
    begun = [events.Submitted(0.0, f"/r/0:{i}", 1) for i in range(2)]
    (row,) = follow(tmp_path / "two.jsonl", two, *begun, ended[0], (12, True), ended[1])
    assert (row.n, row.num_output) == (2, 6)
    beams = Submit("/r/0", [5], SamplingParams(n=2, max_tokens=9, beams=Beams(4)))
    over = events.Finished(0.0, "/r/0", "length", 1, 9, 0, 0.0, 0.0, 0.0)
    (row,) = follow(tmp_path / "beams.jsonl", beams, events.Submitted(0.0, "/r/0", 1, num_beams=4), over, (18, True))
    assert (row.n, row.num_output) == (4, 9)
    assert follow(tmp_path / "refused.jsonl", two, (0, False)) == []
    hostile = Submit("/r/0", [-1, 2**40], SamplingParams(), priority=PROBE)
    assert follow(tmp_path / "hostile.jsonl", hostile, (0, False)) == []
    (row,) = follow(tmp_path / "cut.jsonl", two, *begun, ended[0])  # the server ends, and nobody reports the second
    assert (row.n, row.num_output) == (2, 4)
    assert row.abort_s is not None
