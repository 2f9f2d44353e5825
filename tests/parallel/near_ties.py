"""Tokens of two layouts, equal but for near-ties; and how many of those there were, which a run of
the tests says at its end."""

from collections import Counter

from tests.helpers import Answer

NEAR_TIE = 1e-4
TALLY: Counter[str] = Counter()


def excused(answers: dict[str, Answer], expected: dict[str, Answer]) -> int:
    """How many sequences differ from a near-tie on. Any other difference fails."""
    num = 0
    for name, answer in expected.items():
        got = answers[name].tokens
        assert len(got) == len(answer.tokens)
        at = next(
            (
                i
                for i, pair in enumerate(zip(got, answer.tokens, strict=True))
                if pair[0] != pair[1]
            ),
            None,
        )
        if at is not None:
            best = answer.logprobs[at].top
            assert abs(best[0][1] - best[1][1]) < NEAR_TIE, (name, at, best)
            num += 1
    TALLY.update(
        comparisons=1,
        ties=num,
        sequences=len(expected),
        tokens=sum(len(answer.tokens) for answer in expected.values()),
    )
    return num
