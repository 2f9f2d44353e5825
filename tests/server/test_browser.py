"""The page in a real browser, against a real server. Skipped where there is no Chromium."""

import json
import threading
import time

import httpx
import pytest
from selenium.webdriver.common.keys import Keys

from tests.server.browser import Browser, needs_chromium
from tests.server.conftest import Server

pytestmark = needs_chromium
KEY, ADMIN = "key-of-the-first-user", "key-of-the-admin-only"
DONE = "!document.querySelector('#send').hidden && document.querySelector('article.assistant:last-child footer .again')"
# Requests are noted before they go out, and may be given what the page has no field for.
NOTE = """
window.sent = [];
const plain = window.fetch;
window.fetch = (path, how) => {
  if (!how.body) return plain(path, how);
  const body = { ...JSON.parse(how.body), ...arguments0 };
  window.sent.push(body);
  return plain(path, { ...how, body: JSON.stringify(body) });
};
"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    running = Browser(tmp_path_factory.mktemp("profile"))
    yield running
    running.close()


@pytest.fixture
def browser(chromium, roomy):
    """On a fresh page. Afterwards the console has nothing to say and nobody else was asked for anything."""
    chromium.size(1280, 860)
    chromium.open(roomy.url)
    chromium.js("localStorage.clear(); sessionStorage.clear()")
    chromium.open(roomy.url)
    chromium.until("document.querySelector('#model').value === 'tiny'")
    chromium.complaints()
    chromium.hosts()
    yield chromium
    assert [words for words in chromium.complaints() if "Failed to load resource" not in words] == []
    assert all(host.startswith("127.0.0.1:") for host in chromium.hosts())


def note(browser, **more):
    browser.js(NOTE.replace("arguments0", json.dumps(more)))


def sent(browser):
    return browser.js("return window.sent")


def test_a_response_streams_in_with_its_figures(browser):
    note(browser, ignore_eos=True, max_tokens=600)
    browser.type("#text", "first line", Keys.SHIFT + Keys.ENTER, Keys.NULL, "second line", Keys.ENTER)
    lengths = [browser.until("document.querySelector('.growing .words').textContent.length")]
    longer = "document.querySelector('.growing .words').textContent.length > arguments[0]"
    browser.until(longer, lengths[0])
    browser.until(DONE)
    assert sent(browser)[0]["messages"] == [{"role": "user", "content": "first line\nsecond line"}]
    assert "first token" in browser.text(".stats")
    assert "tokens/s" in browser.text(".stats")
    assert "600 tokens" in browser.text(".stats")
    browser.click(".why-open")
    browser.until("document.querySelector('.why .bar')")
    widths = browser.js("return [...document.querySelectorAll('.bar span')].map((one) => parseFloat(one.style.width))")
    assert sum(widths) == pytest.approx(100, abs=0.05)
    assert "599 steps for 599 tokens, alone" in browser.text(".why")
    browser.say("again")
    browser.until(f"document.querySelectorAll('article').length === 4 && {DONE}")
    assert "prompt tokens cached" in browser.js("return [...document.querySelectorAll('.stats')].at(-1).textContent")


@pytest.mark.parametrize("how", ["escape", "button"])
def test_a_response_is_stopped(browser, roomy, how):
    note(browser, ignore_eos=True, max_tokens=3500)
    browser.say("go on and on")
    browser.until("document.querySelector('.growing .words')?.textContent.length > 20")
    if how == "button":
        browser.click("#stop")
    else:
        browser.type("#text", Keys.ESCAPE)
    browser.until(DONE)
    assert "stopped" in browser.text(".stats")
    text = browser.text("article.assistant .words")
    browser.until("document.querySelector('#stop').hidden")
    while roomy.gauge("requests_running"):
        time.sleep(0.05)
    assert browser.text("article.assistant .words") == text


def test_settings_are_sent_and_kept(browser):
    note(browser)
    browser.click("#settings-open")
    given = {"temperature": "0.7", "max_tokens": "7", "top_p": "0.9", "top_k": "40", "min_p": "0.05", "seed": "11",
             "repetition_penalty": "1.1", "system": "Be brief.", "stop": "END\nFIN"}  # fmt: skip
    for name, value in given.items():
        browser.type(f"#setting-{name}", value)
    browser.type("#setting-seed", Keys.ESCAPE)
    for words in ("one", "one"):
        browser.click("#new")
        browser.say(words)
        browser.until(DONE)
    for body in sent(browser):
        assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}]
        assert body["stop"] == ["END", "FIN"]
        assert {name: body[name] for name in given if name not in ("system", "stop")} == {
            name: float(value) for name, value in given.items() if name not in ("system", "stop")
        }
        assert body["model"] == "tiny"
    assert "7 tokens" in browser.text(".stats")
    first, second = browser.js(
        "return Object.keys(localStorage).filter((name) => name.startsWith('tidemill.chat.'))"
        ".map((name) => JSON.parse(localStorage[name]).messages[1].content)"
    )
    assert first == second  # the same seed
    browser.click("#settings-open")
    browser.click("#settings-reset")
    browser.type("#setting-max_tokens", "5", Keys.ESCAPE)
    browser.say("two")
    browser.until(f"document.querySelectorAll('article').length === 4 && {DONE}")
    assert set(sent(browser)[-1]) == {"model", "messages", "stream", "stream_options", "timings", "max_tokens"}


def test_conversations_survive_and_are_renamed_deleted_and_brought_back(browser, roomy):
    note(browser, max_tokens=5)
    for words in ("the first", "the second"):
        browser.click("#new")
        browser.say(words)
        browser.until(DONE)
    answer = browser.text("article.assistant .words")
    browser.open(roomy.url)
    titles = "[...document.querySelectorAll('#conversations .go')].map((one) => one.textContent).join()"
    assert browser.until(titles) == "the second,the first"
    assert browser.text("article.user .words") == "the second"
    assert browser.text("article.assistant .words") == answer
    browser.js("document.querySelector('#conversations [aria-label=\"Rename the first\"]').click()")
    browser.type("#conversations input", Keys.CONTROL + "a", Keys.NULL, "renamed", Keys.ENTER)
    assert browser.until(titles) == "the second,renamed"
    browser.js("document.querySelectorAll('#conversations .go')[1].click()")
    assert browser.text("article.user .words") == "the first"
    browser.js("document.querySelector('#conversations [aria-label=\"Delete renamed\"]').click()")
    assert browser.until(titles) == "the second"
    browser.click("#toast button")
    assert browser.until(titles) == "the second,renamed"


def test_asking_again_and_asking_otherwise(browser):
    note(browser, max_tokens=5)
    browser.say("what is this")
    browser.until(DONE)
    browser.click(".again")
    browser.until(f"window.sent.length === 2 && {DONE}")
    assert sent(browser)[0]["messages"] == sent(browser)[1]["messages"]
    browser.js("document.querySelector('.edit').click()")
    browser.type("article.editing textarea", Keys.CONTROL + "a", Keys.NULL, "what is that", Keys.ENTER)
    browser.until(f"window.sent.length === 3 && {DONE}")
    assert sent(browser)[2]["messages"] == [{"role": "user", "content": "what is that"}]
    assert len(browser.all("article")) == 2


HOSTILE = """<img src=x onerror="window.hurt=1"><script>window.hurt=2</script>

# <b>title</b> **bold <i onclick=alert(1)>** `<u>code</u>`

[good](https://example.org/a) [bad](javascript:window.hurt=3) ![picture](https://example.org/p.png)

- one <iframe src=https://example.org></iframe>
  1. nested

| a | <td>b |
|---|---|
| 1 | <style>*{display:none}</style> |

```html
<script>window.hurt=4</script>
```"""


def test_hostile_words_of_a_model_stay_words(browser):
    note(browser, max_tokens=2000, structured_outputs={"choice": [HOSTILE]})
    browser.say("<img src=x onerror='window.hurt=5'>")
    browser.until(DONE)
    shown = browser.text("article.assistant .words")
    for words in ('<img src=x onerror="window.hurt=1">', "<b>title</b>", "<script>window.hurt=4</script>", "<iframe src="):
        assert words in shown
    tags = set(browser.js("return [...document.querySelectorAll('#log *')].map((one) => one.tagName.toLowerCase())"))
    assert not tags & {"img", "script", "iframe", "style", "b", "i", "u"}
    assert {"h3", "strong", "code", "table", "figure", "ul", "ol", "pre"} <= tags
    links = browser.js("return [...document.querySelectorAll('#log a')].map((one) => [one.href, one.rel])")
    assert len(links) == 3  # the picture and the bare address, too, are but links
    assert all(address.startswith("https://example.org/") and rel == "noopener noreferrer" for address, rel in links)
    assert browser.js("return window.hurt ?? null") is None
    # Marks without end: in quadratic time this would not be over before the driver gives up.
    browser.js(
        """return import("/page/markdown.js").then(({ show }) => {
             for (const part of ["[", "*a ", "**", "`", "_x_", "> ", "- ", "|", "https://", "\\\\", "![a]("])
               show(document.createElement("div"), part.repeat(50000)); })"""
    )


def test_mistakes_and_refusals_in_plain_words(browser):
    browser.click("#settings-open")
    browser.type("#setting-temperature", "-3", Keys.ESCAPE)
    browser.say("x")
    browser.until("document.querySelector('.trouble')")
    assert "temperature" in browser.text(".trouble")
    browser.js("document.querySelector('#settings-reset').click()")
    browser.js(
        """const plain = window.fetch; window.fetch = (path, how) => {
        if (!how.body) return plain(path, how);
        window.fetch = plain;
        return Promise.resolve(new Response('{"error": {"message": "4096 requests are waiting."}}',
          { status: 429, headers: { "retry-after": "1" } })); }"""
    )
    browser.click(".trouble .again")
    browser.until("document.querySelector('.trouble')?.textContent.includes('busy')")
    note(browser, max_tokens=5)
    browser.click(".trouble .again")
    browser.until(DONE)
    assert not browser.all(".trouble")


def test_a_server_with_keys_that_goes_away(chromium, roomy_folder):
    server = Server(roomy_folder, "--api-key", KEY, "--admin-key", ADMIN).wait()
    try:
        chromium.open(server.url)
        chromium.until("document.querySelector('#key-dialog').open")
        chromium.type("#key", "not the key that it is", Keys.ENTER)
        chromium.until(
            "document.querySelector('#key-dialog').open && document.querySelector('#key-why').textContent.includes('accept')"
        )
        chromium.type("#key", Keys.CONTROL + "a", Keys.NULL, KEY, Keys.ENTER)
        chromium.until("document.querySelector('#model').value === 'tiny'")
        chromium.click("#tab-engine")
        chromium.until("document.querySelector('#live-says').textContent.includes('admin key')")
        chromium.click("#tab-chat")
        note(chromium, ignore_eos=True, max_tokens=3500)
        chromium.say("x")
        chromium.until("document.querySelector('.growing .words')?.textContent.length > 20")
        server.process.kill()
        chromium.until("document.querySelector('.trouble')?.textContent.includes('lost')")
        assert chromium.text("article.assistant .words")
        chromium.click(".trouble .again")
        chromium.until("document.querySelector('.trouble')?.textContent.includes('cannot be reached')")
    finally:
        server.stop()


def test_the_engine_is_watched_under_load(browser, roomy):
    def ask(i):
        body = {"prompt": f"{'a prefix that all have in common ' * 4}{i}", "max_tokens": 900, "ignore_eos": True}
        httpx.post(f"{roomy.url}/v1/completions", json=body, timeout=60)

    browser.click("#tab-engine")
    browser.until("document.querySelector('#requests').textContent.includes('No requests')")
    asking = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in asking:
        thread.start()
    browser.until("[...document.querySelectorAll('#requests .phase.decode')].length === 6")
    assert browser.text("#figures div:nth-child(3) dd") == "6"
    seen = browser.text("#steps-says")
    browser.until("document.querySelector('#steps-says').innerText !== arguments[0]", seen)
    browser.until("/[1-9]\\d* shared pages/.test(document.querySelector('#map-legend').textContent)")
    num_colours = """(() => { const map = document.querySelector('#map'); const found = new Set();
        const data = new Uint32Array(map.getContext('2d').getImageData(0, 0, map.width, map.height).data.buffer);
        data.forEach((one) => found.add(one)); return found.size; })()"""
    assert browser.js(f"return {num_colours}") >= 6
    assert "prefix hit" in browser.text("#decisions")
    for thread in asking:
        thread.join()
    browser.until("document.querySelector('#requests').textContent.includes('No requests')")
    browser.click("#tab-chat")


def test_a_hundred_thousand_pages_are_summed_up(browser):
    browser.click("#tab-engine")
    browser.until("document.querySelector('#figures').children.length")
    found = browser.js(
        """return import("/page/draw.js").then(({ drawMap, sum }) => {
             const kinds = Uint16Array.from({ length: 100000 }, (_, i) => (i * 7919) % 40);
             const colours = Array.from({ length: 40 }, (_, i) => `hsl(${9 * i} 50% 50%)`);
             const where = drawMap(document.querySelector("#map"), kinds, colours);
             return [where.per, where.columns * where.rows * where.per, document.querySelector("#map").height,
               sum([0, 5, 5, 2], 0, 4), sum([0, 0], 0, 2)]; })"""
    )
    per, covered, height, mixed, empty = found
    assert per > 1
    assert covered >= 100_000
    assert height <= 260
    assert (mixed, empty) == ([5, 3], [0, 0])


def test_a_phone_needs_no_sideways_scrolling(browser):
    note(browser, max_tokens=500, structured_outputs={"choice": ["x" * 200 + "\n\n```\n" + "y" * 200 + "\n```"]})
    browser.size(375, 720)
    browser.say("w" * 300)
    browser.until(DONE)
    fits = "document.documentElement.scrollWidth <= 375 && [...document.querySelectorAll('#scroll, #engine')].every((one) => " \
        "one.scrollWidth <= one.clientWidth)"  # fmt: skip
    assert browser.js(f"return {fits}")
    browser.js("document.querySelector('.why-open').click()")
    browser.until(f"document.querySelector('.why .bar') && {fits}")
    browser.click("#menu")
    browser.until("document.querySelector('#side').getBoundingClientRect().left === 0")
    browser.js("document.querySelector('#veil').click()")
    browser.click("#tab-engine")
    browser.until(f"document.querySelector('#figures').children.length && {fits}")


def test_keyboard_theme_and_names(browser):
    tab = Keys.TAB
    browser.js("document.querySelector('#tab-chat').focus()")
    browser.type("#tab-chat", Keys.ARROW_RIGHT)
    assert browser.js("return document.activeElement.id") == "tab-engine"
    browser.type("#tab-engine", Keys.ARROW_LEFT)
    browser.type("#tab-chat", tab)
    assert browser.js("return document.activeElement.id") == "model"
    assert browser.js("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    unnamed = """return [...document.querySelectorAll('button, input, textarea, select')].filter((one) =>
        !one.textContent.trim() && !one.getAttribute('aria-label') && !one.labels?.length).map((one) => one.id)"""
    assert browser.js(unnamed) == []
    grounds = set()
    for _ in range(3):
        browser.click("#theme")
        grounds.add((browser.text("#theme"), browser.js("return getComputedStyle(document.body).backgroundColor")))
    assert len({words for words, _ in grounds}) == 3
    assert len({ground for _, ground in grounds}) == 2
