"""Which units are in slots: pure placement, no weights."""

import random

import pytest

from tidemill.layers.places import Places


def check(places):
    for slot, unit in enumerate(places.in_slot):
        assert unit < 0 or places.where[unit] == slot
    for unit, slot in enumerate(places.where):
        assert slot < 0 or places.in_slot[slot] == unit


def test_what_is_used_often_stays():
    """Two of sixteen units in most requests, the others in turn; six slots."""
    draw, places = random.Random(0), Places(16, 6)
    for number in range(400):
        rest = [2 + number % 14, 2 + (number + 7) % 14]
        places.need([0, 1, *rest] if draw.random() < 0.9 else rest)
        check(places)
    for number in range(28):
        assert not {0, 1} & set(places.need([0, 1, 2 + number % 14]))


def test_units_in_turn_do_not_push_all_out():
    """Four layers of four units each, in turn, and room for three quarters: what stays is found
    again."""
    places = Places(16, 12)
    for _ in range(10):
        for layer in range(4):
            places.need(range(4 * layer, 4 * layer + 4))
    before = places.num_read
    for layer in range(4):
        places.need(range(4 * layer, 4 * layer + 4))
    # of those that were used longest ago, all 16 would be read
    assert places.num_read - before < 12


def test_what_was_hot_cools_down():
    places = Places(8, 4)
    for _ in range(200):
        places.need([0, 1, 2])
    for _ in range(600):
        places.need([5, 6, 7])
    assert places.need([5, 6, 7]) == []
    assert (places.where[[5, 6, 7]] >= 0).all()


def test_guesses_use_no_slot_that_is_in_use():
    places = Places(12, 6)
    places.need([0, 1, 2])
    assert places.ahead([3, 4, 5, 6, 7]) == [3, 4, 5]  # and no more: the others are needed
    assert (places.where[[0, 1, 2]] >= 0).all()
    check(places)
    assert places.need([3, 5, 8]) == [8]
    assert (places.num_asked, places.num_read, places.num_foreseen) == (6, 7, 2)
    assert places.need([3, 5, 8]) == []
    assert places.num_foreseen == 2  # counted once
    check(places)


@pytest.mark.parametrize("num_slots", [6, 7, 11, 30])
def test_any_order(num_slots):
    draw, places = random.Random(num_slots), Places(24, num_slots)
    for _ in range(200):
        needed = draw.sample(range(24), draw.randint(0, 6))
        was_there = set(places.in_slot.tolist())
        missing = places.need(needed)
        assert set(missing) == set(needed) - was_there
        guessed = places.ahead(draw.sample(range(24), draw.randint(0, 6)))
        assert not set(guessed) & set(needed)
        assert all(places.where[unit] >= 0 for unit in (*needed, *guessed))
        check(places)


def test_wrong_guesses_come_to_an_end():
    wrong, right = Places(400, 16), Places(400, 16)
    for number in range(300):
        for places, guess in ((wrong, 200 + number % 200), (right, (number + 1) % 200)):
            places.need([number % 200])
            places.ahead([guess])
    assert wrong.num_read <= 300 + 128
    assert right.num_foreseen > 280
    assert right.num_missed < 20
