"""Suffix decoding: which continuation is guessed, whose text it is from, and how much is kept."""

import random

import pytest

from tidemill.runner.spec import Ask
from tidemill.runner.spec.suffix import _AT_ONCE, SuffixDrafter, _Pool
from tidemill.types.sampling import SamplingParams


def ask(tokens, seq=1, most=8, salt="", num_prompt=4):
    return Ask(seq, 0, list(tokens), num_prompt, SamplingParams(), most, salt)


def guess(drafter, tokens, **how):
    return list(drafter.propose([ask(tokens, **how)])[0])


def end(drafter, tokens, seq, salt="", num_prompt=4):
    """A request with this output has ended."""
    guess(drafter, tokens, seq=seq, salt=salt, num_prompt=num_prompt)
    drafter.forget(seq, tokens, salt)


def test_what_followed_the_longest_match():
    tokens = [1, 2, 3, 4, 5, 50, 9, 2, 3, 4, 5, 60, 1, 2, 3, 4, 5]
    assert guess(SuffixDrafter(), tokens) == [50, 9, 2, 3, 4]  # as many as match


def test_what_repeats_goes_on_past_the_end():
    assert guess(SuffixDrafter(), [7, 8, 9] * 4) == [7, 8, 9, 7, 8, 9, 7, 8]


def test_nothing_is_guessed_of_what_is_new():
    assert guess(SuffixDrafter(), range(100)) == []


def test_drafts_end_where_the_counts_are_not_sure():
    parts = [[1, 2, 3, 4, 20 + i % 3, 30 + i] for i in range(6)]
    assert guess(SuffixDrafter(), [token for part in parts for token in part] + [1, 2, 3, 4]) == []
    drafter = SuffixDrafter()
    for seq, token in enumerate((20, 20, 21)):
        end(drafter, [1, 2, 3, 4, token, 40 + seq], seq)
    assert guess(drafter, [1, 2, 3, 4]) == [20]


@pytest.mark.parametrize(("salt", "expected"), [("mine", [5, 6, 7, 8]), ("other", []), ("", [])])
def test_outputs_of_others_serve_the_same_salt_only(salt, expected):
    drafter = SuffixDrafter()
    end(drafter, [1, 2, 3, 4, 5, 6, 7, 8], 1, "mine")
    assert guess(drafter, [1, 2, 3, 4], seq=2, salt=salt) == expected


def test_prompts_of_others_are_not_kept():
    drafter = SuffixDrafter()
    end(drafter, list(range(200)) + [500, 501], 1, num_prompt=200)
    assert drafter.propose([]) == []
    assert drafter.num_kept == 34
    assert guess(drafter, [96, 97, 98, 99], seq=2) == []


def test_the_same_again_is_all_drafts():
    drafter, draw = SuffixDrafter(), random.Random(3)
    tokens = [draw.randrange(5000) for _ in range(300)]
    end(drafter, tokens, 1, num_prompt=50)
    known, num_steps = tokens[:51], 0
    while len(known) < 300:
        made = guess(drafter, known, seq=2, num_prompt=50)
        assert made == tokens[len(known) : len(known) + len(made)]
        known, num_steps = tokens[: len(known) + len(made) + 1], num_steps + 1
    assert num_steps == 28  # 8 drafts and a token each


def test_memory_is_bounded_and_what_is_used_stays():
    drafter, draw = SuffixDrafter(per_salt=1000, in_all=2500), random.Random(1)
    texts = [[draw.randrange(5000) for _ in range(200)] for _ in range(40)]
    for seq, text in enumerate(texts):
        end(drafter, text, seq, salt=f"tenant {seq % 4}")
        guess(drafter, texts[0][:20], seq=100 + seq, salt="tenant 0")
        drafter.forget(100 + seq, texts[0][:20], "tenant 0")
        assert drafter.num_kept <= 2500
    assert guess(drafter, texts[0][:20], seq=500, salt="tenant 0") == texts[0][20:28]
    assert guess(drafter, texts[4][:20], seq=501, salt="tenant 0") == []
    for pool in drafter._pools.values():
        assert pool.num_tokens == sum(len(text.tokens) for text in pool._texts.values()) <= 1000
        assert {place >> 32 for place in pool._last.values()} <= set(pool._texts)
        assert len(pool._last) <= pool.num_tokens


def test_a_long_prompt_enters_in_pieces_and_all_together_no_faster():
    drafter = SuffixDrafter()
    prompts = [
        [100 + seq, 1, 2, 3, 4, 5, *range(1000 * seq, 1000 * seq + _AT_ONCE), 1, 2, 3, 4, 5]
        for seq in range(3)
    ]
    made = [
        drafter.propose([ask(prompt, seq) for seq, prompt in enumerate(prompts)]) for _ in range(5)
    ]
    assert [[bool(one) for one in step] for step in made[:2]] == [
        [False, False, False],
        [True, False, False],
    ]
    assert all(made[-1])


def test_the_same_output_is_kept_once_and_counts():
    drafter = SuffixDrafter()
    for seq in range(5):
        end(drafter, [1, 2, 3, 4, 5 if seq else 6, 7], seq)
    drafter.propose([])
    assert drafter.num_kept == 12
    assert guess(drafter, [1, 2, 3, 4], seq=9) == [5, 7]


def test_texts_go_in_any_order():
    """Three with a stretch in common; the one that was added between is dropped first."""
    pool, common = _Pool(), [1, 2, 3, 4]
    for first in (10, 20, 30):
        pool.add([first, first + 1, *common, first + 5])
    for _ in range(2):
        pool._texts.move_to_end(0)  # it was used
        pool.drop_oldest()
    assert pool.drop_oldest() == 7
    assert pool.num_tokens == 0
    assert not pool._last
