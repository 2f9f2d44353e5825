"""A headless Chromium, driven as a user would. Uses the browser and driver that are installed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from selenium import webdriver
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from tests.helpers import LONG_S

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
DRIVER = shutil.which("chromedriver")
needs_chromium = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="browser tests need chromium and chromedriver on the PATH"
)
_SWITCHES = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run",
)  # fmt: skip


class Browser:
    def __init__(self, folder: Path) -> None:
        """`folder`: an empty one, for its profile."""
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for switch in (*_SWITCHES, f"--user-data-dir={folder}"):
            options.add_argument(switch)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
        self.driver.set_script_timeout(120)
        self.size(1280, 860)

    def size(self, width: int, height: int, scale: float = 1) -> None:
        """Of the page itself; a window cannot be as narrow as a phone."""
        metrics = {
            "width": width,
            "height": height,
            "deviceScaleFactor": scale,
            "mobile": width < 600,
        }
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def open(self, url: str) -> None:
        self.driver.get(url)

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return self.js("return document.querySelector(arguments[0])?.innerText ?? ''", selector)

    def click(self, selector: str) -> None:
        self.find(selector).click()

    def type(self, selector: str, *keys: str) -> None:
        self.find(selector).send_keys(*keys)

    def say(self, words: str) -> None:
        self.type("#text", words, Keys.ENTER)

    def download_to(self, folder: Path) -> None:
        self.driver.execute_cdp_cmd(
            "Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(folder)}
        )

    def js(self, code: str, *given: Any) -> Any:
        return self.driver.execute_script(code, *given)

    def until(self, code: str, *given: Any, within_s: float = LONG_S) -> Any:
        """Waits until an expression of the page is true, and returns it."""
        try:
            return WebDriverWait(self.driver, within_s, 0.05).until(
                lambda driver: driver.execute_script(f"return {code}", *given)
            )
        except TimeoutException:
            raise AssertionError(f"never true: {code}; console: {self.complaints()}") from None

    def complaints(self) -> list[str]:
        """What the console says since the last look: errors, and what the page's policy forbade."""
        return [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if entry["level"] in ("SEVERE", "WARNING")
        ]

    def hosts(self) -> set[str]:
        """To which the page has sent requests since the last look."""
        messages = [
            json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")
        ]
        urls = [
            one["params"]["request"]["url"]
            for one in messages
            if one["method"] == "Network.requestWillBeSent"
        ]
        return {
            urlsplit(url).netloc
            for url in urls
            if urlsplit(url).scheme in ("http", "https", "ws", "wss")
        }

    def close(self) -> None:
        self.driver.quit()
