# SPDX-License-Identifier: Apache-2.0
"""Entry: ``make screenshots``: pictures of the dashboard, and a recording of ``millpond top``, for the docs.

They are of a small emulated fleet.
"""

from __future__ import annotations

import base64
import sys
from typing import Final

from tests.host.browser import Browser, missing, started
from tests.waiting import eventually

from bench.experiment import Run
from bench.people.browser import dashboard
from bench.people.fleet import Watched, watched_fleet
from documents.recording import record
from documents.site import ROOT
from system.support import MILLPOND

FOLDER: Final = ROOT / "docs" / "how-to"
SIZE: Final = {"width": 1100, "height": 760, "deviceScaleFactor": 1, "mobile": False}
_KEYS: Final = ((6.0, "\x1b[B"), (1.0, "\t"), (2.0, "\r"), (6.0, "q"), (2.0, "q"))
"""A cursor key, Tab to the jobs, Enter for the newest job, back, and the end; each after seconds."""


def main() -> int:
    """Take the pictures. Exit codes: 0 done, 2 no browser is installed."""
    if complaint := missing():
        print(f"screenshots: {complaint}", file=sys.stderr)
        return 2
    run = Run(quick=True, say=print)
    with watched_fleet(run) as watched, dashboard(watched) as served, started() as browser:
        argv = [*MILLPOND, "top", "--fleet", str(watched.emulation.directory)]
        record(argv, _KEYS, FOLDER / "top.cast", "millpond top")
        browser.open(served.url)
        for name, path in _pages(watched).items():
            _take(browser, served.page(path), f"dashboard-{name}.png")
    return 0


def _pages(watched: Watched) -> dict[str, str]:
    return {"fleet": "/", "job": f"/jobs/{watched.ended}"}


def _take(browser: Browser, url: str, name: str) -> None:
    """Write the picture of a page, once it is drawn, in the colours of paper."""
    features = [{"name": "prefers-color-scheme", "value": "light"}]
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", SIZE)
    browser.go(url)
    browser.wait_for("live_state" if "/jobs/" in url else "live_jobs", "done", 60.0)
    drawn = "return [...document.querySelectorAll('.chart')].every(e => e.querySelector('canvas'))"
    eventually(lambda: browser.run(drawn), "curves", 60.0)
    found = browser.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
    (FOLDER / name).write_bytes(base64.b64decode(found["data"]))
    print(f"written: docs/how-to/{name}: {(FOLDER / name).stat().st_size} bytes")


if __name__ == "__main__":
    sys.exit(main())
