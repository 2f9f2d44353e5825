"""The files of a recording: what is written is read, within bounds, and without the key nothing is."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import stat
import subprocess
import threading

import msgspec
import pytest

from tests.waiting import until
from tidemill.errors import ConfigError
from tidemill.record import writer as writer_module
from tidemill.record.format import (
    SEGMENT_LEN,
    Begun,
    Ended,
    Events,
    ModelStart,
    Output,
    Packer,
    Segment,
    bytes_of,
    encode,
    events_of,
    ids_of,
)
from tidemill.record.reader import Recording
from tidemill.record.writer import MIN_BYTES, RecordingWriter, files_of, folder_and_size, read_key
from tidemill.types import events
from tidemill.types.sampling import Grammar, SamplingParams
from tidemill.types.wire import Submit

MODEL = ModelStart("tiny", "/tmp/tiny", b"w", b"t", b"v", {"model": "tiny"}, {"num_pages": 7}, "")
SECRET = "the launch code is 7421"


def put(writer, name, prompt, output=(5, 6), error="", **params) -> None:
    request = Submit(name, [], SamplingParams(seed=3, **params))
    writer.put(Begun("tiny", 1.5, request, [], len(prompt)), 100 + 8 * len(prompt), prompt=prompt)
    writer.put(
        Ended("tiny", name, 2.5, [Output(bytes_of(output), "length", False, b"")], error, 2.0), 100
    )


def written(folder, *requests, key=None, **options) -> None:
    writer = RecordingWriter(folder, key=key, **options)
    writer.put(MODEL, 100)
    for name, prompt in requests:
        put(writer, name, prompt)
    writer.close()


def test_what_is_written_is_read(tmp_path):
    writer = RecordingWriter(tmp_path / "day")
    writer.put(MODEL, 100)
    put(
        writer,
        "a",
        list(range(600)),
        temperature=0.5,
        stop=("x",),
        grammar=Grammar("regex", "[0-9]+"),
    )
    put(writer, "a", [1, 2, 3], output=(9,), error="client_left")  # an id that is used again
    happened = [events.Submitted(1.0, "a", 600), events.StepDone(2.0, 1, 0.5, 1, replica=2)]
    writer.put(Events("tiny", msgspec.Raw(encode(happened))), 100)
    writer.put(Begun("tiny", 3.0, Submit("b", [], SamplingParams()), [], 1), 100, prompt=[4])
    writer.close()
    recording = Recording(tmp_path / "day")
    (server,) = recording.servers
    first, again, open_end = server.requests
    assert first.prompt_ids() == list(range(600))
    assert (first.submit().params.grammar, first.submit().params.stop) == (
        Grammar("regex", "[0-9]+"),
        ("x",),
    )
    assert first.output_ids(0).tolist() == [5, 6]
    assert (again.prompt_ids(), again.output_ids(0).tolist(), again.ended.error) == (
        [1, 2, 3],
        [9],
        "client_left",
    )
    assert open_end.ended is None
    assert [event for _, event in recording.events(server)] == happened
    assert server.models["tiny"] == [MODEL]
    (file,) = files_of(tmp_path / "day")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_segments_that_prompts_share_are_stored_once(tmp_path):
    rng = random.Random(0)
    shared = [rng.randrange(50_000) for _ in range(8 * SEGMENT_LEN)]
    written(tmp_path / "one", ("0", shared))
    written(tmp_path / "many", *[(str(number), [*shared, number]) for number in range(50)])
    sizes = [
        sum(path.stat().st_size for path in files_of(tmp_path / name)) for name in ("one", "many")
    ]
    assert sizes[1] < sizes[0] + 50 * 150
    assert [
        request.prompt_ids()[-1] for request in Recording(tmp_path / "many").servers[0].requests
    ] == list(range(50))


def test_the_folder_is_bounded_and_the_oldest_goes_first(tmp_path):
    rng = random.Random(0)
    writer = RecordingWriter(tmp_path, MIN_BYTES)
    writer.put(MODEL, 100)
    for number in range(40):
        # 80 kB that no one can compress
        put(writer, str(number), [rng.randrange(2**31) for _ in range(20_000)])
        until(lambda: not writer.num_behind)  # each is a block of its own
        assert sum(path.stat().st_size for path in files_of(tmp_path)) <= MIN_BYTES
    writer.close()
    (server,) = Recording(tmp_path).servers
    kept = [int(request.request_id) for request in server.requests]
    assert kept == list(range(kept[0], 40))
    assert 5 < len(kept) < 14
    assert all(len(request.prompt_ids()) == 20_000 and request.ended for request in server.requests)
    assert len(files_of(tmp_path)) > 2


def test_a_request_that_would_take_all_the_room_is_left_out(tmp_path, caplog):
    rng = random.Random(0)
    writer = RecordingWriter(tmp_path, MIN_BYTES)
    writer.put(MODEL, 100)
    for name, num_tokens in (("small", 10), ("giant", 400_000), ("next", 20_000)):
        put(writer, name, [rng.randrange(2**31) for _ in range(num_tokens)])
    writer.close()
    (server,) = Recording(tmp_path).servers
    assert [request.request_id for request in server.requests if request.ended] == ["small", "next"]
    assert sum(path.stat().st_size for path in files_of(tmp_path)) <= MIN_BYTES
    assert "half of" in caplog.text


def test_servers_continue_a_folder_one_after_the_other(tmp_path):
    for number in range(3):
        written(tmp_path, (str(number), [number]))
    servers = Recording(tmp_path).servers
    assert [[request.request_id for request in server.requests] for server in servers] == [
        ["0"],
        ["1"],
        ["2"],
    ]
    writer = RecordingWriter(tmp_path)
    with pytest.raises(ConfigError, match="Another server records"):
        RecordingWriter(tmp_path)
    writer.close()


def test_without_the_key_nothing_is_read(tmp_path):
    key = read_key(tmp_path / "keys" / "record.key", creates=True)
    assert read_key(tmp_path / "keys" / "record.key", creates=True) == key
    assert stat.S_IMODE((tmp_path / "keys" / "record.key").stat().st_mode) == 0o600
    prompt = list(SECRET.encode())
    written(tmp_path / "day", ("a-name", prompt), key=key)
    (file,) = files_of(tmp_path / "day")
    plain = file.read_bytes()
    assert bytes_of(prompt) not in plain
    assert b"a-name" not in plain
    unpacked = (
        subprocess.run(["zstd", "-dc", file], capture_output=True, check=False).stdout
        if has_zstd()
        else b""
    )
    assert b"a-name" not in unpacked
    with pytest.raises(ConfigError, match="sealed"):
        Recording(tmp_path / "day")
    with pytest.raises(ConfigError, match="another key"):
        Recording(tmp_path / "day", bytes(32))
    assert Recording(tmp_path / "day", key).servers[0].requests[0].prompt_ids() == prompt


def has_zstd() -> bool:
    return any(
        os.access(os.path.join(folder, "zstd"), os.X_OK)
        for folder in os.environ["PATH"].split(os.pathsep)
    )


def test_requests_of_a_tenant_are_sealed_beside_others(tmp_path):
    key = bytes(range(32))
    writer = RecordingWriter(tmp_path, key=key, seals_all=False)
    writer.put(MODEL, 100)
    put(writer, "open", [1])
    request = Submit("secret", [], SamplingParams(seed=1))
    writer.put(Begun("tiny", 1.0, request, [], 2), 100, is_private=True, prompt=[7, 8])
    writer.close()
    (file,) = files_of(tmp_path)
    assert b"secret" not in file.read_bytes()
    assert [each.request_id for each in Recording(tmp_path, key).servers[0].requests] == [
        "open",
        "secret",
    ]


def test_a_file_that_was_cut_is_read_up_to_there(tmp_path):
    writer = RecordingWriter(tmp_path)
    writer.put(MODEL, 100)
    put(writer, "first", [1, 2])
    until(lambda: not writer.num_behind)
    put(writer, "second", [3, 4])
    writer.close()
    (file,) = files_of(tmp_path)
    whole = file.read_bytes()
    for cut in (1, 5, 20, 60):
        file.write_bytes(whole[:-cut])
        recording = Recording(tmp_path)
        assert [request.request_id for request in recording.servers[0].requests] == ["first"], cut
        assert recording.cut == {file}
    file.write_bytes(whole)
    assert not Recording(tmp_path).cut


@pytest.mark.parametrize("seed", range(20))
def test_damage_is_told(tmp_path, seed):
    """A byte that is another is found, or was in what is skipped; never is there an error of
    another kind."""
    written(tmp_path, *[(str(number), [number] * 300) for number in range(5)])
    (file,) = files_of(tmp_path)
    data, rng = bytearray(file.read_bytes()), random.Random(seed)
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)
    with contextlib.suppress(ConfigError):
        Recording(tmp_path)


def read_all(folder) -> None:
    recording = Recording(folder)
    for server in recording.servers:
        list(recording.events(server))


def begun(num_samples=1) -> Begun:
    return Begun("tiny", 1.0, Submit("a", [], SamplingParams(n=num_samples)), [], 1)


def ended(*outputs) -> Ended:
    return Ended("tiny", "a", 2.0, [Output(ids, "length", False, b"") for ids in outputs])


@pytest.mark.parametrize(
    "records",
    [
        [MODEL, begun(2), ended(bytes(4))],
        [MODEL, begun(), ended(bytes(5))],
        [MODEL, Segment(b"d", bytes(3))],
        [msgspec.structs.replace(begun(), model="other")],
        [Events("tiny", msgspec.Raw(b"\x91\xa1\xff"))],
        [msgspec.structs.replace(MODEL, config=msgspec.Raw(b"\x91" * 100_000 + b"\x90"))],
        [{"type": "model"}],
    ],
    ids=[
        "fewer samples",
        "half a token",
        "half a token of a prompt",
        "no model",
        "no text",
        "deep",
        "no fields",
    ],
)
def test_what_makes_no_sense_is_told(tmp_path, records):
    """Records that are whole, by a hostile hand."""
    written(tmp_path)
    (file,) = files_of(tmp_path)
    with file.open("ab") as out:
        out.write(Packer(None).block(records, is_sealed=False))
    with pytest.raises(ConfigError, match=r"damaged|describe"):
        read_all(tmp_path)


def test_what_is_no_recording_is_told(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match="--record"):
            Recording(path)
    (tmp_path / "00000001.zst").write_bytes(b"no recording, but a text of somebody")
    with pytest.raises(ConfigError, match="damaged"):
        Recording(tmp_path)
    (tmp_path / "key").write_text("1234")
    with pytest.raises(ConfigError, match="64 hexadecimal"):
        read_key(tmp_path / "key")


def test_sizes_are_read_and_small_ones_refused():
    assert folder_and_size("/var/log/day") == (
        writer_module.Path("/var/log/day"),
        writer_module.DEFAULT_BYTES,
    )
    assert folder_and_size("/var/log/day:2G")[1] == 2 * 2**30
    for wrong in ("/var/log/day:5", "/var/log/day:much"):
        with pytest.raises(ConfigError, match=r"DIR|nothing"):
            folder_and_size(wrong)


def test_a_disk_that_hangs_takes_no_memory(tmp_path, monkeypatch, caplog):
    released = threading.Event()
    monkeypatch.setattr(writer_module, "MAX_BEHIND", 1000)
    writer = RecordingWriter(tmp_path)
    monkeypatch.setattr(RecordingWriter, "_write_records", lambda self, items: released.wait())
    for number in range(100):
        put(writer, str(number), [1])
    assert 1000 < writer.num_behind < 1300
    (told,) = writer.stopped()
    assert told.reason == "the disk does not keep up"
    assert writer.stopped() == []
    released.set()
    writer.close()
    assert caplog.text.count("nothing more is recorded") == 1


def test_a_full_disk_leaves_whole_blocks(tmp_path, monkeypatch):
    writer = RecordingWriter(tmp_path)
    writer.put(MODEL, 100)
    put(writer, "first", [1])
    until(lambda: not writer.num_behind)
    real = os.write

    def some(fd, data):
        real(fd, bytes(data[:5]))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer_module.os, "write", some)
    put(writer, "second", [2])
    until(lambda: not writer.num_behind)
    monkeypatch.undo()
    writer.close()
    assert [event.reason for event in writer.stopped()] == ["No space left on device"]
    assert [request.request_id for request in Recording(tmp_path).servers[0].requests] == ["first"]


def test_events_of_a_newer_build_are_left_out():
    known = events.StepDone(2.0, 1, 0.5, 1)
    mixed = msgspec.Raw(encode([{"type": "Unheard", "time_s": 1.0}, known]))
    assert events_of(Events("tiny", mixed), "here") == [known]


def test_ids_are_kept_whatever_they_are():
    assert ids_of(bytes_of([0, 1, 2**31 - 1])).tolist() == [0, 1, 2**31 - 1]
    with pytest.raises(OverflowError):
        bytes_of([-1])
