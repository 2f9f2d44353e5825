"""Draft heads of a tiny model: trained by the command, resumed, read, refused, and run."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tests.helpers import greedy, load_model, make_core
from tests.helpers import run as engine_run
from tidemill import LLM, SamplingParams
from tidemill.cli.main import app
from tidemill.compress.draft.cost import Costs, acceptance, speed
from tidemill.compress.draft.losses import Batch, Drafted, guesses
from tidemill.compress.draft.run import Stopped, TrainOptions, train_draft
from tidemill.compress.draft.states import batch_of, hidden_states
from tidemill.compress.draft.text import Example, TextFile, read_text, write_text
from tidemill.engine.parts.drafting import Drafting
from tidemill.errors import ConfigError, DraftError
from tidemill.runner.spec.choose import Chain, Chooser, Seen
from tidemill.runner.spec.drafters import make_drafter
from tidemill.runner.spec.heads import KINDS, Cache, Target, new_head
from tidemill.runner.spec.ranks import Ranks
from tidemill.runner.spec.stored import SETTINGS, WEIGHTS, load_draft, load_exits, save_draft
from tidemill.sched.tree import Tree, ancestors_of

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def llm(tiny_folder):
    return LLM(str(tiny_folder), progress=False, threads=1, max_requests=32)


@pytest.fixture(scope="module")
def text(llm, tmp_path_factory):
    """What the model writes, once for all tests."""
    file = TextFile(tmp_path_factory.mktemp("text") / "text.jsonl", "tiny")
    write_text(llm, file, 1000, 0, lambda _: None)
    return file.path


class Losses:
    def __init__(self):
        self.values = []

    def stage(self, name, total):
        pass

    def at(self, done, note=""):
        if note.startswith("loss") and "nan" not in note:
            self.values.append(float(note.split()[1]))


def run(llm, text, out, kind, stop_after=None, **more):
    """`stop_after`: steps."""
    losses = Losses()
    options = TrainOptions(
        model="",
        kind=kind,
        out=out,
        data=text,
        num_tokens=1000,
        num_epochs=2,
        vocab_size=128,
        **more,
    )
    stopped = lambda: stop_after is not None and len(losses.values) >= stop_after  # noqa: E731
    return train_draft(options, llm, losses, stopped), losses.values


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_gives_the_bits_of_an_uninterrupted_one(llm, text, tmp_path, kind):
    measured, losses = run(llm, text, tmp_path / "one", kind)
    with pytest.raises(Stopped):
        run(llm, text, tmp_path / "two", kind, stop_after=2)
    _, rest = run(llm, text, tmp_path / "two", kind)
    assert losses[-len(rest) :] == rest
    assert len(rest) == len(losses) - 2 if kind != "exit" else len(rest) < len(losses)
    one, two = (load_file(tmp_path / name / WEIGHTS) for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not (tmp_path / "one" / "work").exists()
    assert (
        json.loads((tmp_path / "one" / SETTINGS).read_text())["acceptance"]
        == measured["acceptance"]
    )


def test_losses_fall(llm, text, tmp_path):
    _, losses = run(llm, text, tmp_path, "eagle")
    assert losses[-1] < losses[0]


def test_text_goes_on_where_it_ended(llm, text, tmp_path):
    file = TextFile(tmp_path / "text.jsonl", "tiny")
    whole = text.read_bytes()
    file.path.write_bytes(whole[: len(whole) // 2])
    kept = len(file.read())
    assert 0 < kept < len(TextFile(text, "tiny").read())
    assert (
        write_text(llm, file, 1000, 0, lambda _: None)[:kept]
        == TextFile(text, "tiny").read()[:kept]
    )


def test_texts_of_files(llm, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"text": "%s"}\n\n{"messages": [{"role": "user", "content": "how are you?"}]}\n'
        % ("ab" * 150)
    )
    made = read_text(llm, path, 10_000, 100)
    assert [len(one.ids) for one in made][:3] == [100, 100, 100]
    assert made[0] == Example(llm.tokenizer.encode("ab" * 150)[:100])
    with pytest.raises(ConfigError, match="another model"):
        TextFile(path, "tiny").read()
    for wrong, message in (
        ("{", "Line 1"),
        ('{"a": 1}', "no text"),
        ('{"ids": [99999]}', "another model"),
        ("[]", "object"),
    ):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match=message):
            read_text(llm, path, 100, 100)
    with pytest.raises(ConfigError, match="neither"):
        read_text(llm, tmp_path / "a.bin", 100, 100)


@pytest.fixture(scope="module")
def eagle(llm, text, tmp_path_factory):
    out = tmp_path_factory.mktemp("eagle")
    run(llm, text, out, "eagle")
    return out


def _change(folder, tensors=None, settings=None):
    stored = load_file(folder / WEIGHTS)
    save_file(
        {name: value for name, value in (stored | (tensors or {})).items() if value is not None},
        folder / WEIGHTS,
    )
    said = json.loads((folder / SETTINGS).read_text())
    (folder / SETTINGS).write_text(json.dumps(said | (settings or {})))


@pytest.mark.parametrize(
    ("tensors", "settings", "message"),
    [
        ({"qkv.weight": torch.zeros(3, 3)}, {}, r"qkv.weight has shape \[3, 3\]"),
        ({"norm": None}, {}, "norm is missing"),
        ({"norm": torch.full((64,), torch.inf)}, {}, "norm holds values"),
        ({"more": torch.zeros(1)}, {}, "more has no place"),
        ({"norm": torch.zeros(64, dtype=torch.int32)}, {}, "norm has type I32"),
        ({"draft_ids": torch.tensor([3, 2], dtype=torch.int32)}, {}, "draft_ids"),
        ({"draft_ids": torch.tensor([3, 2**20], dtype=torch.int32)}, {}, "draft_ids"),
        ({}, {"kind": "hydra"}, "kind 'hydra'"),
        ({}, {"settings": {"num_heads": 10**9, "intermediate_size": 1, "window": 1}}, "num_heads"),
        (
            {},
            {"settings": {"num_heads": 1, "intermediate_size": 7, "window": 1}},
            "down.weight has shape",
        ),
        ({}, {"model": {"hidden_size": 65}}, "hidden_size 65"),
        ({}, {"format": 2}, "format"),
        ({}, {"acceptance": "all"}, "acceptance"),
        ({}, {"draft_cost": 0}, "draft_cost"),
        ({}, {"step_costs": [1.0, "2"]}, "step_costs"),
    ],
)
def test_files_that_do_not_fit_are_refused(llm, eagle, tmp_path, tensors, settings, message):
    shutil.copytree(eagle, tmp_path, dirs_exist_ok=True)
    _change(tmp_path, tensors, settings)
    with pytest.raises(DraftError, match=message):
        load_draft(tmp_path, llm.core.runner.model)


def test_truncated_files_are_refused(llm, eagle, tmp_path):
    model = llm.core.runner.model
    assert load_draft(eagle, model, "eagle").note == ""
    with pytest.raises(DraftError, match="of the kind eagle"):
        load_draft(eagle, model, "medusa")
    shutil.copytree(eagle, tmp_path, dirs_exist_ok=True)
    data = (tmp_path / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(data[: len(data) // 2])
    with pytest.raises(DraftError, match="corrupt or truncated"):
        load_draft(tmp_path, model)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(DraftError, match="hold no draft"):
        load_draft(tmp_path, model)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("medusa", {"num_heads": 3}), ("eagle", {"window": 16}), ("exit", {"layer": 2})],
)
def test_a_drafter_drafts_what_its_head_guesses_along_the_text(llm, kind, settings):
    """Step by step with rings and pages, as along a whole text in training. 8-bit weights may turn
    near-ties."""
    runner, num = llm.core.runner, 80
    model, ids = (
        runner.model,
        torch.randint(2, 250, (num,), generator=torch.Generator().manual_seed(0)).tolist(),
    )
    states = hidden_states(runner, ids, 3)
    torch.manual_seed(1)
    head = new_head(kind, 64, settings).requires_grad_(False)
    for value in head.parameters():
        value += torch.randn_like(value) * 0.3
    target = Target(model, torch.arange(0, 256, 2))
    inputs = hidden_states(runner, ids, 2) if kind == "exit" else states
    made = guesses(
        head,
        target,
        Batch(
            torch.tensor([ids]), states[None], inputs[None], torch.ones(1, num, dtype=torch.bool)
        ),
        1,
    )
    expected = target.ids_D[target.logits(made[0][1][0]).argmax(-1)].tolist()
    drafter = make_drafter(head, target, runner, 0.0)
    with torch.inference_mode():
        runner.forward(batch_of(runner, ids))
    seen, right = 0, []
    for known in (2, 3, 5, 9, 30, *range(31, 60), 78):
        drafter.observe(
            [Seen(0, seen, range(known - 1 - seen), ids[seen + 1 : known])],
            states[seen : known - 1],
        )
        seen = known - 1
        chain = Chain(0, GREEDY, ids[:known], 1, 1, [])
        drafter.propose([chain])
        if kind == "exit" and known % 16 == 1:
            assert chain.drafts == []  # the next token may have no page yet
        else:
            right.append(chain.drafts == [expected[known - (1 if kind == "exit" else 2)]])
    assert sum(right) >= len(right) - 3


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_without_drafts(llm, tiny_folder, text, tmp_path, kind):
    """Among others, chunked, with a prefix from the cache; whatever the heads guess."""
    run(llm, text, tmp_path, kind, num_guesses=1, **({"exit_layer": 2} if kind == "exit" else {}))
    _change(tmp_path, settings={"least_probability": 0.0})
    options = {"token_budget": 24, "max_requests": 4, "adaptive_drafts": False, "max_drafts": 3}
    model = load_model(tiny_folder)
    drafted = make_core(model, speculate=kind, draft_heads=str(tmp_path), **options)
    plain = make_core(model, speculate="off", token_budget=24, max_requests=4)
    prompt = [(i * i) % 97 + 3 for i in range(40)]
    params = {
        "greedy": greedy(24, logprobs=2),
        "seeded": SamplingParams(temperature=0.9, top_p=0.95, max_tokens=24, seed=7, n=2),
        "adjusted": SamplingParams(
            temperature=0.5, repetition_penalty=1.3, max_tokens=24, seed=-7, min_tokens=9
        ),
    }
    asked = {name: (prompt, one) for name, one in params.items()}
    expected = engine_run(plain, asked)
    drafter, nums = drafted.part(Drafting).drafters[0], []
    propose = drafter.propose
    drafter.propose = lambda asks: [nums.append(len(made)) or made for made in propose(asks)]
    for _ in range(2):  # the second time, the prompt is in the cache
        assert engine_run(drafted, asked) == expected
        assert sum(nums) > 50
        nums.clear()


def test_exits_chosen_by_a_bandit(llm, tiny_folder, tmp_path):
    """Tokens are those without drafts; both exits are tried, what came of them is learned, and a
    run repeats itself."""
    target = Target(llm.core.runner.model, torch.arange(256))
    for layer in (2, 1):
        torch.manual_seed(layer)
        about = {
            "least_probability": 0.0,
            "draft_cost": 0.05 * layer,
            "step_costs": [1.0, 1.05, 1.1, 1.15],
        }
        save_draft(
            tmp_path / f"exit-{layer}", new_head("exit", 64, {"layer": layer}), target, about
        )
    model = load_model(tiny_folder)
    made = []
    for _ in range(2):
        core = make_core(
            model,
            speculate="exit-bandit",
            draft_heads=str(tmp_path),
            adaptive_drafts=False,
            max_drafts=3,
        )
        inner = core.part(Drafting).drafters[0]._inner
        tried = []
        add = inner._bandit.add
        inner._bandit.add = lambda *result, add=add, tried=tried: (
            tried.append(result) or add(*result)
        )
        prompt = [(i * i) % 97 + 3 for i in range(40)]
        sampled = SamplingParams(temperature=0.9, max_tokens=40, seed=7)
        asked = {"greedy": (prompt, greedy(40, logprobs=2)), "seeded": (prompt[3:], sampled)}
        assert engine_run(core, asked) == engine_run(make_core(model, speculate="off"), asked)
        assert {exit_ for _, exit_, _ in tried} == {0, 1}
        assert {is_right for _, _, is_right in tried} == {False, True}
        made.append(tried)
    assert made[0] == made[1]
    (tmp_path / "exit-2" / SETTINGS).unlink()
    with pytest.raises(DraftError, match="1 exits to choose from"):
        make_core(model, speculate="exit-bandit", draft_heads=str(tmp_path))


@pytest.mark.slow
def test_all_exits_are_kept_and_the_fastest_by_measurement_is_the_folders_own(
    llm, text, tmp_path, monkeypatch
):
    monkeypatch.setattr("tidemill.compress.draft.run._exit_layers", lambda *_: [1, 2])
    measured, _ = run(llm, text, tmp_path, "exit")
    speeds = measured["speed_by_exit_layer"]
    assert speeds.keys() == {"1", "2"}
    assert measured["speed"] == speeds[str(measured["settings"]["layer"])] == max(speeds.values())
    exits = load_exits(tmp_path, llm.core.runner.model)
    assert [one.head.settings["layer"] for one in exits] == [1, 2]
    assert all(one.draft_cost > 0 and len(one.step_costs) > 1 for one in exits)


def test_ranks_of_candidates_shape_the_tree():
    ranks = Ranks(2)
    for _ in range(200):
        ranks.add(0, 0)
        ranks.add(0, 1)
        ranks.add(1, 2)
    shape, chances = ranks.shape(4)
    assert shape == [(-1, 0), (-1, 1), (0, 2), (1, 2)]
    assert chances == sorted(chances, reverse=True)
    assert chances[0] == pytest.approx(0.5, abs=0.05)
    for _ in range(3000):
        ranks.fade()
    assert ranks.chance(1, 2) == pytest.approx(Ranks(2).chance(1, 2), abs=0.01)


def test_medusa_drafts_trees_where_it_may(llm, tiny_folder, tmp_path):
    """A right token of a lower rank is found; requests whose draws look at the tokens before get
    chains."""
    target = Target(llm.core.runner.model, torch.arange(256))
    save_draft(tmp_path, new_head("medusa", 64), target, {"least_probability": 0.0})
    model, prompt = load_model(tiny_folder), [(i * i) % 97 + 3 for i in range(40)]
    core = make_core(
        model, speculate="medusa", draft_heads=str(tmp_path), adaptive_drafts=False, max_drafts=12
    )
    drafter, made = core.part(Drafting).drafters[0], []
    propose = drafter.propose
    drafter.propose = lambda asks: [
        made.append((ask.params, drafts)) or drafts
        for ask, drafts in zip(asks, propose(asks), strict=True)
    ]
    asked = {
        "greedy": (prompt, greedy(40, logprobs=1)),
        "seeded": (prompt[2:], SamplingParams(temperature=0.8, seed=5, max_tokens=40)),
        "penalized": (prompt[4:], greedy(20, repetition_penalty=1.2)),
    }
    assert engine_run(core, asked) == engine_run(make_core(model, speculate="off"), asked)
    kinds = {(params.has_penalties, isinstance(drafts, Tree)) for params, drafts in made if drafts}
    assert kinds == {(True, False), (False, True)}
    assert max(len(drafts) for _, drafts in made) == 12
    assert any(
        drafts.parents != list(range(-1, len(drafts) - 1))
        for _, drafts in made
        if isinstance(drafts, Tree)
    )


def test_an_eagle_tree_has_the_guesses_of_every_path(llm):
    """What the head makes of a path in training is what stands after it in the tree; 8-bit weights
    may turn near-ties."""
    runner, num = llm.core.runner, 30
    torch.manual_seed(1)
    head = new_head("eagle", 64).requires_grad_(False)
    for value in head.parameters():
        value += torch.randn_like(value) * 0.3
    target = Target(runner.model, torch.arange(0, 256, 2))
    ids, states = torch.randint(2, 250, (num,)).tolist(), torch.randn(num - 1, 64)
    drafter = make_drafter(head, target, runner, 0.0, trees=True)
    drafter.observe([Seen(0, 0, range(num - 1), ids[1:])], states)
    chain = Chain(0, GREEDY, ids, 1, 10, [])
    drafter.propose([chain])
    tree, same = chain.tree, []
    assert len(tree) == 10
    assert tree.depth >= 3
    assert len(set(tree.parents)) > 3
    shape = drafter._ranks.shape(10)[0]
    for draft in range(10):
        cache, path = Cache(), ancestors_of(tree.parents, draft)[:-1]
        made = head(target.embed(torch.tensor([ids[1:]])), states[None], cache)
        for before in path:
            made = head(
                target.embed(torch.tensor([[tree.tokens[before]] * (num - 1)])), made, cache
            )
        best = target.ids_D[target.logits(made[0, -1]).topk(4).indices].tolist()
        same.append(best[shape[draft][1]] == tree.tokens[draft])
    assert sum(same) >= 8
    # it was right, and is learned from
    drafter.observe([Seen(0, num - 1, [0], [tree.tokens[0]])], states)
    assert drafter._ranks.chance(0, 0) > Ranks(1).chance(0, 0)


def test_eagle_trees_change_nothing(tiny_folder, llm, tmp_path):
    torch.manual_seed(2)
    head = new_head("eagle", 64).requires_grad_(False)
    save_draft(
        tmp_path, head, Target(llm.core.runner.model, torch.arange(256)), {"least_probability": 0.0}
    )
    model = load_model(tiny_folder)
    core = make_core(
        model,
        speculate="eagle-tree",
        draft_heads=str(tmp_path),
        adaptive_drafts=False,
        max_drafts=6,
    )
    prompt = [(i * i) % 97 + 3 for i in range(40)]
    asked = {
        "greedy": (prompt, greedy(16, logprobs=2)),
        "seeded": (prompt[3:], SamplingParams(temperature=0.9, top_p=0.95, max_tokens=16, seed=7)),
        "adjusted": (
            prompt[5:],
            SamplingParams(temperature=0.5, repetition_penalty=1.3, max_tokens=16, seed=-7),
        ),
    }
    drafter, made = core.part(Drafting).drafters[0], []
    propose = drafter.propose
    drafter.propose = lambda asks: made.extend(propose(asks)) or made[-len(asks) :]
    assert engine_run(core, asked) == engine_run(make_core(model, speculate="off"), asked)
    # penalties get chains
    assert {type(drafts) is Tree for drafts in made if drafts} == {True, False}


def test_a_drafter_without_its_heads_is_refused(tiny_folder, eagle):
    model = load_model(tiny_folder)
    with pytest.raises(ConfigError, match="needs --draft-heads: it drafts by trained heads"):
        make_core(model, speculate="eagle")
    for other in ("auto", "ngram", "off"):  # which would not use them
        with pytest.raises(ConfigError, match="--draft-heads needs --speculate medusa or"):
            make_core(model, speculate=other, draft_heads=str(eagle))
    with pytest.raises(DraftError, match="of the kind eagle"):
        make_core(model, speculate="medusa", draft_heads=str(eagle))


def test_a_row_of_which_states_are_missing_gets_no_drafts(llm):
    runner = llm.core.runner
    target, states = Target(runner.model, torch.arange(256)), torch.randn(4, 64)
    for kind in ("medusa", "eagle"):
        drafter = make_drafter(new_head(kind, 64), target, runner, 0.0)
        drafter.observe([Seen(0, 0, range(4), [5, 6, 7, 8])], states)
        chains = [
            Chain(0, GREEDY, [1, 5, 6, 7, 8, 9], 1, 2, []),
            Chain(1, GREEDY, [1, 5], 1, 2, []),
        ]
        drafter.propose(chains)
        assert [chain.drafts for chain in chains] == [[], []]
        drafter.observe([Seen(0, 4, [0], [9])], states)
        drafter.propose(chains)
        assert [len(chain.drafts) for chain in chains] == [2, 0]
        for i in range(200):  # not asked for a long time
            drafter.observe([Seen(0, 5 + i, [0], [i % 250])], states)
        chains[0] = Chain(0, GREEDY, [1] * 206, 1, 1, [])
        drafter.propose(chains)
        assert len(chains[0].drafts) == 1
        drafter.forget(0)
        chains[0].drafts.clear()
        drafter.propose(chains)
        assert chains[0].drafts == []


def test_sampled_drafts_use_the_targets_noise(llm):
    """With the target's own logits, a draft is what the target draws."""
    from tidemill.runner.sampler import Sampler
    from tidemill.runner.state import RowState
    from tidemill.sched.plan import NewRow, StepPlan
    from tidemill.sched.request import RowSpec

    logits, vocab = torch.randn(40, 300, generator=torch.Generator().manual_seed(0)) * 3, 300
    params = [
        SamplingParams(
            temperature=0.7,
            seed=i,
            top_k=(0, 40)[i % 2],
            top_p=(1.0, 0.9)[i // 2 % 2],
            repetition_penalty=1.2,
        )
        for i in range(40)
    ]
    state = RowState(40, 64, 16)
    rows = [NewRow(i, [i, 7, 9, 9], [[1]], RowSpec(one, 2)) for i, one in enumerate(params)]
    state.stage(StepPlan(0, new_rows=rows))
    state.apply()
    expected = Sampler(state).sample(logits.clone(), list(range(40)), [4] * 40).token_ids.tolist()
    chains = [Chain(i, one, [i, 7, 9, 9], 2, 1, []) for i, one in enumerate(params)]
    Chooser(torch.arange(vocab), vocab, 0.0).extend(logits.clone(), chains)
    assert [chain.drafts[0] for chain in chains] == expected
    half = torch.arange(0, vocab, 2)
    for chain in chains:
        chain.drafts.clear()
    Chooser(half, vocab, 0.0).extend(logits[:, half].clone(), chains)
    same = [
        chain.drafts[0] == token
        for chain, token in zip(chains, expected, strict=True)
        if token % 2 == 0
    ]
    assert sum(same) >= 0.8 * len(same)  # the likeliest tokens that make up top_p are others


def test_speeds_are_counted_along_the_text():
    right = torch.tensor([[True, True], [True, False], [False, False], [False, True]])
    probs = torch.tensor([[0.9, 0.9], [0.9, 0.2], [0.1, 0.9], [0.9, 0.9]])
    drafted = [Drafted(right, probs)]
    assert acceptance(drafted) == [0.5, 0.25]
    # Place 0: two drafts, both right, three tokens; place 3: two drafts, none right, one token.
    assert speed(drafted, Costs([1.0, 1.5, 2.0], 0.25), 0.5) == pytest.approx(4 / (2 * (2.0 + 0.5)))
    # Nothing is likely enough: four plain steps, each with a draft made in vain.
    assert speed(drafted, Costs([1.0, 1.5, 2.0], 0.25), 0.95) == pytest.approx(4 / (4 * 1.25))


def test_the_command(tiny_folder, text, tmp_path):
    def invoke(*arguments):
        return CliRunner().invoke(
            app, ["train-draft", str(tiny_folder), "--out", str(tmp_path / "out"), *arguments]
        )

    done = invoke(
        "--kind",
        "exit",
        "--exit-layer",
        "1",
        "--calibration",
        str(text),
        "--samples",
        "10",
        "--seq-len",
        "60",
        "--threads",
        "1",
        "--epochs",
        "1",
        "--vocab",
        "64",
    )
    assert done.exit_code == 0, done.output
    assert "exit heads" in done.output
    assert "Speed here" in done.output
    assert json.loads((tmp_path / "out" / SETTINGS).read_text())["settings"]["layer"] == 1
    for wrong, message in (
        (["--kind", "hydra"], "medusa, eagle, exit"),
        (["--samples", "3", "--seq-len", "16"], "are 48 tokens"),
        (["--guesses", "9"], "--guesses is 9"),
        (["--kind", "eagle", "--exit-layer", "1"], "--exit-layer is of"),
        (["--kind", "exit", "--exit-layer", "3"], "3 layers"),
        (["--out", str(text)], "cannot be written: Not a directory"),
    ):
        with pytest.raises(ConfigError, match=message):
            CliRunner().invoke(
                app, ["train-draft", str(tiny_folder), *wrong], catch_exceptions=False
            )
