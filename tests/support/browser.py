"""A real browser for tests of pages: Debian's Chromium, headless, driven by Selenium without any download."""

import json
import shutil
from contextlib import contextmanager

import pytest

_FLAGS = (
    "headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
    "disable-component-update", "disable-sync", "disable-dev-shm-usage", "hide-scrollbars",
)  # fmt: skip


class Browser:
    def __init__(self, driver):
        self.driver = driver  # Selenium's, for everything that has no method here

    def open(self, page, width=1200, height=900, dark=False):
        """Loads a file or address in a window whose inside is that many CSS pixels wide; forgets earlier messages."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)  # also below a desktop's 500 pixels
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        self.driver.get("about:blank")
        self.messages()
        self.requests()
        self.driver.get(page if isinstance(page, str) else page.absolute().as_uri())

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def messages(self):
        """Console messages since the last call, the browser's own complaints among them."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self):
        """Addresses that the page asked for since the last call, refused ones among them."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
        return [url for url in sent if not url.startswith("chrome:")]  # the browser's own start page

    def overflow(self):
        return int(self.run("return document.scrollingElement.scrollWidth - document.documentElement.clientWidth"))

    def boxes(self, selector):
        boxes = "[...document.querySelectorAll(arguments[0])].map(element => element.getBoundingClientRect())"
        return [*map(tuple, self.run(f"return {boxes}.map(box => [box.width, box.height])", selector))]


@contextmanager
def start_browser(profile):
    """Runs Chromium with an empty profile folder; skips the test where Chromium or its driver is not installed."""
    chromium, driver_path = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver_path:
        pytest.skip("needs a browser: apt-get install chromium chromium-driver")
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = chromium
    for flag in (*_FLAGS, f"user-data-dir={profile}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options=options, service=Service(executable_path=driver_path))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
