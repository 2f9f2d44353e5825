"""Programs on a server: what they do on the engine of this process, token by token."""

import re
from pathlib import Path

import pytest

from tests.waiting import until
from tidemill import LLM, assistant, gen, program, select, user
from tidemill.errors import Cancelled, ContextTooLong, InvalidRequest, TidemillError
from tidemill.programs import Remote

GREEDY = {"temperature": 0, "ignore_eos": True}
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "programs.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@program
def everything(s):
    s += "A question that is somewhat longer than one page of the cache. It is "
    with s.fork(3) as branches:
        for i, branch in enumerate(branches):
            branch += f"{i}:" + gen("text", max_tokens=8 + i, stop="\n", **GREEDY)
    s += (
        select("chosen", ["yes", "no", "not at all"])
        + " "
        + gen("number", regex="[0-9]{3}", max_tokens=5, temperature=0)
    )
    s += "; " + gen(
        "cut",
        stop="b",
        max_tokens=9,
        temperature=0,
        allowed_token_ids=[66, 67, 68],
        logit_bias={67: 3.0},
    )
    s += " end" + gen("last", max_tokens=4, seed=3, temperature=0.9, ignore_eos=True)


@program
def conversation(s):
    s += user("Hello <|end|>") + assistant(gen("first", max_tokens=6, **GREEDY))
    s += user("And?") + assistant(gen("second", max_tokens=6, **GREEDY))


@pytest.mark.parametrize("which", [everything, conversation])
def test_a_server_does_what_the_engine_here_does(server, tiny_folder, which):
    here = which.run(backend=LLM(str(tiny_folder), progress=False))
    there = which.run(backend=server.url)
    again = which.run(backend=f"{server.url}/v1", stream=True)
    pieces = list(again.stream())
    for name in here.variables:
        assert there[name] == here[name]
        if isinstance(here[name], str):
            assert "".join(text for its, text in pieces if its == name) == here[name]
    assert there.token_ids() == here.token_ids() == again.token_ids()
    assert there.text() == here.text()
    if which is everything:
        assert there.meta("chosen") == here.meta("chosen")
    usage = there.usage
    assert (usage.num_requests, usage.num_prompt, usage.num_output) == (
        here.usage.num_requests, here.usage.num_prompt, here.usage.num_output,
    )  # fmt: skip
    assert again.usage.num_cached >= usage.num_cached >= here.usage.num_cached > 0
    alone = which.run(backend=server.url, share_prefix=False)
    assert alone.token_ids() == here.token_ids()
    assert alone.usage.num_cached == 0


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_examples_of_the_page(server, example, capsys):
    assert "http://127.0.0.1:8000" in example
    exec(compile(example.replace("http://127.0.0.1:8000", server.url), str(PAGE), "exec"), {})
    assert capsys.readouterr().out


def test_a_cancelled_program_frees_its_requests(server):
    @program
    def long(s):
        branches = s.fork(3)
        branches += "Hello" + gen("x", max_tokens=480, **GREEDY)
        branches.join()

    with long.run(backend=server.url, stream=True):
        until(lambda: server.gauge("requests_running") >= 3, 0.01)
    until(lambda: not server.gauge("requests_running"))


def test_errors_of_a_server(server):
    too_long = program(lambda s: s.__iadd__("a" * 510 + gen("x", max_tokens=50)))
    with pytest.raises(ContextTooLong, match="512"):
        too_long.run(backend=server.url)
    hello = program(lambda s: s.__iadd__("a" + gen("x", max_tokens=1)))
    with pytest.raises(InvalidRequest, match="other"):
        hello.run(backend=Remote(server.url, model="other"))
    with pytest.raises(TidemillError, match="does not respond"):
        hello.run(backend="http://127.0.0.1:9")
    s = hello.run(backend=server.url, stream=True)
    s.cancel()
    assert s.error is None or isinstance(s.error, Cancelled)
