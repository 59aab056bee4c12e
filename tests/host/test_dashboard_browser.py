# SPDX-License-Identifier: Apache-2.0
"""The dashboard in a real browser: content, updates, keyboard, contrast, narrow windows, hostile texts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from selenium.webdriver.common.keys import Keys

from millpond.host.fleet.lifecycle import DeviceState
from millpond.host.monitor.dashboard.access import Role

from ..waiting import eventually
from .browser import Browser, browser
from .dashboard_rig import Served, served
from .test_dashboard import HOSTILE

__all__ = ["browser", "served"]
pytestmark = [pytest.mark.full, pytest.mark.xdist_group("browser")]
TABLES = "return [...document.querySelectorAll('.chart canvas')].length"
UPDATED = """
const place = document.getElementById(arguments[0]);
replace(place, place.innerHTML.replace(' open=""', ""));
"""
TOO_WIDE = """
return document.documentElement.scrollWidth <= 400 ? [] : [...document.querySelectorAll("body *")]
  .filter(e => e.getBoundingClientRect().right > 400 && !e.parentElement.closest(".scroll, .log"))
  .map(e => e.outerHTML.slice(0, 80))
"""


def enter(browser: Browser, served: Served, path: str = "/", role: Role = Role.VIEW, **options: int) -> None:
    """Open a page by its URL with a token."""
    token = served.access.tokens[role]
    glue = "&" if "?" in path else "?"
    browser.open(f"http://{served.host}{path}{glue}token={token}", **options)


def with_rounds(served: Served, count: int = 3) -> int:
    """Return a running job that has some rounds."""
    job = served.rig.submit()
    served.rig.wait_for(job, "running")
    for number in range(1, count + 1):
        add_round(served, job, number)
    return job


def add_round(served: Served, job: int, number: int) -> None:
    workers = dict.fromkeys(served.rig.devices, 10)
    losses = {name: {"loss": 1.0 / number} for name in workers}
    tunnel = dict.fromkeys(workers, (4000 * number, 3000))
    score = {"host": {"accuracy": 1 - 0.5 / number}}
    served.rig.add_round(
        job,
        round=number,
        scores=score,
        workers=workers,
        by_worker=losses,
        metrics={"loss": 1.0 / number},
        tunnel=tunnel,
    )
    served.rig.begun[job].context.changed()


def test_pages_show_what_there_is_and_break_no_policy(browser: Browser, served: Served) -> None:
    job = with_rounds(served)
    enter(browser, served)
    assert "token" not in browser.driver.current_url
    browser.wait_for("live_devices", "csd2")
    browser.wait_for("live_jobs", "running")
    for path in (f"/jobs/{job}", "/devices/csd0", f"/compare?job={job}"):
        browser.go(f"http://{served.host}{path}")
        eventually(lambda: browser.run(TABLES), f"curves on {path}", 20, 0.05)
    assert browser.complaints() == []


def test_a_page_is_live(browser: Browser, served: Served) -> None:
    job = with_rounds(served)
    enter(browser, served, f"/jobs/{job}")
    browser.wait_for("live_state", "3 of 20")
    browser.run("window.untouched = true")
    add_round(served, job, 4)
    browser.wait_for("live_state", "4 of 20")
    label = "return document.getElementById('chart_scores').getAttribute('aria-label')"
    eventually(lambda: "0.875" in browser.run(label), "the new score in the curve", 20, 0.05)
    served.rig.finish(job)
    browser.wait_for("live_state", "done")
    assert browser.run("return window.untouched"), "the page was not loaded again"


def test_a_page_says_that_the_dashboard_has_ended(browser: Browser, served: Served) -> None:
    enter(browser, served)
    browser.wait_for("live_devices", "csd2")
    browser.run("source.close(); document.cookie = 'x=y'")
    browser.driver.delete_all_cookies()
    browser.run("connect()")
    browser.wait_for("connection", "no longer live")


def test_everything_is_reached_by_the_keyboard(browser: Browser, served: Served) -> None:
    job = with_rounds(served)
    enter(browser, served, role=Role.CONTROL)
    browser.wait_for("live_jobs", "running")
    browser.press(Keys.TAB)
    assert browser.focused == "To the content"
    browser.press(Keys.ENTER)
    assert browser.focused == "main"
    browser.tab_to(f"job_{job}")
    before = browser.text("live_summary")
    eventually(lambda: browser.text("live_summary") != before, "an update", 20, 0.05)
    served.rig.add_round(job, round=9)
    served.rig.begun[job].context.changed()
    assert browser.focused == f"job_{job}", "an update takes no focus away"
    browser.press(Keys.ENTER)
    browser.wait_for("live_state", "running")
    browser.tab_to("stop_asked")
    browser.press(Keys.ENTER)
    browser.run(UPDATED, "live_actions")  # before: the question was folded again, with the focus in it
    browser.tab_to("stop")
    browser.press(Keys.ENTER)
    browser.wait_for("live_state", "stopped")
    assert served.rig.info(job).state == "stopped"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_wrong(browser: Browser, served: Served, scheme: str) -> None:
    job = with_rounds(served)
    served.rig.set_device("csd1", state=DeviceState.FAULTY, reason="the flash is full")
    served.lines["csd0"] += ["a line of the log"] * 100
    enter(browser, served, role=Role.CONTROL)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    for path in ("/", f"/jobs/{job}", "/devices/csd0", f"/compare?job={job}", "/gone"):
        browser.go(f"http://{served.host}{path}")
        if path.startswith(("/jobs", "/dev")):
            eventually(lambda: browser.run(TABLES), f"curves on {path}", 20, 0.05)
        assert browser.faults() == [], path


def test_a_narrow_window_needs_no_scrolling_sideways(browser: Browser, served: Served) -> None:
    job = with_rounds(served)
    served.rig.set_device("csd1", state=DeviceState.FAULTY, reason="a/long/path" * 30)
    enter(browser, served, width=400)
    for path in ("/", f"/jobs/{job}", "/devices/csd1", f"/compare?job={job}"):
        browser.go(f"http://{served.host}{path}")
        browser.wait_for("main", "")
        eventually(lambda: browser.text("connection") == "", "a page", 20)
        eventually(lambda: browser.run(TOO_WIDE) == [], f"{path} fits: {browser.run(TOO_WIDE)}", 5, 0.1)


def test_hostile_texts_are_shown_as_texts(browser: Browser, served: Served) -> None:
    job = served.rig.submit()
    served.rig.set_device("csd0", state=DeviceState.FAULTY, reason=HOSTILE)
    served.lines["csd0"].append(HOSTILE)
    served.rig.add_round(
        job, by_worker={HOSTILE: {HOSTILE: 1.0}}, metrics={HOSTILE: 1.0}, workers={HOSTILE: 1}
    )
    served.feed.ask_now()
    enter(browser, served)
    browser.run("window.alert = () => { document.title = 'taken' }")
    browser.wait_for("live_devices", "<script>alert(1)</script>")
    for path, place in (("/devices/csd0", "live_log"), (f"/jobs/{job}", "live_workers")):
        browser.go(f"http://{served.host}{path}")
        browser.wait_for(place, "<script>alert(1)</script>")
        assert browser.run("return document.querySelectorAll('main img, main script').length") == 0
    assert "taken" not in browser.driver.title and browser.complaints() == []


def test_a_wrong_token_shows_nothing(browser: Browser, served: Served) -> None:
    browser.open(f"http://{served.host}/?token=guess")
    assert "not that of the dashboard" in browser.text("main")
    browser.open(f"http://{served.host}/")
    assert "csd0" not in browser.text("main")
    assert not [line for line in browser.complaints() if "403" not in line]


@contextmanager
def other_site(text: str) -> Iterator[str]:
    """A page of another origin, at another port of this machine."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def test_a_page_of_another_origin_reads_and_does_nothing(browser: Browser, served: Served) -> None:
    """Another port of the same machine is the same site: the browser sends the cookie along."""
    job = with_rounds(served)
    stop = f"http://{served.host}/jobs/{job}/stop"
    form = f'<form action="{stop}" method="post"><button id="go">go</button></form>'
    frame = f'<iframe src="http://{served.host}/" id="frame"></iframe>'
    with other_site(f"{form}{frame}") as url:
        enter(browser, served, role=Role.CONTROL)
        browser.wait_for("live_jobs", "running")
        browser.go(url)
        seen = browser.driver.execute_async_script(
            "const done = arguments[1];"
            "const source = new EventSource(arguments[0] + 'live/', { withCredentials: true });"
            "source.onmessage = () => done('events');"
            "source.onerror = () => fetch(arguments[0], { credentials: 'include', mode: 'no-cors' })"
            ".then(() => fetch(arguments[0], { credentials: 'include' })).then(() => done('read'))"
            ".catch(() => done('nothing'));",
            f"http://{served.host}/",
        )
        assert seen == "nothing"
        browser.element("#go").click()
        eventually(lambda: "page of another site" in browser.text("main"), "a refusal", 20)
    assert served.rig.info(job).state == "running"
