"""The page in a real browser, against a real server. Skipped where there is no Chromium."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from selenium.webdriver.common.keys import Keys

from tests.server.browser import Browser, needs_chromium
from tests.server.conftest import Server
from tests.waiting import until

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
    """On a fresh page. Afterwards the console has nothing to say and nobody else was asked for
    anything."""
    chromium.size(1280, 860)
    chromium.open(f"{roomy.url}/version")  # of the same origin, and nothing there writes it again
    chromium.js("localStorage.clear(); sessionStorage.clear()")
    chromium.open(roomy.url)
    chromium.until("document.querySelector('#model').value === 'tiny'")
    chromium.complaints()
    chromium.hosts()
    yield chromium
    assert [
        words for words in chromium.complaints() if "Failed to load resource" not in words
    ] == []
    assert all(host.startswith("127.0.0.1:") for host in chromium.hosts())


def note(browser, **more):
    browser.js(NOTE.replace("arguments0", json.dumps(more)))


def sent(browser):
    return browser.js("return window.sent")


def test_a_response_streams_in_with_its_figures(browser):
    note(browser, ignore_eos=True, max_tokens=600)
    browser.type(
        "#text", "first line", Keys.SHIFT + Keys.ENTER, Keys.NULL, "second line", Keys.ENTER
    )
    length = "document.querySelector('article.assistant .words')?.textContent.length"
    browser.until(f"{length} > arguments[0]", browser.until(length))
    browser.until(DONE)
    assert sent(browser)[0]["messages"] == [{"role": "user", "content": "first line\nsecond line"}]
    assert "first token" in browser.text(".stats")
    assert "tokens/s" in browser.text(".stats")
    assert "600 tokens" in browser.text(".stats")
    browser.click(".why-open")
    browser.until("document.querySelector('.why .bar')")
    widths = browser.js(
        "return [...document.querySelectorAll('.bar span')].map((one) => parseFloat(one.style.width))"
    )
    assert sum(widths) == pytest.approx(100, abs=0.05)
    assert "steps for 599 tokens, alone" in browser.text(".why")
    browser.say("again")
    browser.until(f"document.querySelectorAll('article').length === 4 && {DONE}")
    assert "prompt tokens cached" in browser.js(
        "return [...document.querySelectorAll('.stats')].at(-1).textContent"
    )


def test_comments_of_a_stream_are_no_events(browser):
    """Such as those that keep the connection of a queued request alive."""
    code = """
        const { eventsOf } = await import("./page/api.js");
        const reply = new Response(": keep-alive\\n\\ndata: {}\\n\\n: keep-alive\\n\\nevent: step\\ndata: [1]\\n\\n");
        const seen = [];
        for await (const event of eventsOf(reply)) seen.push(event);
        return seen;
    """
    assert browser.js(f"return (async () => {{ {code} }})()") == [
        ["message", "{}"],
        ["step", "[1]"],
    ]


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
    until(lambda: not roomy.gauge("requests_running"))
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
        assert body["messages"] == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "one"},
        ]
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
    assert set(sent(browser)[-1]) == {
        "model",
        "messages",
        "stream",
        "stream_options",
        "timings",
        "max_tokens",
    }


def test_conversations_survive_and_are_renamed_deleted_and_brought_back(browser, roomy):
    note(browser, max_tokens=5)
    for words in ("the first", "the second"):
        browser.click("#new")
        browser.say(words)
        browser.until(DONE)
    answer = browser.text("article.assistant .words")
    browser.open(roomy.url)
    titles = (
        "[...document.querySelectorAll('#conversations .go')].map((one) => one.textContent).join()"
    )
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
    browser.click(".edit")
    browser.type(
        "article.editing textarea", Keys.CONTROL + "a", Keys.NULL, "what is that", Keys.ENTER
    )
    browser.until(f"window.sent.length === 3 && {DONE}")
    assert sent(browser)[2]["messages"] == [{"role": "user", "content": "what is that"}]
    assert len(browser.all("article")) == 2


def test_every_message_has_its_actions_and_they_can_be_undone(browser):
    # an answer without text has nothing to copy
    note(browser, max_tokens=5, temperature=0, ignore_eos=True)
    num = "document.querySelectorAll('article').length"
    for i, words in enumerate(("first", "second"), start=1):
        browser.say(words)
        browser.until(f"{num} === {2 * i} && {DONE}")
    labels = """return [...document.querySelectorAll('article')].map((one) =>
        [...one.querySelectorAll('footer button')].map((button) => button.textContent))"""
    assert (
        browser.js(labels)
        == [["Copy", "Edit", "Delete"], ["Copy", "Retry", "Delete", "Why this long?"]] * 2
    )
    visible = "one.checkVisibility({ opacityProperty: true })"
    assert browser.js(
        f"return [...document.querySelectorAll('article footer button')].every((one) => {visible})"
    )
    browser.js("document.querySelector('article.user .edit').focus()")
    browser.driver.switch_to.active_element.send_keys(Keys.TAB)
    # deletes the first question and its answer
    browser.driver.switch_to.active_element.send_keys(Keys.ENTER)
    browser.until(f"{num} === 2")
    assert browser.text("article.user .words") == "second"
    browser.click("#toast button")
    browser.until(f"{num} === 4")
    browser.click("article.assistant .again")
    browser.until(f"{num} === 2 && {DONE}")
    assert sent(browser)[-1]["messages"] == [{"role": "user", "content": "first"}]
    browser.click("#toast button")
    browser.until(f"{num} === 4")


HOSTILE = """<img src=x onerror="window.hurt=1"><script>window.hurt=2</script>

# <b>title</b> **bold <i onclick=alert(1)>** `<u>code</u>`

[good](https://example.org/a) [bad](javascript:window.hurt=3) ![picture](https://example.org/p.png) <javascript:window.hurt=6>

$\\text{<img src=x onerror=window.hurt=7>}$ and $$\\href{javascript:window.hurt=8}{<b>x</b>}$$ [<u>y</u>](data:text/html,x)

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
    for words in (
        '<img src=x onerror="window.hurt=1">',
        "<b>title</b>",
        "<script>window.hurt=4</script>",
        "<iframe src=",
    ):
        assert words in shown
    tags = set(
        browser.js(
            "return [...document.querySelectorAll('#log .words *')].map((one) => one.tagName.toLowerCase())"
        )
    )
    assert not tags & {"img", "script", "iframe", "style", "b", "i", "u"}
    assert {
        "h3",
        "strong",
        "code",
        "table",
        "figure",
        "ul",
        "ol",
        "pre",
        "math",
        "mtext",
        "span",
    } <= tags
    links = browser.js(
        "return [...document.querySelectorAll('#log a')].map((one) => [one.href, one.rel])"
    )
    assert len(links) == 3  # the picture and the bare address, too, are but links
    assert all(
        address.startswith("https://example.org/") and rel == "noopener noreferrer"
        for address, rel in links
    )
    assert browser.js("return window.hurt ?? null") is None


@pytest.mark.slow
def test_marks_without_end_are_rendered(browser):
    """In quadratic time one of these would not be over before the driver gives up."""
    endless = [
        "[",
        "*a ",
        "**",
        "`",
        "_x_",
        "> ",
        "- ",
        "|",
        "https://",
        "\\",
        "![a](",
        "$",
        "$a",
        "\\[\n",
        "\\(",
        "\\left(",
        "#",
        " ",
    ]
    for part in [*endless, "a|b\n-|-\n", "```c++\n'", "```py\nr'", "```html\n<a ", "```yaml\n- "]:
        render(browser, part * 15_000)


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
        assert chromium.find("#key-open").is_displayed()
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
        chromium.until(
            "document.querySelector('.trouble')?.textContent.includes('cannot be reached')"
        )
    finally:
        server.stop()


def test_the_engine_is_watched_under_load(browser, roomy):
    was_seen = threading.Event()

    def ask(i):
        """Until it was seen, however long the browser takes."""
        body = {
            "prompt": f"{'a prefix that all have in common ' * 4}{i}",
            "max_tokens": 3000,
            "ignore_eos": True,
            "stream": True,
        }
        with httpx.stream("POST", f"{roomy.url}/v1/completions", json=body) as response:
            for _ in response.iter_lines():
                if was_seen.is_set():
                    return

    browser.click("#tab-engine")
    browser.until("document.querySelector('#requests').textContent.includes('No requests')")
    seen = browser.text("#steps-says")
    asking = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in asking:
        thread.start()
    num_colours = """(() => { const map = document.querySelector('#map'); const found = new Set();
        const copy = new OffscreenCanvas(map.width, map.height).getContext('2d', { willReadFrequently: true });
        copy.drawImage(map, 0, 0);
        const data = new Uint32Array(copy.getImageData(0, 0, map.width, map.height).data.buffer);
        data.forEach((colour) => found.add(colour)); return found.size; })()"""
    browser.until(  # at one moment: the requests do not wait for the driver
        "[...document.querySelectorAll('#requests .phase.decode')].length === 6"
        " && document.querySelector('#figures div:nth-child(3) dd').innerText === '6'"
        " && /[1-9]\\d* shared pages/.test(document.querySelector('#map-legend').textContent)"
        f" && {num_colours} >= 6"
    )
    browser.until("document.querySelector('#steps-says').innerText !== arguments[0]", seen)
    assert "prefix hit" in browser.text("#decisions")
    was_seen.set()
    for thread in asking:
        thread.join()
    browser.until("document.querySelector('#requests').textContent.includes('No requests')")
    browser.click("#tab-chat")


def test_the_live_view_connects_again(browser):
    """The first connection ends after one state. Of the second, the page draws each event before
    the next arrives."""
    browser.js("""
        const plain = window.fetch;
        const drawn = () => new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)));
        window.connections = 0;
        window.eventsDrawn = 0;
        window.fetch = async (path, options) => {
          const reply = await plain(path, options);
          if (!String(path).includes("engine/live")) return reply;
          const isFirst = ++window.connections === 1;
          const events = (async function* () {
            let text = "";
            for await (const piece of reply.body.pipeThrough(new TextDecoderStream())) {
              const events = (text + piece).split("\\n\\n");
              text = events.pop();
              for (const event of events) {
                yield new TextEncoder().encode(`${event}\\n\\n`);
                if (isFirst && event.includes("event: state")) return;
                await drawn();
                if (!isFirst) window.eventsDrawn++;
              }
            }
          })();
          const body = new ReadableStream({
            async pull(controller) {
              const { done, value } = await events.next();
              if (done) controller.close();
              else controller.enqueue(value);
            },
          });
          return new Response(body, { status: reply.status, headers: reply.headers });
        };
    """)
    browser.click("#tab-engine")
    browser.until("window.connections >= 2 && window.eventsDrawn >= 3")
    browser.until("document.querySelector('#live-says').textContent === ''")
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


SIZES = {"desktop": (1280, 860), "tablet": (820, 1100), "phone": (375, 720)}
BOXES = """return ["#side", "main", "main > header", "#chat", "#composer", "#new", ".foot"].map((one) => {
    const { x, y, width, height } = document.querySelector(one).getBoundingClientRect();
    return [one, x, y, width, height].join(" "); })"""
ROW = "document.querySelector('#conversations li').getBoundingClientRect().height"


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(SIZES[name], id=name, marks=[pytest.mark.slow] * (name == "tablet"))
        for name in SIZES
    ],
)
def test_a_look_at_the_engine_leaves_the_chat_as_it_was(browser, roomy, size):
    """Nothing moves by visiting a view, no row grows while its conversation is answered, and the
    table of requests is whole."""
    browser.size(*size)
    note(browser, ignore_eos=True, max_tokens=3000)
    browser.until("document.getAnimations().length === 0")  # the sidebar of a phone slides away
    before = browser.js(BOXES)
    assert (
        browser.js("return document.querySelector('#composer').getBoundingClientRect().bottom")
        == size[1]
    )
    browser.click("#tab-engine")
    browser.until("document.querySelector('#map-legend').children.length")
    browser.click("#tab-chat")
    assert browser.js(BOXES) == before
    for dialog in ("settings", "export"):
        browser.js(f"document.querySelector('#{dialog}-open').click()")
        browser.js("document.querySelector('dialog[open]').close()")
        assert browser.js(BOXES) == before
    browser.say("a question with a title that is too long for the row in which it stands")
    browser.until("document.querySelector('.growing .words')?.textContent.length > 20")
    answering = browser.js(f"return document.querySelector('.responding') && {ROW}")
    browser.click("#tab-engine")
    browser.until("document.querySelector('#requests .phase.decode')")
    table = "document.querySelector('#requests').getBoundingClientRect()"
    panel = "document.querySelector('#requests').parentElement.getBoundingClientRect()"
    assert browser.js(f"return {table}.right <= {panel}.right")
    browser.click("#tab-chat")
    browser.js("document.querySelector('#stop').click()")
    browser.until(DONE)
    assert browser.js(f"return {ROW}") == answering


WIDE = f"{'x' * 99}\n\n```\n{'y' * 99}\n```\n\n$${'z+' * 30}z$$\n\n| {'a b | ' * 15}\n|{'-|' * 15}"


def test_a_phone_needs_no_sideways_scrolling(browser):
    note(browser, max_tokens=1000, structured_outputs={"choice": [WIDE]})
    browser.size(375, 720)
    browser.say("w" * 99)
    browser.until(DONE)
    fits = "document.documentElement.scrollWidth <= 375 && [...document.querySelectorAll('#scroll, #engine')].every((one) => " \
        "one.scrollWidth <= one.clientWidth)"  # fmt: skip
    assert browser.js(f"return {fits}")
    browser.js("document.querySelector('.why-open').click()")
    browser.until(f"document.querySelector('.why .bar') && {fits}")
    assert len(browser.all("article.assistant math, article.assistant table")) == 2
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
        grounds.add(
            (
                browser.text("#theme"),
                browser.js("return getComputedStyle(document.body).backgroundColor"),
            )
        )
    assert len({words for words, _ in grounds}) == 3
    assert len({ground for _, ground in grounds}) == 2


# ---- Markdown, formulas, code


def render(browser, *texts):
    """Each text as the page renders it."""
    code = """const [given] = arguments; return import("/page/markdown.js").then(({ show }) => given.map((text) => {
        const box = document.createElement("div"); show(box, text); return box.innerHTML; }))"""
    return browser.js(code, list(texts))


SAFE = 'target="_blank" rel="noopener noreferrer"'
MARKDOWN = {
    "single newlines": ("a\nb\\\nc  \nd", "<p>a<br>b<br>c<br>d</p>"),
    "tasks": (
        "- [ ] a\n- [x] b\n  - c",
        '<ul><li class="task"><input type="checkbox" disabled="" aria-label="to do"><div>a</div></li>'
        '<li class="task"><input type="checkbox" disabled="" aria-label="done"><div>b<ul><li>c</li></ul></div></li></ul>',
    ),
    "lists in lists": (
        "1. a\n  - b\n    c\n  - d\n2. e\nf\n\n   g\n3. h",
        '<ol start="1"><li>a<ul><li>b<br>c</li><li>d</li></ul></li><li><p>e<br>f</p><p>g</p></li><li>h</li></ol>',
    ),
    "kinds of lists": (
        "- a\n1. b\n\ntext",
        '<ul><li>a</li></ul><ol start="1"><li>b</li></ol><p>text</p>',
    ),
    "code in a list": (
        "2. a\n   ```\n   x\n\n     y\n   ```\n3. b",
        "x\n\n  y</code></pre></figure></li><li>b</li></ol>",
    ),
    "tables": (
        "text\na | b\n:-: | --:\n`x|y` | p\\|q\n\nend",
        '<p>text</p><div class="scroller"><table><thead><tr><th class="middle">a</th><th class="right">b</th></tr></thead>'
        '<tbody><tr><td class="middle"><code>x|y</code></td><td class="right">p|q</td></tr></tbody></table></div><p>end</p>',
    ),
    "quotes": (
        "> a\nb\n\n> > - c\n>\n> d\n\ne",
        "<blockquote><p>a<br>b</p></blockquote><blockquote><blockquote><ul><li>c</li></ul></blockquote><p>d</p></blockquote><p>e</p>",
    ),
    "emphasis": (
        "**a *b* `*`** ***c*** snake_case_name 2 * 3 * 4 ~~d~~ ~5 ~6 **open",
        "<p><strong>a <em>b</em> <code>*</code></strong> <em><strong>c</strong></em> snake_case_name 2 * 3 * 4 "
        "<del>d</del> ~5 ~6 **open</p>",
    ),
    "headings and rules": ("## a ##\n***\nb", "<h4>a</h4><hr><p>b</p>"),
    "links": (
        "[**a**](https://e.org/b_(c)) <mailto:d@e.org> (https://e.org/f). [g](ftp://e.org)",
        f'<p><a href="https://e.org/b_(c)" {SAFE}><strong>a</strong></a> <a href="mailto:d@e.org" {SAFE}>mailto:d@e.org</a> '
        f'(<a href="https://e.org/f" {SAFE}>https://e.org/f</a>). g</p>',
    ),
}


def test_markdown(browser):
    rendered = render(browser, *(text for text, _ in MARKDOWN.values()))
    for (name, (_, expected)), made in zip(MARKDOWN.items(), rendered, strict=True):
        assert expected in made, name


MONEY = [
    "It costs $5 and $6.", "$5-$6, US$5 or CA$6", "$HOME/$USER and $PATH", "from 5$ to 6$", "$5 or six dollars$", "\\$x\\$",
    "`$x$`", "$ x $", "a$b$c", "$20M (about €18M) to $30M",
]  # fmt: skip
FORMULAS = {
    r"$x_1^2$": "<msubsup><mi>x</mi><mn>1</mn><mn>2</mn></msubsup>",
    r"\(\frac{a}{b}\)": "<mfrac><mi>a</mi><mi>b</mi></mfrac>",
    r"so $\sqrt[3]{x}$, then": "<mroot><mi>x</mi><mn>3</mn></mroot>",
    "$$\n\\sum_{i=1}^{n} \\alpha_i\n$$": '<munderover><mo movablelimits="true" largeop="true">∑</mo>',
    r"\[ \int_0^\infty e^{-x}\,dx \]": '<msubsup><mo largeop="true">∫</mo><mn>0</mn><mi>∞</mi></msubsup>',
    r"$\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}$": "<mtr><mtd><mn>3</mn></mtd><mtd><mn>4</mn></mtd></mtr>",
    r"$$f(x) = \begin{cases} 1 & \text{if } x > 0 \\ 0 & \text{else} \end{cases}$$": "<mtext>if&nbsp;</mtext>",
    r"$$a &= b \\ &= c$$": '<mtable class="aligned" displaystyle="true">',
    r"$\left( \mathbb{R} \right]$": '<mo fence="true" stretchy="true" form="prefix">(</mo><mi mathvariant="normal">ℝ</mi>',
    r"$f'(x) \le \lim_{x \to 0} \hat{y}$": '<munder><mo movablelimits="true" rspace="0.17em">lim</mo>',
    r"$\unheard{x}$": '<mtext class="unknown">\\unheard</mtext><mi>x</mi>',
    "- costs $x$": "<li>costs <math",
}


def test_formulas_and_money(browser):
    for text, made in zip(MONEY, render(browser, *MONEY), strict=True):
        assert "<math" not in made, text
    for (text, expected), made in zip(FORMULAS.items(), render(browser, *FORMULAS), strict=True):
        assert "<math" in made, text
        assert expected in made, text
    broken = [
        r"$\frac{1}$",
        r"$x^$",
        r"$\left( x$",
        r"$\begin{nothing}x\end{nothing}$",
        "$" + "{" * 50 + "x" + "}" * 50 + "$",
    ]
    for text, made in zip(broken, render(browser, *broken), strict=True):
        assert made == f'<p><code class="source">{text}</code></p>'


CODE = {
    "python": ('@a\ndef f(x: int):  # c\n    """d\n    e"""\n    return f"{x}" + 0x1F',
               "meta keyword function type comment string keyword string number"),
    "ts": ("const a = `x\n${1}`; // c\n/* d\n*/ foo(null)", "keyword string comment comment function constant"),
    "json": ('{"a": [1, "b", true]}', "property number string constant"),
    "bash": ('# c\nfor x in $Y; do echo --z "$x"; done', "comment keyword keyword variable keyword type meta string keyword"),
    "c++": ("#include <a>\nclass B { int c() { return 0; } };", "meta keyword type function keyword number"),
    "rust": ("fn f<'a>() { let c = 'c'; println!(\"x\"); }", "keyword variable keyword string function string"),
    "go": ("func f() string { return `a\nb` }", "keyword function type keyword string"),
    "html": ('<!-- c --><a href="x">y</a><script>let z</script>',
             "comment keyword property string keyword keyword keyword keyword keyword keyword keyword keyword"),
    "css": ("a { color: #fff; } /* c\n*/", "property number comment"),
    "SQL": ("SELECT a FROM b -- c\nWHERE d = 'e'", "keyword keyword comment keyword string"),
    "yaml": ("a: 1 # c\nb:\n  - c: true", "property number comment property property constant"),
    "unknown": ("if x: # y", ""),
    "constructor": ("if x", ""),
}  # fmt: skip


def test_code_is_coloured_and_unchanged(browser):
    code = """const [given] = arguments; return import("/page/code.js").then(({ highlight }) => given.map((
        [language, text]) => { const box = document.createElement("pre"); box.append(...highlight(text, language));
        return [box.textContent, [...box.children].map((one) => one.className.replace("tok-", "")).join(" ")]; }))"""
    found = browser.js(code, [[language, text] for language, (text, _) in CODE.items()])
    for (language, (text, kinds)), (same, made) in zip(CODE.items(), found, strict=True):
        assert same == text, language
        assert made == kinds, language


# ---- files, search, folding


def drop(browser, name, content):
    browser.js(
        """const given = new DataTransfer();
        given.items.add(new File([arguments[1]], arguments[0]));
        const how = { dataTransfer: given, bubbles: true, cancelable: true };
        document.querySelector("#text").dispatchEvent(new DragEvent("drop", how));""",
        name, content,
    )  # fmt: skip


def test_text_files_go_with_a_message(browser, tmp_path):
    note(browser, max_tokens=5)
    num = "document.querySelectorAll('#attached li').length"
    (tmp_path / "notes.py").write_text("x = 1\nfence = '```'\n")
    browser.type("#file", str(tmp_path / "notes.py"))
    browser.until(f"{num} === 1")
    drop(browser, "more.txt", "<img src=x onerror=window.hurt=1>")
    browser.until(f"{num} === 2")
    drop(browser, "unwanted.txt", "z")
    browser.until(f"{num} === 3")
    browser.click("#attached [aria-label='Remove unwanted.txt']")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff\x00")
    browser.type("#file", str(tmp_path / "picture.png"))
    browser.until(
        "document.querySelector('#toast').textContent.includes('picture.png is not a text file')"
    )
    drop(browser, "large.log", "x" * 300_000)
    browser.until("document.querySelector('#toast').textContent.includes('large.log is too large')")
    assert browser.js(
        "return [...document.querySelectorAll('#attached b')].map((one) => one.textContent)"
    ) == [
        "notes.py",
        "more.txt",
    ]
    browser.say("what is this")
    browser.until(DONE)
    assert not browser.find("#attached").is_displayed()
    (message,) = sent(browser)[0]["messages"]
    assert message["content"] == (
        "File `notes.py`:\n\n````py\nx = 1\nfence = '```'\n````\n\n"
        "File `more.txt`:\n\n```txt\n<img src=x onerror=window.hurt=1>\n```\n\nwhat is this"
    )
    browser.click("details.file summary")
    assert "fence" in browser.text("details.file pre")
    assert browser.text("article.user .words") == "what is this"
    assert browser.js("return window.hurt ?? null") is None


def conversation(number, title, *messages):
    made = [{"role": role, "content": content} for role, content in messages]
    return {"id": f"{number:016x}", "title": title, "changed": 1, "settings": {}, "messages": made}


def exported(*conversations):
    return json.dumps(
        {"format": "tidemill.conversations", "version": 1, "conversations": conversations}
    )


def import_(browser, folder, text):
    """What the page says about it."""
    (folder / "import.json").write_text(text)
    browser.js("document.querySelector('#toast').textContent = ''")
    browser.type("#import-file", str(folder / "import.json"))
    return browser.until(
        "!document.querySelector('#toast').hidden && document.querySelector('#toast').textContent"
    )


def test_conversations_are_imported_searched_and_exported(browser, tmp_path):
    sea = conversation(
        1, "The sea", ("user", "What is salt?"), ("assistant", "Sodium **chloride**, mostly.")
    )
    sea["messages"][0]["files"] = [{"name": "a.txt", "text": "barnacle"}]
    sea["messages"][1] |= {
        "reasoning": "Think of NaCl.",
        "stats": {"tokens": 6, "rate": "fast"},
        "explanation": {"spans": 1},
    }
    sea["settings"] = {"system": "Be salty.", "temperature": "hot", "seed": 3, "unknown": 1}
    mill = conversation(
        2,
        "The mill",
        ("user", "Who grinds?"),
        ("assistant", "<b>The</b> miller."),
        ("system", "x"),
        ("user", 5),
    )
    assert (
        import_(browser, tmp_path, exported(sea, mill, "no conversation", conversation(3, "empty")))
        == "2 imported."
    )
    assert import_(browser, tmp_path, exported(sea)) == "0 imported, 1 were here already."
    assert import_(browser, tmp_path, "{") == "This file is not JSON."
    assert "not exported by this page" in import_(browser, tmp_path, '{"messages": []}')
    titles = "[...document.querySelectorAll('#conversations .go span')].map((one) => one.textContent).join()"
    assert set(browser.until(titles).split(",")) == {"The sea", "The mill"}
    for words, title in (("BARNACLE", "The sea"), ("miller", "The mill"), ("the sea", "The sea")):
        browser.type("#search", Keys.CONTROL + "a", Keys.NULL, words)
        browser.until(f"{titles} === arguments[0]", title)
    browser.type("#search", Keys.CONTROL + "a", Keys.NULL, "nowhere")
    browser.until("document.querySelector('#search-says').textContent === 'Nothing found.'")
    browser.type("#search", Keys.CONTROL + "a", Keys.NULL, "chloride")
    browser.until("document.querySelector('#conversations mark')?.textContent === 'chloride'")
    browser.type("#search", Keys.ENTER)
    browser.until("document.querySelector('article.assistant.found')")
    assert not browser.js("return document.querySelector('details.reasoning').open")
    assert browser.text("details.reasoning summary") == "Thought"
    assert browser.text(".stats") == "about 6 tokens"
    browser.type("#search", Keys.ESCAPE)
    browser.download_to(tmp_path)
    for button, name in (("markdown", "The-sea.md"), ("json", "The-sea.json")):
        browser.click("#export-open")
        browser.click(f"#export-{button}")
        until((tmp_path / name).exists)
    assert (tmp_path / "The-sea.md").read_text() == (
        "# The sea\n\n**System**\n\nBe salty.\n\n**You**\n\nFile `a.txt`:\n\n```txt\nbarnacle\n```\n\nWhat is salt?\n\n"
        "**Model**\n\nSodium **chloride**, mostly.\n"
    )
    (same,) = json.loads((tmp_path / "The-sea.json").read_text())["conversations"]
    assert same["settings"] == {"system": "Be salty.", "seed": 3}
    assert same["messages"][1] == {
        "role": "assistant", "content": "Sodium **chloride**, mostly.", "reasoning": "Think of NaCl.",
        "stats": {"tokens": 6, "finish": ""},
    }  # fmt: skip


def test_long_messages_are_folded(browser, tmp_path):
    long = "\n".join(f"line {i}" for i in range(100))
    talk = conversation(
        4, "long", ("user", long), ("assistant", long), ("user", "short"), ("assistant", long)
    )
    import_(browser, tmp_path, exported(talk))
    browser.click("#conversations .go")
    folded = "return [...document.querySelectorAll('article')].map((one) => one.classList.contains('folded'))"
    assert browser.js(folded) == [True, True, False, False]  # the last answer is being read
    assert browser.js("return document.querySelector('.user .words').clientHeight") < 300
    browser.click("article.user .more")
    assert browser.js(folded) == [False, True, False, False]
    assert browser.js("return document.querySelector('.user .words').clientHeight") > 1000
    browser.find("article.assistant .more").send_keys(Keys.ENTER)
    assert browser.js(folded) == [False] * 4


def test_settings_show_the_defaults_that_apply(browser):
    browser.js(
        """return import("/page/settings.js").then(({ setDefaults }) => setDefaults({
             max_model_len: 4096, sampling_defaults: { temperature: 0.2, repetition_penalty: 1.1, top_p: null } }))"""
    )
    browser.click("#settings-open")
    expected = {
        "temperature": "0.2",
        "repetition_penalty": "1.1",
        "top_p": "1",
        "top_k": "0",
        "max_tokens": "up to 4096",
        "seed": "random",
    }
    assert {
        name: browser.find(f"#setting-{name}").get_attribute("placeholder") for name in expected
    } == expected
    assert "defaults of this model" in browser.text("#defaults-say")
    browser.type("#setting-temperature", "0.9")
    assert browser.text(".field:has(#setting-temperature) .usual").strip() == "Default: 0.2."
    hints = browser.js(
        "return [...document.querySelectorAll('#fields small')].map((one) => one.textContent.length)"
    )
    assert len(hints) == 11
    assert min(hints) > 20
    browser.type("#setting-temperature", Keys.ESCAPE)
    assert not browser.find("#key-open").is_displayed()  # this server needs no key


def test_reasoning_is_folded(browser):
    """The model of the tests cannot reason: a stream as a server with such a model sends it, in two
    parts."""
    deltas = (
        {"reasoning_content": "Let me see. "},
        {"reasoning": "**So**."},
        {"content": "It is 4."},
    )
    *thoughts, answer = [
        f"data: {json.dumps({'id': 'r', 'choices': [{'delta': delta}]})}\n\n" for delta in deltas
    ]
    browser.js(
        """const plain = window.fetch;
        window.fetch = (path, how) => {
          if (!how.body) return plain(path, how);
          const body = new ReadableStream({ start(to) { window.stream = to; } });
          return Promise.resolve(new Response(body.pipeThrough(new TextEncoderStream())));
        };"""
    )
    browser.say("2 + 2?")
    browser.until("!!window.stream")
    browser.js("window.stream.enqueue(arguments[0])", "".join(thoughts))
    browser.until(
        "document.querySelector('.reasoning summary')?.textContent === 'Thinking… 4 words'"
    )
    assert not browser.js("return document.querySelector('.reasoning').open")
    browser.js(
        "window.stream.enqueue(arguments[0]); window.stream.close()", f"{answer}data: [DONE]\n\n"
    )
    browser.until(DONE)
    assert browser.text("article.assistant .words") == "It is 4."
    assert browser.text(".reasoning summary").startswith("Thought for")
    browser.click(".reasoning summary")
    assert browser.text(".thoughts").strip() == "Let me see. So."


class Prefixed(BaseHTTPRequestHandler):
    """A proxy that serves another server under /llm/ and nothing else."""

    target = ""

    def do_GET(self):
        if not self.path.startswith("/llm/"):
            self.send_error(404)
            return
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name: self.headers[name] for name in ("content-type",) if name in self.headers}
        with httpx.stream(
            self.command, self.target + self.path[4:], content=body, headers=headers
        ) as reply:
            self.send_response(reply.status_code)
            for name in ("content-type", "content-security-policy"):
                if name in reply.headers:
                    self.send_header(name, reply.headers[name])
            self.end_headers()
            try:
                for chunk in reply.iter_raw():
                    self.wfile.write(chunk)
            except ConnectionError:
                pass  # the page has left

    do_POST = do_GET

    def log_message(self, *_):
        pass


def test_under_a_prefix(browser, roomy):
    proxy = ThreadingHTTPServer(
        ("127.0.0.1", 0), type("ToRoomy", (Prefixed,), {"target": roomy.url})
    )
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        browser.open(f"http://127.0.0.1:{proxy.server_port}/llm/")
        browser.until("document.querySelector('#model').value === 'tiny'")
        note(browser, max_tokens=5, ignore_eos=True)
        browser.say("x")
        browser.until(DONE)
        assert "5 tokens" in browser.text(".stats")
        browser.click(".why-open")
        browser.until("document.querySelector('.why .bar')")
        browser.click("#tab-engine")
        browser.until("document.querySelector('#requests').textContent.includes('No requests')")
        browser.click("#tab-chat")
        assert browser.js("return location.pathname") == "/llm/"
    finally:
        proxy.shutdown()
