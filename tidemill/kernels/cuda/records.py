"""The records of a step's work lists: written by the host (runner/cuda_work.py), read by attention
and states.

All of a step is one buffer of 32-bit words: a header that says where four of the lists begin, the
rows and positions of the tokens, then the lists. Names are offsets in words. A list ends in records
of zeros.
"""

from __future__ import annotations

import triton.language as tl

# words; of them, where these lists begin (singles follow the tokens), and how many tokens do not
# only fill up:
HEADER = 8
SHARED, MEMBERS, PROMPTS, STATES, COPIES, LIVE = 0, 1, 2, 3, 4, 5


def _words(num: int) -> list[tl.constexpr]:
    return [tl.constexpr(i) for i in range(num)]


# A split of a sequence with one new token: the token's index in the step, its position, the row of
# its page table, which split; the slot of its first partial result, how many splits it has, how
# many of them are in this list. Tokens that follow it in the step and in the sequence may be in the
# same record, up to so many in all: those that end in the same split.
(
    SINGLE_TOKEN,
    SINGLE_POSITION,
    SINGLE_ROW,
    SINGLE_SPLIT,
    SINGLE_SLOT,
    SINGLE_SPLITS,
    SINGLE_LISTED,
    SINGLE_TOKENS,
) = _words(8)
SINGLE_WIDTH = tl.constexpr(8)

# A split that sequences share: its first member and how many, which split, the row of a page table
# that has it.
SHARED_MEMBER, SHARED_MEMBERS, SHARED_SPLIT, SHARED_ROW = _words(4)
SHARED_WIDTH = tl.constexpr(4)

# A member of a shared split: its token's index in the step, the slot of its partial result.
MEMBER_TOKEN, MEMBER_SLOT = _words(2)
MEMBER_WIDTH = tl.constexpr(2)

# A tile of a prompt: its first token's index in the step, how many tokens, the first one's
# position, the row of the page table; and the number of its sequence's first copied page, from 1
# on, or 0 if its pages are not copied.
PROMPT_TOKEN, PROMPT_TOKENS, PROMPT_POSITION, PROMPT_ROW, PROMPT_COPY = _words(5)
PROMPT_WIDTH = tl.constexpr(5)

# A page that is copied in bfloat16 (page_copies.py): the row of its page table, its place there,
# the copy's number, from 1 on.
COPY_ROW, COPY_BLOCK, COPY_TO = _words(3)
COPY_WIDTH = tl.constexpr(3)

# A sequence of which states are computed: its first token's index in the step, how many tokens, the
# first one's position, the row of its page table.
CHAIN_TOKEN, CHAIN_TOKENS, CHAIN_POSITION, CHAIN_ROW = _words(4)
CHAIN_WIDTH = tl.constexpr(4)
