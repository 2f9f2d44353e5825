"""Which exit drafts come from: simulated drafts that are right with known chances."""

import random
from collections import Counter

from tidemill.runner.spec.bandit import ExitBandit

DRAFTS, STEPS = [0.1, 0.2, 0.35], [1.0, 1.1, 1.2, 1.3]


def play(bandit, chances, rounds, seed=1):
    """The chains of these rounds."""
    world, chains = random.Random(seed), []
    for _ in range(rounds):
        chains.append(tuple(bandit.plan(len(chances))))
        for number, exit_ in enumerate(chains[-1]):
            is_right = world.random() < chances[number][exit_]
            bandit.add(number, exit_, is_right)
            if not is_right:
                break
    return chains


def test_it_settles_on_the_chain_with_the_most_tokens_a_second():
    # By hand: exit 1 twice gives (1 + 0.75 + 0.53) / (1 + 0.3 + 0.3) = 1.42; a third draft would
    # give 2.44 / 1.9 = 1.28, one alone 1.75 / 1.3 = 1.35, exit 2 twice (1 + 0.8 + 0.6) / 1.9 =
    # 1.26.
    chances = [[0.3, 0.75, 0.8], [0.2, 0.7, 0.75], [0.1, 0.3, 0.35]]
    chains = play(ExitBandit(DRAFTS, STEPS), chances, 2000)
    assert Counter(chains[-400:]).most_common(1)[0][0] == (1, 1)
    assert Counter(chains[-400:])[1, 1] > 280
    assert {exit_ for chain in chains[:200] for exit_ in chain} == {0, 1, 2}


def test_a_deeper_exit_is_worth_it_where_drafts_are_cheap():
    chances = [[0.3, 0.6, 0.9]]
    assert Counter(play(ExitBandit([0.01, 0.02, 0.03], STEPS), chances, 1000)[-200:]).most_common(
        1
    )[0][0] == (2,)
    assert Counter(play(ExitBandit([0.1, 0.2, 3.0], STEPS), chances, 1000)[-200:]).most_common(1)[
        0
    ][0] == (1,)


def test_no_drafts_where_none_pays_and_still_a_trial_now_and_then():
    chains = play(ExitBandit([0.4, 0.5, 0.6], [1.0, 1.4, 1.8]), [[0.1, 0.1, 0.1]] * 3, 2000)
    late = chains[-1000:]
    assert late.count(()) > 800
    assert any(late)


def test_it_follows_a_change():
    bandit = ExitBandit([0.1, 0.1], STEPS)
    play(bandit, [[0.9, 0.2]], 1500)
    assert Counter(play(bandit, [[0.2, 0.9]], 4000)[-300:]).most_common(1)[0][0] == (1,)


def test_the_same_seed_gives_the_same_chains_and_no_draft_goes_deeper_than_the_one_before():
    chances = [[0.5, 0.6, 0.7]] * 4
    runs = [play(ExitBandit(DRAFTS, STEPS, seed), chances, 200) for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]
    assert all(list(chain) == sorted(chain, reverse=True) for chain in runs[0])
