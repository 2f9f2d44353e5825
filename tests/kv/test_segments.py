"""Prompts with the same ids and other content behind them never share a page; the same text before
it does."""

import random

import pytest

from tidemill.engine.routing import keys_of
from tidemill.errors import InvalidRequest
from tidemill.kv.manager import INDEXES, KVManager
from tidemill.kv.tiers import Tiers
from tidemill.types.cache_layout import Group, state_group
from tidemill.types.inputs import (
    EMBEDDINGS,
    PICTURE,
    TOKEN_TYPE,
    Segment,
    check_segments,
    key_of,
    uncut,
)
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit

TEXT = list(range(100, 120))
CAT, DOG = key_of(b"cat"), key_of(b"dog")


def run_whole(kv, seq, tokens, segments):
    """Admit, compute and release a sequence. Returns how many of its tokens were cached."""
    start = kv.admit(seq, len(tokens), kv.path(tokens, segments=segments))
    kv.extend(seq, len(tokens))
    kv.record(seq, tokens, len(tokens))
    kv.begin_step()
    kv.release(seq)
    kv.check_integrity()
    return start.num_cached


def picture(key, start=len(TEXT), length=8, kind=EMBEDDINGS):
    return [Segment(start, length, kind, key)]


@pytest.mark.parametrize("index", INDEXES)
def test_two_pictures_behind_the_same_ids_share_the_text_before_them_alone(index):
    kv, prompt = KVManager(60, 4, index=index), [*TEXT, *[0] * 8, 7, 8, 9, 10, 11]
    assert run_whole(kv, 1, prompt, picture(CAT)) == 0
    assert run_whole(kv, 2, prompt, picture(DOG)) == len(TEXT)
    assert run_whole(kv, 3, prompt, ()) == len(TEXT)
    assert [run_whole(kv, 4, prompt, picture(key)) for key in (CAT, DOG, CAT)] == [32] * 3
    assert run_whole(kv, 5, prompt, picture(CAT, kind=TOKEN_TYPE)) == len(TEXT)
    assert run_whole(kv, 6, prompt, picture(CAT, start=len(TEXT) + 4, length=4)) in (
        len(TEXT),
        len(TEXT) + 4,
    )


@pytest.mark.parametrize("index", INDEXES)
def test_a_picture_in_both_directions_is_found_whole_or_not_at_all(index):
    kv, prompt = KVManager(60, 4, index=index), [*TEXT, *[0] * 8, 7]
    run_whole(kv, 1, prompt[:25], ())  # the same ids as text
    whole = picture(CAT, start=18, length=9, kind=PICTURE)
    assert run_whole(kv, 2, prompt, whole) in (16, 18)
    path = kv.path(prompt[:24] + [1], segments=whole)
    assert kv.num_cached(path) in (16, 18), "a prefix that ends within it"
    assert kv.num_cached(kv.path([*prompt, 5, 6, 7, 8], segments=whole)) >= 28


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("groups", [(), (Group(4), Group(4, window=8)), (Group(4), state_group(4))])
def test_hits_are_those_of_prefixes_with_the_same_content(index, groups):
    """Random prompts of few ids and few contents, against all contents that were computed before."""
    chance, known, kv = random.Random(7), set(), KVManager(4000, 4, index=index, groups=groups)
    for seq in range(150):
        tokens, segments, at = chance.choices(range(2), k=chance.randrange(6, 60)), [], 0
        while (at := at + chance.randrange(1, 9)) + 6 < len(tokens):
            length, kind = chance.randrange(1, 6), chance.choice([EMBEDDINGS, PICTURE])
            segments.append(Segment(at, length, kind, chance.choice([CAT, DOG]) + bytes([length])))
            at += length
        content = [(token, None) for token in tokens]
        for each in segments:
            content[each.start : each.end] = [
                (token, each) for token, _ in content[each.start : each.end]
            ]
        num = run_whole(kv, seq, tokens, segments)
        assert num == uncut(segments, num)
        assert num == 0 or (*content[:num],) in known, "a page of another content"
        known.update((*content[:n],) for n in range(1, len(tokens) + 1))


def test_pages_of_other_engines_and_routes_are_named_by_content_too():
    prompt = [*TEXT, *[0] * 60]
    kv = KVManager(20, 16, tiers=Tiers(0, 0, [], page_bytes=100))
    cat, dog = (kv.behind.contents(kv.path(prompt, segments=picture(key))) for key in (CAT, DOG))
    assert len(cat & dog) == 1, "the page of text alone"
    cat, dog = (
        keys_of(prompt, Submit("a", prompt, SamplingParams(), segments=picture(key, start=40)))
        for key in (CAT, DOG)
    )
    assert cat[0] == dog[0]
    assert cat[1] != dog[1]


def test_what_is_wrong_with_segments_is_said():
    content = b"\0" * 32
    good = Segment(2, 4, EMBEDDINGS, key_of(content))
    check_segments([good], {good.key: content}, 8, 8, 4, 4)
    check_segments([Segment(2, 6, TOKEN_TYPE, b"\1")], {}, 8, 0, 4, 4)
    for segments, num_prompt, row_bytes, most, what in [
        ([good, good], 8, 8, 4, "not after the one before it"),
        ([Segment(2, 4, "sound", CAT)], 8, 8, 4, "no kind"),
        ([good], 6, 8, 4, "ends the prompt"),
        ([good], 5, 8, 4, "not within"),
        ([good], 8, 8, 3, "too long"),
        ([good], 8, 0, 4, "token ids only"),
        ([good], 8, 4, 4, "bytes of content"),
        ([Segment(2, 4, EMBEDDINGS, CAT)], 8, 8, 4, "bytes of content"),
    ]:
        with pytest.raises(InvalidRequest, match=what):
            check_segments(segments, {good.key: content}, num_prompt, row_bytes, most, most)
