"""A judge with branches: an essay is read once, graded on several dimensions at once, and the
grades are summed up.

python examples/judge.py [--model MODEL | --url URL]
"""

from __future__ import annotations

from collections.abc import Sequence

from measure import backend_of, compare

from tidemill import gen, join, program, select
from tidemill.programs import State

ESSAY = """The sea rises and falls twice a day, and for more than a thousand years people have used it to grind their
grain. A tide mill needs a bay that can be closed with a dam. At high water the gates close by themselves, and
the pond behind them keeps its level while the sea goes down. Then the miller opens the sluice. The work is
hard in another way than that of other millers: the hours follow the moon, and so he must often rise in the
night. But the tide never fails him, while rivers dry up in summer and winds are still. Some say that the
first of these mills stood in Ireland, where two wooden wheels were found in the mud, cut in the year 619.
When steam came, most of them were given up. Today, some are run again, and visitors can buy the flour.
"""
DIMENSIONS = ("clarity", "evidence", "style", "structure")
GRADES = [" poor", " fair", " good", " excellent"]


@program
def judge(s: State) -> None:
    s += "Read this essay.\n\n" + ESSAY + "\n"
    branches = s.fork(len(DIMENSIONS))
    for dimension, branch in zip(DIMENSIONS, branches, strict=True):
        branch += f"A remark on its {dimension}:" + gen(
            "remark", max_tokens=32, temperature=0, stop="\n"
        )
        branch += f"\nIts {dimension} is" + select("grade", GRADES)
    join(branches)
    for dimension, grade in zip(DIMENSIONS, s["grade"], strict=True):
        s += f"{dimension}:{grade}\n"
    s += "In one sentence:" + gen("verdict", max_tokens=40, temperature=0, stop="\n")


def main(given: Sequence[str] | None = None) -> None:
    state = compare(judge, backend_of(__doc__ or "", given))
    for dimension, grade, remark in zip(DIMENSIONS, state["grade"], state["remark"], strict=True):
        print(f"{dimension}:{grade} ({remark.strip()})")
    print("verdict:", state["verdict"].strip())


if __name__ == "__main__":
    main()
