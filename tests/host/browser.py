# SPDX-License-Identifier: Apache-2.0
"""A real browser without a window: Debian's Chromium, driven by Selenium."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from ..waiting import eventually

WIDTH, HEIGHT = 1280, 900
PROGRAMS = ("chromium", "chromedriver")


class Browser:
    """One window. What its console has said since the last look is in ``complaints``."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, url: str, width: int = WIDTH) -> None:
        """Open a page in a window of this width; what earlier pages left is gone."""
        self.driver.get("about:blank")
        self.complaints()
        self.driver.execute_cdp_cmd("Network.clearBrowserCookies", {})
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        size = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.get(url)

    def go(self, url: str) -> None:
        """Open a page with the cookies that are there."""
        self.driver.get(url)

    def text(self, name: str) -> str:
        """Return the text that is seen of an element."""
        return str(self.run("return document.getElementById(arguments[0])?.innerText ?? ''", name))

    def wait_for(self, name: str, text: str, seconds: float = 20.0) -> None:
        """Wait until a text is seen in an element."""
        eventually(lambda: text in self.text(name), f"'{text}' in {name}", seconds, 0.02)

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a script in the page."""
        return self.driver.execute_script(script, *arguments)

    def press(self, *keys: str) -> None:
        """Press keys, wherever the focus is."""
        self.driver.switch_to.active_element.send_keys(*keys)

    @property
    def focused(self) -> str:
        """What has the focus: its id, or else its text."""
        found = "const e = document.activeElement; return e.id || e.innerText || e.tagName"
        return str(self.run(found))

    def tab_to(self, name: str) -> None:
        """Press Tab until an element has the focus."""
        for _ in range(60):
            self.press(Keys.TAB)
            if self.focused == name:
                return
        raise AssertionError(f"Tab leads nowhere to {name}")

    def complaints(self) -> list[str]:
        """Return what the console has said, such as violations of the page's policy."""
        return [entry["message"] for entry in self.driver.get_log("browser")]  # type: ignore[no-untyped-call]

    def faults(self) -> list[str]:
        """Return what axe-core finds wrong in the page, contrast included."""
        self.run(resources.files("axe_core_python").joinpath("axe.min.js").read_text())
        found = self.driver.execute_async_script("axe.run().then(arguments[arguments.length - 1])")
        return [
            f"{each['id']}: {node['html'][:200]}: {node['failureSummary']}"
            for each in found["violations"]
            for node in each["nodes"]
        ]

    def element(self, selector: str) -> Any:
        """Return an element by its CSS selector."""
        return self.driver.find_element(By.CSS_SELECTOR, selector)


def missing() -> str:
    """Return what has to be installed, "" for nothing."""
    if all(map(shutil.which, PROGRAMS)):
        return ""
    return "chromium and chromium-driver are not installed: images/prerequisites.sh tests"


@contextmanager
def started() -> Iterator[Browser]:
    """Start a browser, and end it."""
    chromium, driver_program = (shutil.which(name) for name in PROGRAMS)
    options = webdriver.ChromeOptions()
    options.binary_location = str(chromium)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for argument in (
        "--headless=new",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--force-color-profile=srgb",
    ):
        options.add_argument(argument)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # which does not run as root
    driver = webdriver.Chrome(options, Service(driver_program))
    try:
        driver.set_page_load_timeout(30)
        driver.set_script_timeout(60)
        yield Browser(driver)
    finally:
        driver.quit()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser for all tests of a module."""
    if complaint := missing():
        pytest.skip(complaint)
    with started() as browser:
        yield browser
