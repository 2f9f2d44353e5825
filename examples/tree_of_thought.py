"""Tree of thought: several next steps from each state, each rated by the model; the best ones are
continued.

python examples/tree_of_thought.py [--model MODEL | --url URL]
"""

from __future__ import annotations

from collections.abc import Sequence

from measure import backend_of, compare

from tidemill import gen, program, select
from tidemill.programs import State

PROBLEM = """A village at the coast has a tide mill. Its pond fills while the tide rises and is closed at high water. When
the sea has fallen far enough, the water is let out through the wheel. The miller can grind for about three
hours after each high water, twice a day, and high water comes some fifty minutes later each day. The baker
needs flour from forty sacks of grain every week. The mill grinds two sacks an hour. In summer the pond loses
a fifth of its water before the mill can start, and the mill grinds as much less. The question is whether the
mill grinds enough for the baker in summer, and how many sacks are left over or missing in a week.
"""
RATINGS = {" bad": 0.0, " fair": 0.5, " good": 1.0}
WIDTH, BEST, DEPTH = 4, 2, 2


def think(state: State, index: int) -> float:
    """Append one step of reasoning, and the model's opinion of it."""
    state += f"\nStep, attempt {index + 1}:" + gen(
        "step", max_tokens=24, temperature=0.8, seed=index, stop="\n"
    )
    state += "\nThis step is" + select("rating", list(RATINGS))
    return RATINGS[state["rating"]]


@program
def tree_of_thought(s: State) -> str:
    s += PROBLEM + "Think in short steps."
    leaves = [s]
    for _ in range(DEPTH):
        branches = [leaf.fork(WIDTH) for leaf in leaves]
        rated = [
            (value, branch)
            for group in branches
            for value, branch in zip(group.each(think), group, strict=True)
        ]
        leaves = [branch for _, branch in sorted(rated, key=lambda pair: -pair[0])[:BEST]]
    best = leaves[0]
    best += "\nSo the answer is:" + gen("answer", max_tokens=32, temperature=0, stop="\n")
    return str(best["answer"])


def main(given: Sequence[str] | None = None) -> None:
    backend = backend_of(__doc__ or "", given)
    state = compare(tree_of_thought, backend)
    print("answer:", state.returned.strip())


if __name__ == "__main__":
    main()
