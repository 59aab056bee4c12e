# SPDX-License-Identifier: Apache-2.0
"""Edge (processes, the clock): the dashboard in a real browser without a window."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import psutil
from tests.host.browser import Browser, missing, started

from bench.experiment import Run, Unmeasured
from bench.people.costs import cpu_percent
from bench.people.fleet import Watched
from bench.rows import Row, summary
from system.support import MILLPOND

FIGURES = ("first_paint_s", "updates_per_s", "latency_s", "daemon_cpu_percent", "dashboard_mib")
_SETTLED = 3.0
"""Seconds after which a page's process has all that the page shows."""
_PAINT = "return performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"
_DRAWN = "return document.querySelector('canvas') ? performance.now() : null"
_COUNT = """
window.updates = []; window.seen = {};
new MutationObserver(() => {
  const now = Date.now(), round = document.getElementById("round")?.innerText;
  if (now - (window.updates.at(-1) ?? 0) >= 20) window.updates.push(now);
  if (round && !(round in window.seen)) window.seen[round] = now;
}).observe(document.body, { subtree: true, childList: true, characterData: true });
"""


@dataclass(frozen=True, slots=True)
class Served:
    """A dashboard's process, and its URL with the token."""

    process: psutil.Process
    url: str

    def page(self, path: str) -> str:
        """Return the URL of a page."""
        return self.url.split("/?")[0] + path


@contextmanager
def dashboard(watched: Watched) -> Iterator[Served]:
    """Run ``millpond dashboard`` of a fleet."""
    argv = [*MILLPOND, "dashboard", "--fleet", str(watched.emulation.directory), "--port", "0"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield Served(psutil.Process(process.pid), process.stdout.readline().split()[0])
        finally:
            process.terminate()


def measure_dashboard(run: Run, watched: Watched) -> Sequence[Row]:
    """Return the rows of FIGURES and their parts."""
    if complaint := missing():
        raise Unmeasured(complaint, *FIGURES)
    row = partial(summary, emulation=watched.about)
    with dashboard(watched) as served, started() as browser:
        browser.open(served.url)
        paints, drawn = _first_paints(run, watched, served, browser)
        updates, latencies = _updates(run, watched, served, browser)
        added, own = cpu_percent(run, watched, partial(_looking, served, browser))
        memory = _memory(watched, served, browser)
    worst = max(paints, key=lambda page: sorted(paints[page])[len(paints[page]) // 2])
    rows = [row("first_paint_s", f"first contentful paint of the slowest page ({worst})", paints[worst], "s")]
    for page, seconds in paints.items():
        rows.append(row(f"first_paint_s.{page}", f"first contentful paint: {page}", seconds, "s"))
    for page, seconds in drawn.items():
        rows.append(row(f"drawn_s.{page}", f"seconds until the first curve is drawn: {page}", seconds, "s"))
    return [
        *rows,
        row("updates_per_s", "updates a second of the page of a job that runs", updates, "1/s"),
        row("latency_s", "from a stored round until the page shows it", latencies, "s"),
        row("daemon_cpu_percent", "CPU that an open page adds to the daemon, of a core", added, "%"),
        row("dashboard_cpu_percent", "CPU of the dashboard's process then, of a core", own, "%"),
        row("dashboard_mib", "memory of the dashboard's process (PSS), a job's page open", memory, "MiB"),
    ]


def _memory(watched: Watched, served: Served, browser: Browser) -> list[float]:
    """Return the memory with the page of the running job, and then with that of an ended one, open."""
    found = []
    for job in (watched.runs, watched.ended):
        browser.go(served.page(f"/jobs/{job}"))
        _when(browser, _DRAWN)
        time.sleep(_SETTLED)
        found.append(served.process.memory_full_info().pss / (1 << 20))
    return found


def _first_paints(
    run: Run, watched: Watched, served: Served, browser: Browser
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the seconds of the first paint, and of the first curve, by page."""
    pages = {"fleet": "/", "running-job": f"/jobs/{watched.runs}", "ended-job": f"/jobs/{watched.ended}"}
    paints: dict[str, list[float]] = {name: [] for name in pages}
    drawn: dict[str, list[float]] = {name: [] for name in pages if name != "fleet"}
    for _ in range(run.repeats):
        for name, path in pages.items():
            browser.go(served.page(path))
            paints[name].append(_when(browser, _PAINT))
            if name in drawn:
                drawn[name].append(_when(browser, _DRAWN))
            browser.go("about:blank")
    return paints, drawn


def _when(browser: Browser, script: str) -> float:
    """Return the seconds since the page was asked for at which a script returns them."""
    end = time.monotonic() + 20
    while (found := browser.run(script)) is None:
        if time.monotonic() > end:
            raise RuntimeError(f"not within 20 s: {script}")
        time.sleep(0.01)
    return float(found) / 1e3


def _updates(run: Run, watched: Watched, served: Served, browser: Browser) -> tuple[list[float], list[float]]:
    """Return the updates of the running job's page in each second, and the latencies of its rounds."""
    seconds = 5 if run.quick else 30
    browser.go(served.page(f"/jobs/{watched.runs}"))
    stored = _Stored(watched)
    with stored.noted():
        browser.run(_COUNT)
        time.sleep(seconds)
    times = [at / 1e3 for at in browser.run("return window.updates")]
    seen = {int(number): at / 1e3 for number, at in browser.run("return window.seen").items()}
    first = times[0]
    counts = [sum(first + s <= at < first + s + 1 for at in times) for s in range(seconds - 1)]
    latencies = [_shown(seen, number) - at for number, at in stored.times.items() if number <= max(seen)]
    return [float(count) for count in counts], latencies[1:]


def _shown(seen: dict[int, float], number: int) -> float:
    """Return when a round, or a later one in its place, was on the page."""
    return min(at for shown, at in seen.items() if shown >= number)


class _Stored:
    """When each round of the running job was in the fleet's database."""

    def __init__(self, watched: Watched) -> None:
        self.times: dict[int, float] = {}
        self._path, self._job = watched.emulation.fleet.database, watched.runs
        self._ends = threading.Event()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note the rounds that are stored meanwhile."""
        thread = threading.Thread(target=self._note)
        thread.start()
        try:
            yield
        finally:
            self._ends.set()
            thread.join()

    def _note(self) -> None:
        query = "SELECT max(round) FROM results WHERE job = ?"
        with contextlib.closing(sqlite3.connect(f"file:{self._path}?mode=ro", uri=True)) as database:
            last = None
            while not self._ends.wait(0.01):
                number = database.execute(query, (self._job,)).fetchone()[0]
                if last is not None and number != last:
                    self.times[number] = time.time()
                last = number


@contextmanager
def _looking(served: Served, browser: Browser, watched: Watched) -> Iterator[psutil.Process]:
    browser.go(served.page(f"/jobs/{watched.runs}"))
    try:
        yield served.process
    finally:
        browser.go("about:blank")
