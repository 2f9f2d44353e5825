"""Work that may not end, in worker processes."""

from pathlib import Path

import pytest

from tests.helpers import CHAT_TEMPLATE
from tidemill.errors import InvalidRequest
from tidemill.frontend import sandbox
from tidemill.frontend.chat import ChatTemplate
from tidemill.frontend.sandbox import GrammarChecker, Renderer
from tidemill.frontend.structured import BACKENDS

MESSAGES = [{"role": "user", "content": "Ebbe und Flüt"}]
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def rendered():
    made = []

    def make(source):
        made.append(Renderer(source))
        return made[-1]

    yield make
    for renderer in made:
        renderer.close()


def test_it_renders_as_the_template_does(rendered):
    how = (
        MESSAGES,
        [{"type": "function", "function": {"name": "f"}}],
        {"add_generation_prompt": True, "big": 10**40},
    )
    assert rendered(CHAT_TEMPLATE).render(*how) == ChatTemplate(CHAT_TEMPLATE).render(*how)
    with pytest.raises(InvalidRequest, match="not supported") as told:
        rendered(CHAT_TEMPLATE).render([{"role": "user", "content": [{"type": "image"}]}])
    assert told.value.fix == "Send text."


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (LOOP, "does not come to an end"),
        ("{{ 'x' * 10**11 }}", "MemoryError"),
        ("{{ '{:999999999999}'.format(1) }}", "MemoryError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
    ],
)
def test_what_does_not_end_is_ended(rendered, source, why):
    renderer = rendered("{% if hostile %}" + source + "{% else %}fine{% endif %}")
    for _ in range(3):  # more often than there are workers
        with pytest.raises(InvalidRequest, match=why):
            renderer.render(MESSAGES, None, {"hostile": True})
    assert renderer.render(MESSAGES) == "fine"


def test_a_worker_that_somebody_ended_is_replaced(rendered):
    renderer = rendered(CHAT_TEMPLATE)
    expected = [renderer.render(MESSAGES) for _ in range(2)]
    idle = [renderer._pool._idle.get() for _ in range(2)]
    for worker in idle:
        if worker is not None:
            worker.kill()
            worker.wait()
        renderer._pool._idle.put(worker)
    assert [renderer.render(MESSAGES) for _ in range(2)] == expected


def test_a_worker_ends_with_its_server_even_in_a_loop(rendered):
    renderer = rendered(LOOP)
    worker = renderer._pool._begin()
    sandbox._write(worker.stdin, [MESSAGES])
    worker.stdin.close()  # as when the server is gone
    assert worker.wait() < 0
    worker.stdout.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_grammars_are_checked_at_a_bounded_cost(tiny_folder: Path, backend: str):
    checker = GrammarChecker(backend, tiny_folder, 320)
    try:
        checker.check("regex", "[a-c]+")
        chain = "\n".join(
            ["start: r0", *(f'r{i}: "x" r{i + 1}' for i in range(4000)), 'r4000: "a"']
        )
        too_much = {
            "llguidance": [("regex", "(a{1000}){1000}", "too much"), ("grammar", chain, "too much")]
        }
        for kind, text, why in [
            *too_much.get(backend, []),
            ("regex", "(", "cannot be"),
            ("regex", "(" * 5000, "cannot be"),
        ]:
            with pytest.raises(InvalidRequest, match=why) as told:
                checker.check(kind, text)
            assert told.value.param == kind
        checker.check("regex", "[a-c]+")
    finally:
        checker.close()
