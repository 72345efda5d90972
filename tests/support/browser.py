"""A real browser for tests of pages: Debian's Chromium, headless, driven by Selenium without any download.

A page is opened from its file or its address. Tests read the console messages and requests from the browser's own logs.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)


class Browser:
    """One running browser. `driver` is Selenium's, for everything that has no method here."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, page: Path | str, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Loads a file or address in a window whose inside is that many CSS pixels wide; forgets earlier messages."""
        self.resize(width, height)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        self.driver.get("about:blank")
        self.messages()
        self.requests()
        self.driver.get(page if isinstance(page, str) else page.absolute().as_uri())

    def resize(self, width: int, height: int = 900) -> None:
        """Sets the size of the page's window, also below the 500 pixels that a window of the desktop has at least."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script in the page returns. Selenium runs it whatever the page's own policy forbids."""
        return self.driver.execute_script(script, *arguments)

    def messages(self) -> list[str]:
        """Console messages since the last call, the browser's own complaints among them."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Addresses that the page asked for since the last call, refused ones among them."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        asked = [
            event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"
        ]
        return [url for url in asked if not url.startswith("chrome:")]  # the browser's own start page

    def overflow(self) -> int:
        """Pixels by which the page is wider than its window."""
        return int(self.run("return document.scrollingElement.scrollWidth - document.documentElement.clientWidth"))

    def boxes(self, selector: str) -> list[tuple[float, float]]:
        """Width and height of each element that a selector finds, as laid out."""
        script = (
            "return [...document.querySelectorAll(arguments[0])].map(e => {const b = e.getBoundingClientRect();"
            " return [b.width, b.height]})"
        )
        return [(width, height) for width, height in self.run(script, selector)]


@contextmanager
def start_browser(profile: Path) -> Iterator[Browser]:
    """Runs Chromium with an empty profile folder; skips the test where Chromium or its driver is not installed."""
    chromium, driver_path = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver_path:
        pytest.skip("needs a browser: apt-get install chromium chromium-driver")
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = chromium
    for flag in (*_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options=options, service=Service(executable_path=driver_path))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
