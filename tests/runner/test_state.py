"""Rows on the device follow the plans."""

import numpy as np

from tidemill.runner.state import RowState
from tidemill.sampling import SamplingParams
from tidemill.sched.plan import NewRow, RowPages, StepPlan


def new_row(row, page_ids):
    return NewRow(row, [1, 2, 3], 3, page_ids, SamplingParams(seed=1), frozenset())


def stage(state, **changes):
    state.stage(StepPlan(0, **changes))
    state.apply()


def test_entries_past_the_end_of_a_page_table_are_the_null_page():
    """Also where an entry in the middle was replaced before another request took the row."""
    state = RowState(2, 128, 16)
    stage(state, new_rows=[new_row(1, [4, 5, 6, 7])])
    stage(state, page_updates=[RowPages(1, 4, [8]), RowPages(1, 1, [9])])
    assert state.pages[1].tolist()[:6] == [4, 9, 6, 7, 8, 0]
    stage(state, new_rows=[new_row(1, [3, 2])])
    assert state.pages[1].tolist()[:6] == [3, 2, 0, 0, 0, 0]
    assert not state.pages[0].any()


def test_masks_are_those_of_the_plan_at_hand():
    state = RowState(2, 128, 16)
    words = np.array([5, -1], np.int32)
    stage(state, masks={1: words.tobytes()})
    assert {row: mask.tolist() for row, mask in state.masks.items()} == {1: [5, -1]}
    stage(state)
    assert not state.masks


def test_what_a_failed_step_had_staged_is_dropped():
    state = RowState(2, 128, 16)
    state.stage(StepPlan(0, new_rows=[new_row(0, [4])]))  # and the step raises before it applies this
    stage(state, new_rows=[new_row(1, [5])])
    assert not state.pages[0].any()
    assert state.pages[1].tolist()[:2] == [5, 0]
