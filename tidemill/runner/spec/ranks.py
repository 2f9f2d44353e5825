"""The tree of drafts that is likeliest to be right: from how often the token drawn had which rank
among a head's candidates."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from tidemill.types.sampling import SamplingParams

NUM_RANKS = 4
_FADE = 0.995  # weight of older ranks with each new one
# how often the token drawn has each rank, before any was seen, and what that counts for:
_PRIOR = (0.4, 0.12, 0.06, 0.03)
_PRIOR_WEIGHT = 8.0


class Ranks:
    """The counts of the ranks that the tokens drawn had among a head's candidates, of those whose
    tokens before it were all right."""

    def __init__(self, num_heads: int) -> None:
        """`num_heads`: or places of drafts, if one head makes them all."""
        self._counts = [[0.0] * NUM_RANKS for _ in range(num_heads)]
        self._totals = [0.0] * num_heads

    def add(self, head: int, rank: int | None) -> None:
        """None: it was no candidate."""
        self._fade(head)
        self._totals[head] += 1
        if rank is not None:
            self._counts[head][rank] += 1

    def fade(self) -> None:
        """A token came without drafts: after some time there may be some again."""
        for head in range(len(self._totals)):
            self._fade(head)

    def _fade(self, head: int) -> None:
        self._counts[head] = [count * _FADE for count in self._counts[head]]
        self._totals[head] *= _FADE

    def chance(self, head: int, rank: int) -> float:
        return (self._counts[head][rank] + _PRIOR_WEIGHT * _PRIOR[rank]) / (
            self._totals[head] + _PRIOR_WEIGHT
        )

    def shape(self, most: int) -> tuple[list[tuple[int, int]], list[float]]:
        """The likeliest tree of so many drafts, likelier ones first: parent and rank of each, and
        how likely each is right."""
        made, chances = list[tuple[int, int]](), list[float]()
        heads = list[int]()  # of each draft
        open_ = [(-self.chance(0, rank), -1, rank) for rank in range(NUM_RANKS)]
        heapify(open_)
        while open_ and len(made) < most:
            chance, parent, rank = heappop(open_)
            made.append((parent, rank))
            chances.append(-chance)
            heads.append(0 if parent < 0 else heads[parent] + 1)
            head = heads[-1] + 1
            if head < len(self._counts):
                for next_rank in range(NUM_RANKS):
                    heappush(
                        open_, (chance * self.chance(head, next_rank), len(made) - 1, next_rank)
                    )
        return made, chances


def takes_trees(params: SamplingParams) -> bool:
    """Tells if the request's sampling allows trees: a token drawn depends on those before it
    through the model alone. Other stages of sampling look at a row's tokens."""
    return not params.has_penalties and not params.bad_word_ids and not params.has_masks
