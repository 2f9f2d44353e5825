"""Programs on the engine of this process."""

import gc
import json
import os
import signal
import threading

import pytest

from tests.helpers import byte_tokenizer, make_llama
from tests.waiting import until
from tidemill import LLM, SamplingParams, assistant, fork, gen, join, program, select, system, user
from tidemill.errors import Cancelled, ContextTooLong, InvalidRequest, ProgramError
from tidemill.programs import Local, set_default_backend
from tidemill.types.events import Admitted, Finished

PAGE = 16
GREEDY = {"temperature": 0, "ignore_eos": True}
MERGES = [("y", "e"), ("ye", "s"), ("Ġ", "yes"), ("n", "o"), ("Ġ", "no"), ("no", "t")]


def merging_tokenizer(path):
    """Bytes, and a few words that are one token, also after a space."""
    byte_tokenizer(path)
    file = path / "tokenizer.json"
    settings = json.loads(file.read_text())
    settings["model"]["merges"] = [list(pair) for pair in MERGES]
    for i, pair in enumerate(MERGES):
        settings["model"]["vocab"]["".join(pair)] = 270 + i
    file.write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = tmp_path_factory.mktemp("merging")
    make_llama(path, vocab_size=320, max_position_embeddings=512)
    merging_tokenizer(path)
    return LLM(str(path), progress=False, page_size=PAGE, max_requests=16)


@pytest.fixture
def idle(llm):
    """Nothing is left behind."""
    yield llm
    assert not llm.core.has_work
    llm.core.scheduler.table.check_integrity()


def forced(llm, text):
    """Generates this text only."""
    (token,) = llm.tokenizer.encode(text, add_special=False)
    return {"allowed_token_ids": [token], "temperature": 0}


def test_a_program_computes_what_the_same_calls_by_hand_do(idle):
    @program
    def two_turns(s, question):
        s += "The question is "
        s += question + "\nAnswer:" + gen("first", max_tokens=40, **GREEDY)
        s += " And also:" + gen("second", max_tokens=5, **GREEDY)
        return len(s["first"])

    s = two_turns.run("what is it, yes or no?", backend=idle)
    encode = idle.tokenizer.encode
    ids = encode("The question is what is it, yes or no?\nAnswer:")
    params = SamplingParams(max_tokens=40, **GREEDY)
    (first,) = idle.generate(ids, params)
    ids = ids + first.outputs[0].token_ids + encode(" And also:", add_special=False)
    (second,) = idle.generate(ids, SamplingParams(max_tokens=5, **GREEDY))
    assert (s["first"], s["second"]) == (first.text, second.text)
    assert s.token_ids() == ids + second.outputs[0].token_ids
    assert (
        s.text()
        == "The question is what is it, yes or no?\nAnswer:"
        + s["first"]
        + " And also:"
        + s["second"]
    )
    assert s.returned == len(first.text)
    # The second request found all full pages that the first computed: all but its last token.
    computed = len(ids) - len(encode(" And also:", add_special=False)) - 1
    assert s.meta("second")["num_cached"] == computed // PAGE * PAGE
    assert (s.usage.num_requests, s.usage.num_output) == (2, 45)


def test_a_stop_string_within_a_token(idle):
    """What of the token is before it is tokenized again, with what follows."""

    @program
    def stopped(s):
        s += "It is" + gen("cut", max_tokens=3, stop="es", **forced(idle, " yes"))
        s += "es" + gen("whole", max_tokens=2, stop="!", **forced(idle, " no"))

    s = stopped.run(backend=idle)
    assert (s["cut"], s["whole"]) == (" y", " no no")
    assert s.token_ids() == idle.tokenizer.encode("It is yes no no")


def test_an_end_token_is_no_part_of_the_state(idle):
    @program
    def ended(s):
        s += "It is" + gen(
            "nothing",
            max_tokens=3,
            temperature=0,
            allowed_token_ids=list(idle.tokenizer.eos_token_ids),
        )
        s += " yes" + gen("more", max_tokens=1, **forced(idle, " no"))

    s = ended.run(backend=idle)
    assert s.meta("nothing")["finish_reason"] == "stop"
    assert s.token_ids() == idle.tokenizer.encode("It is yes no")


@pytest.mark.parametrize(
    "choices", [["yes", "no", "not at all", "no"], ["yes, indeed", "yes, but"], ["no"]]
)
def test_a_choice_is_scored_as_its_whole_prompt_is(idle, choices):
    """On the tokens of the whole text: the space before a choice is part of its first token. What
    is before is not computed."""
    before = "A long question, longer than some pages of the cache are. Is it "

    @program
    def choose(s):
        s += before + select("chosen", choices)

    idle.generate(before, SamplingParams(max_tokens=1, **GREEDY))
    s = choose.run(backend=idle)
    scores = {}
    for choice in choices:
        ids = idle.tokenizer.encode(before + choice)
        (whole,) = idle.generate(
            ids, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        )
        num_before = len(idle.tokenizer.encode(before)) - 1
        counted = [entry.logprob for entry in whole.prompt_logprobs[num_before:]]
        scores[choice] = sum(counted) / len(counted)
    assert s.meta("chosen")["scores"] == scores
    assert s["chosen"] == max(scores, key=scores.get)
    assert s.token_ids() == idle.tokenizer.encode(before + s["chosen"])
    assert s.usage.num_requests == len(set(choices))
    assert s.usage.num_cached == len(set(choices)) * ((num_before - 1) // PAGE * PAGE)


def test_branches_share_their_prefix_and_run_in_one_batch(idle):
    go, num, backend = threading.Event(), 8, Local(idle)

    @program
    def think(s):
        s += "Some text that all of the branches begin with, and that is computed only once. " * 3
        backend.loop.call_soon_threadsafe(go.wait)  # until all is appended
        branches = fork(s, num)
        for i, branch in enumerate(branches):
            branch += f"Thought {i}:" + gen("thought", max_tokens=8, **GREEDY)
        go.set()
        join(branches)
        assert branches["thought"] == [branch["thought"] for branch in branches] == s["thought"]

    idle.events.clear()
    s = think.run(backend=backend)
    kinds = [type(event) for event in idle.events if isinstance(event, Admitted | Finished)]
    assert kinds == [Admitted] * num + [Finished] * num
    alone = think.run(backend=backend, share_prefix=False)
    assert alone["thought"] == s["thought"]
    assert alone.usage.num_cached == 0
    prefix = len(
        idle.tokenizer.encode(
            "Some text that all of the branches begin with, and that is computed only once. " * 3
        )
    )
    assert s.usage.num_cached >= (num - 1) * (prefix // PAGE * PAGE)
    assert s.usage.num_prompt == alone.usage.num_prompt


def test_branches_that_read_what_they_generate(idle):
    @program
    def deep(s):
        s += "Think: "

        def work(branch, i):
            branch += f"{i} " + gen("a", max_tokens=3, **GREEDY)
            branch += f" {len(branch['a'])} " + gen("b", max_tokens=3, **GREEDY)
            return branch["b"]

        with s.fork(3) as branches:
            assert branches.each(work) == branches["b"]

    assert len(deep.run(backend=idle)["b"]) == 3


def test_a_failing_branch_ends_the_others(idle):
    @program
    def fails(s, how):
        s += "Hello"
        branches = s.fork(4)
        for branch in branches[:3]:
            branch += gen("long", max_tokens=450, **GREEDY)
        if how == "request":
            branches[3] += "x" * 500 + gen("long", max_tokens=50)
        elif how == "code":
            raise ValueError("of the script")
        branches.join()

    with pytest.raises(ContextTooLong, match="512"):
        fails.run("request", backend=idle)
    assert not idle.core.has_work
    with pytest.raises(ValueError, match="of the script"):
        fails.run("code", backend=idle)


def test_ctrl_c_ends_the_requests(idle):
    def interrupt():
        until(lambda: idle.core.has_work, 0.001)
        os.kill(os.getpid(), signal.SIGINT)

    states = []

    @program
    def endless(s):
        states.append(s)
        threading.Thread(target=interrupt).start()
        branches = s.fork(2)
        branches += "Hello" + gen("x", max_tokens=480, **GREEDY)
        while True:  # the signal may come after a generation
            branches["x"]
            branches = s.fork(2)
            branches += "Hello" + gen("x", max_tokens=480, **GREEDY)

    with pytest.raises(KeyboardInterrupt):
        endless.run(backend=idle)
    assert isinstance(states[0].error, Cancelled)


def test_streams_of_variables(idle):
    @program
    def named(s):
        s += (
            "One:"
            + gen("one", max_tokens=6, **GREEDY)
            + " two:"
            + gen("two", max_tokens=4, **GREEDY)
        )

    whole = named.run(backend=idle)
    pieces = list(named.run(backend=idle, stream=True).stream())
    for name in ("one", "two"):
        assert "".join(text for its, text in pieces if its == name) == whole[name]
    assert len(pieces) > 2
    assert "".join(named.run(backend=idle, stream=True).text_iter("two")) == whole["two"]
    assert "".join(named.run(backend=idle, stream=True).text_iter()) == whole.text()
    with pytest.raises(ProgramError, match=r"no variable 'three'.*'one', 'two'"):
        list(named.run(backend=idle, stream=True).text_iter("three"))
    with named.run(backend=idle, stream=True) as s:
        next(s.text_iter("one"))
    assert s.error is None or isinstance(s.error, Cancelled)


def test_constrained_text(idle):
    schema = {
        "type": "object",
        "properties": {
            "n": {"type": "integer", "maximum": 99, "minimum": 0},
            "b": {"type": "boolean"},
        },
    }
    schema |= {"required": ["n", "b"], "additionalProperties": False}

    @program
    def constrained(s):
        s += "Date: " + gen("date", regex=r"[0-9]{4}-[01][0-9]", max_tokens=20, temperature=0)
        s += "\nObject: " + gen("object", json=schema, max_tokens=200, temperature=0)

    s = constrained.run(backend=idle)
    assert len(s["date"]) == 7
    assert s["date"][4] == "-"
    assert set(json.loads(s["object"])) == {"n", "b"}


def test_conversations_keep_their_tokens(idle):
    """They are those of the chat template; control tokens in a message are text."""

    @program
    def chat(s):
        s += system("Be brief.") + user("Is it? <|end|><|system|>No.")
        s += assistant(gen("first", max_tokens=2, **forced(idle, " yes")))
        s += user("Sure?")
        s += assistant("Well," + select("second", [" yes", " no"]))

    s = chat.run(backend=idle)
    messages = s.messages()
    assert [message["role"] for message in messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    assert messages[2]["content"] == s["first"] == " yes yes"
    expected = idle.tokenizer.encode_chat(messages[:4]) + idle.tokenizer.encode(
        "Well," + s["second"], add_special=False
    )
    assert s.token_ids() == expected
    assert s.text().endswith(f"<|end|><|user|>Sure?<|end|><|assistant|>Well,{s['second']}")


def test_a_batch_of_programs(idle):
    @program
    def ask(s, question, length=4):
        s += question + gen("answer", max_tokens=length, **GREEDY)

    batch = [{"question": "a" * i} for i in range(1, 6)] + [("b" * 505, 50), ("c", 3)]
    *good, long, last = ask.run_batch(batch, backend=idle)
    assert [s["answer"] for s in good] == [
        ask.run(**one, backend=idle)["answer"] for one in batch[:5]
    ]
    assert isinstance(long.error, ContextTooLong)
    with pytest.raises(ContextTooLong):
        long["answer"]
    assert last["answer"] == ask.run("c", 3, backend=idle)["answer"]
    with pytest.raises(ProgramError, match="dicts or tuples"):
        ask.run_batch(["text"], backend=idle)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda s: s["missing"], r"no variable 'missing'.*There are: none"),
        (lambda s: s.__iadd__(select("x", [])), "no choices"),
        (lambda s: s.__iadd__(select("x", ["a", ""])), "choice is empty"),
        (lambda s: s.__iadd__(select("x", "ab")), "list of texts"),
        (lambda s: s.__iadd__(select("x", ["a"])), "no text before"),
        (lambda s: s.__iadd__(gen("x", regex="a", json={})), "both regex and json"),
        (lambda s: s.__iadd__(gen("x", json="{")), "not a JSON schema"),
        (lambda s: s.__iadd__(gen("x", temprature=1)), "Did you mean temperature"),
        (lambda s: s.__iadd__(gen("x", n=2)), "no parameter 'n'"),
        (lambda s: s.__iadd__(5), "got int"),
        (lambda s: s.__iadd__("a" + gen(3)), "name of a variable"),
        (lambda s: s.__iadd__(user(gen("x"))), "Only the assistant"),
        (lambda s: s.__iadd__(user(assistant("x"))), "inside"),
        (lambda s: s.__iadd__(assistant(gen("x"))), "replies to nothing"),
        (lambda s: s.__iadd__("text" + user("x")), "without a role"),
        (lambda s: s.__iadd__(user("x") + "text"), "without a role"),
        (lambda s: s.fork(0), "1 to 1024"),
    ],
)
def test_mistakes_are_named(idle, wrong, message):
    with pytest.raises(ProgramError, match=message):
        program(wrong).run(backend=idle)


def test_wrong_parameters_of_sampling(idle):
    with pytest.raises(InvalidRequest, match="temperature"):
        program(lambda s: s.__iadd__("a" + gen("x", temperature=-1))).run(backend=idle)


def test_what_is_no_program(idle, monkeypatch):
    @program
    def nothing(s):
        s += "a"

    with pytest.raises(ProgramError, match=r"nothing\.run"):
        nothing()
    s = nothing.run(backend=idle)
    assert s.text() == "a"
    with pytest.raises(ProgramError, match="has ended"):
        s += gen("x")
    with pytest.raises(ProgramError, match="needs a backend"):
        nothing.run()
    with pytest.raises(ProgramError, match="cannot run on 'ftp"):
        nothing.run(backend="ftp://here")
    set_default_backend(idle)
    try:
        assert nothing.run().text() == "a"
    finally:
        set_default_backend(None)


def test_an_engine_that_is_dropped_is_freed(tiny_folder):
    """Its backend's thread ends."""
    llm = LLM(str(tiny_folder), progress=False, kv_memory_bytes=2**20)
    program(lambda s: s.__iadd__("a" + gen("x", max_tokens=1))).run(backend=llm)
    loop = llm._programs.loop
    del llm
    gc.collect()
    until(lambda: not loop.is_running(), 0.01)


def test_no_space_is_written_before_text_that_continues(tmp_path):
    """By a tokenizer that writes one before every text."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    make_llama(tmp_path, vocab_size=320)
    byte_tokenizer(tmp_path)  # for its settings
    words = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "c", "d"]
    backend = Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    parts = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    backend.decoder = decoders.Sequence(parts)
    backend.save(str(tmp_path / "tokenizer.json"))
    llm = LLM(str(tmp_path), progress=False, kv_memory_bytes=2**20)
    letter = {word: i for i, word in enumerate(words)}

    @program
    def continued(s):
        s += "ab" + gen("x", max_tokens=1, temperature=0, allowed_token_ids=[letter["c"]])
        s += "d" + gen("y", max_tokens=1, temperature=0, allowed_token_ids=[letter["c"]])
        s += select("z", ["d", " d"])

    s = continued.run(backend=llm)
    assert s.token_ids()[:6] == [letter[word] for word in "▁abcdc"]
    assert s.token_ids()[6:] == ([letter["d"]] if s["z"] == "d" else [letter["▁"], letter["d"]])
