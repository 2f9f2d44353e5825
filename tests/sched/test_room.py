"""Room of an engine: promises count until it counts a request itself."""

from tidemill.sched.room import Room, first_in


def test_rows_and_pages_are_promised_once():
    room = Room(num_rows=4, num_pages=20, page_size=16)
    assert room.pages_of(33, 2) == 5
    assert room.why_not(9, 99) == ""  # it has nothing to do
    room.promise("a", 2, 5)
    room.observe(1, 0, 12)
    assert room.why_not(2, 1) == "3 of 4 slots are taken or promised"
    assert room.why_not(1, 8) == "7 pages are free, and it needs 8"
    assert room.why_not(1, 7) == ""
    room.admitted("a")
    room.observe(2, 0, 8)
    assert room.why_not(1, 7) == ""  # one page of the second sample is left of the promise
    assert room.why_not(1, 8) != ""
    room.admitted("a")
    room.admitted("nobody")
    assert room.num_promised == 0
    room.promise("b", 1, 1)
    room.release("b")
    assert room.has_row


def test_who_comes_first():
    waiting = [
        ("a", 0, 1),
        ("a", 0, 2),
        ("b", 0, 3),
        ("c", 5, 0),
        ("d", -1, 9),
        ("e", 2_000_000, 0),
    ]
    assert first_in(waiting, {"a": 2}, 1_000_000) == 4
    assert first_in(waiting[:4], {"a": 2, "b": 1}, 1_000_000) == 2
    assert first_in(waiting[:4], {}, 1_000_000) == 0
    assert first_in(waiting[5:], {}, 1_000_000) == 0
