"""Pictures of the web page for the documentation, from a real server and a headless Chromium.

    python -m tools.screenshots [--model smollm2] [--out docs/images] [name ...]

`chat`, `live`, `settings`, `phone` and `dark` show the model's own responses. A small model writes
poor programs and formulas, so `code` and `math` show a conversation that is imported, as a user
would import it. Needs chromium and chromedriver.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import httpx

from bench.ports import reserved_port
from bench.soak import wait
from tests.server.browser import Browser

DONE = "!document.querySelector('#send').hidden && document.querySelector('article.assistant:last-child footer .again')"
NUM_CLIENTS = 12
NUM_STEPS = 100  # that the live view shows
SETTINGS = {"temperature": 0.2, "repetition_penalty": 1.1, "max_tokens": 160, "seed": 7}
QUESTION = "Why does the sea have tides?"

CODE = '''A lookup moves the key to the end of the dictionary, so the **first** key is the oldest:

```python
from collections import OrderedDict

class LRU:
    """Keeps the latest `size` items."""

    def __init__(self, size: int = 128):
        self.size, self.items = size, OrderedDict()

    def get(self, key, default=None):
        if key not in self.items:
            return default
        self.items.move_to_end(key)  # now the latest
        return self.items[key]
```

- [x] `get` in constant time
- [ ] thread safety

| operation | time | note |
|:--|--:|---|
| `get` | $O(1)$ | moves the key |
| `put` | $O(1)$ | may evict one |
'''
MATH = r"""The roots of $ax^2 + bx + c = 0$ with $a \neq 0$ are

$$x_{1,2} = \frac{-b \pm \sqrt{b^2 - 4ac}}{2a}$$

The **Gaussian integral** follows from polar coordinates:

\[
\begin{aligned}
I^2 &= \int_{-\infty}^{\infty} \int_{-\infty}^{\infty} e^{-(x^2 + y^2)} \, dx \, dy \\
    &= \int_0^{2\pi} \int_0^{\infty} r e^{-r^2} \, dr \, d\theta = \pi
\end{aligned}
\]

A rotation by $\theta$ and a sum over $n$ terms:

$$R = \begin{pmatrix} \cos\theta & -\sin\theta \\ \sin\theta & \cos\theta \end{pmatrix}, \quad \sum_{k=1}^{n} k = \binom{n+1}{2}$$

$$|x| = \begin{cases} x & \text{if } x \ge 0 \\ -x & \text{otherwise} \end{cases}$$

The book costs $5 and the pen $6: that stays money.
"""


class Studio:
    def __init__(self, browser: Browser, url: str, out: Path) -> None:
        self.browser, self.url, self.out = browser, url, out

    def fresh(self, theme: str = "light", settings: dict[str, float] = SETTINGS) -> None:
        self.browser.size(1200, 860)
        self.browser.open(self.url)
        self.browser.js(
            "localStorage.clear(); localStorage['tidemill.theme'] = arguments[0]", theme
        )
        self.browser.js("localStorage['tidemill.settings'] = arguments[0]", json.dumps(settings))
        self.browser.open(self.url)
        self.browser.until("!!document.querySelector('#model').value")

    def ask(self, words: str) -> None:
        num = len(self.browser.all("article"))
        self.browser.say(words)
        self.browser.until(
            f"document.querySelectorAll('article').length === {num + 2} && {DONE}", within_s=400
        )

    def import_(self, title: str, question: str, answer: str) -> None:
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        talk = {"id": "0" * 16, "title": title, "changed": 1, "settings": {}, "messages": messages}
        whole = {"format": "tidemill.conversations", "version": 1, "conversations": [talk]}
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(whole, file)
            file.flush()
            self.browser.type("#import-file", file.name)
            self.browser.until("!!document.querySelector('#conversations .go')")
        self.browser.js("document.querySelector('#conversations .go').click()")
        self.browser.js("document.querySelector('#toast').hidden = true")

    def save(self, name: str) -> None:
        path = self.out / f"page-{name}.png"
        self.browser.driver.save_screenshot(str(path))
        print(f"{path}: {path.stat().st_size / 1000:.0f} kB", flush=True)

    # ---- the pictures

    def chat(self) -> None:
        self.fresh()
        self.ask(QUESTION)
        self.browser.js("[...document.querySelectorAll('.why-open')].at(-1).click()")
        self.browser.until("!!document.querySelector('.why .bar')")
        self.save("chat")

    def code(self) -> None:
        self.fresh()
        self.import_("LRU cache", "Write an LRU cache in Python.", CODE)
        self.save("code")

    def math(self) -> None:
        self.fresh()
        self.import_("Some formulas", "Show me some well-known formulas.", MATH)
        self.save("math")

    def settings(self) -> None:
        self.fresh(settings={})
        self.browser.click("#settings-open")
        self.browser.type("#setting-system", "Answer in one sentence.")
        self.browser.type("#setting-max_tokens", "200")
        self.save("settings")

    def phone(self) -> None:
        self.fresh()
        self.ask(QUESTION)
        self.browser.size(375, 740, 2)
        self.browser.until("document.querySelector('#side').getAnimations().length === 0")
        self.save("phone")

    def dark(self) -> None:
        self.fresh("dark")
        self.import_("LRU cache", "Write an LRU cache in Python.", CODE)
        self.save("dark")

    def live(self) -> None:
        self.fresh()
        self.browser.size(1200, 1060)
        self.browser.click("#tab-engine")
        stopped = threading.Event()
        clients = [
            threading.Thread(target=keep_asking, args=(self.url, i, stopped))
            for i in range(NUM_CLIENTS)
        ]
        for client in clients:
            client.start()
        try:
            self.browser.until("document.querySelectorAll('#requests .phase.decode').length >= 6")
            self.browser.until(
                "/[1-9]\\d* shared pages/.test(document.querySelector('#map-legend').textContent)"
            )
            step = "parseInt(/\\d+/.exec(document.querySelector('#steps-says').textContent)[0])"
            first = self.browser.js(f"return {step}")
            self.browser.until(f"{step} > {first + NUM_STEPS}", within_s=400)
            self.browser.until("document.querySelectorAll('#requests .phase.decode').length >= 6")
            self.save("live")
        finally:
            stopped.set()
            for client in clients:
                client.join()


def keep_asking(url: str, seed: int, stopped: threading.Event) -> None:
    chance = random.Random(seed)
    prefix = (
        "You are a patient teacher who explains how the sea, the tides and the mills of the coast work together. "
        * 3
    )
    with httpx.Client(timeout=120) as http:
        while not stopped.is_set():
            body = {
                "model": http.get(f"{url}/v1/models").json()["data"][0]["id"],
                "prompt": prefix
                + "Tell me about "
                + " ".join(chance.choices(["wind", "salt", "wood", "stone", "grain"], k=40)),
                "max_tokens": chance.randint(40, 160),
                "ignore_eos": True,
            }
            http.post(f"{url}/v1/completions", json=body).raise_for_status()


PICTURES: dict[str, Callable[[Studio], None]] = {
    "chat": Studio.chat,
    "code": Studio.code,
    "math": Studio.math,
    "live": Studio.live,
    "settings": Studio.settings,
    "phone": Studio.phone,
    "dark": Studio.dark,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", default=list(PICTURES), metavar="name", help=", ".join(PICTURES)
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with reserved_port() as port:
        run(given, port)


def run(given: argparse.Namespace, port: int) -> None:
    options = [
        "--port",
        str(port),
        "--max-context",
        "2048",
        "--max-requests",
        "10",
        "--kv-memory",
        "100M",
        "--no-request-log",
    ]
    server = subprocess.Popen(
        [sys.executable, "-m", "tidemill", "serve", given.model, *options],
        stdout=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait(url, server)
        with tempfile.TemporaryDirectory() as profile:
            browser = Browser(Path(profile))
            try:
                for name in given.names:
                    PICTURES[name](Studio(browser, url, given.out))
            finally:
                browser.close()
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()


if __name__ == "__main__":
    main()
