"""Rows on the device follow the plans."""

import numpy as np

from tidemill.runner.state import RowState
from tidemill.sched.plan import NewRow, RowCopy, RowPages, StepItem, StepPlan
from tidemill.sched.request import RowSpec
from tidemill.types.cache_layout import Group
from tidemill.types.sampling import SamplingParams

SPEC = RowSpec(SamplingParams(seed=1), 3)


def new_row(row, page_ids):
    return NewRow(row, [1, 2, 3], [page_ids], SPEC)


def stage(state, **changes):
    state.stage(StepPlan(0, **changes))
    state.apply()


def test_entries_past_the_end_of_a_page_table_are_the_null_page():
    """Also where an entry in the middle was replaced before another request took the row."""
    state = RowState(2, 128, 16)
    stage(state, new_rows=[new_row(1, [4, 5, 6, 7])])
    stage(state, page_updates=[RowPages(1, 0, 4, [8]), RowPages(1, 0, 1, [9])])
    assert state.pages[1].tolist()[:6] == [4, 9, 6, 7, 8, 0]
    stage(state, new_rows=[new_row(1, [3, 2])])
    assert state.pages[1].tolist()[:6] == [3, 2, 0, 0, 0, 0]
    assert not state.pages[0].any()


def test_groups_have_their_tables_side_by_side():
    state = RowState(2, 100, 16, groups=(Group(16), Group(16, 20), Group(64, 2)))
    assert [table.shape[1] % 4 for table in state.tables] == [0, 0, 0]
    row = NewRow(1, [1, 2, 3], [[4, 5], [6, 7], [8]], SPEC)
    stage(state, new_rows=[row], page_updates=[RowPages(0, 1, 2, [9]), RowPages(0, 2, 1, [3])])
    assert [table[1].tolist()[:3] for table in state.tables] == [[4, 5, 0], [6, 7, 0], [8, 0, 0]]
    assert [table[0].tolist()[:3] for table in state.tables] == [[0, 0, 0], [0, 0, 9], [0, 3, 0]]
    stage(state, new_rows=[NewRow(0, [1], [[1], [], []], RowSpec(SamplingParams(seed=1), 1))])
    assert state.tables[1][0].sum() == 0


def test_masks_are_those_of_the_plan_at_hand():
    state = RowState(2, 128, 16)
    words = np.array([5, -1], np.int32)
    stage(state, masks={(1, 7): words.tobytes()})
    assert {place: mask.tolist() for place, mask in state.masks.items()} == {(1, 7): [5, -1]}
    stage(state)
    assert not state.masks


def test_what_a_failed_step_had_staged_is_dropped():
    state = RowState(2, 128, 16)
    # and the step raises before it applies this
    state.stage(StepPlan(0, new_rows=[new_row(0, [4])]))
    stage(state, new_rows=[new_row(1, [5])])
    assert not state.pages[0].any()
    assert state.pages[1].tolist()[:2] == [5, 0]


def test_only_tokens_of_a_prompt_are_asked_about():
    """Not those that are decoded, by a fork neither; the last token of a prompt predicts none of
    it."""
    state = RowState(4, 128, 16)
    asks = (
        SamplingParams(seed=1, prompt_logprobs=0),
        SamplingParams(pooling="mean"),
        SamplingParams(seed=1),
    )
    stage(
        state,
        new_rows=[
            NewRow(row, [1, 2, 3], [[4]], RowSpec(params, 3)) for row, params in enumerate(asks)
        ],
    )
    stage(state, row_copies=[RowCopy(0, 3, 3, RowSpec(asks[0], 3))])
    items = [[StepItem(0, row, start, 1, False, 0) for start in range(5)] for row in range(4)]
    assert [sum(map(state.asks_prompt, of_row)) for of_row in items] == [2, 3, 0, 2]
