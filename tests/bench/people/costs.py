# SPDX-License-Identifier: Apache-2.0
"""Edge (processes, the clock): what watchers, ``millpond top`` and ``millpond metrics`` cost."""

from __future__ import annotations

import contextlib
import os
import pty
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial

import psutil
from tests.waiting import eventually

from bench.experiment import Run
from bench.people.fleet import Watched
from bench.rows import Row, summary
from millpond.host.client.daemon_client import DaemonClient
from system.support import MILLPOND

WATCHERS = 20
_SETTLE = 3.0
"""Seconds after a viewer has started in which it loads what is there."""
Viewer = Callable[[Watched], AbstractContextManager[psutil.Process | None]]


def cpu_percent(run: Run, watched: Watched, viewer: Viewer) -> tuple[list[float], list[float]]:
    """Return what a viewer adds to the daemon's CPU, and its own, in percent of a core, for each repeat: the
    seconds with it alternate with as many without it.
    """
    seconds = 3.0 if run.quick else 8.0  # five times with and without a viewer, for each of three
    added, own = list[float](), list[float]()
    for _ in range(run.repeats):
        usual = _spent(watched.daemon, seconds)
        with viewer(watched) as process:
            time.sleep(_SETTLE)
            before = _cpu(process) if process else 0.0
            added.append(_spent(watched.daemon, seconds) - usual)
            own.append(100 * (_cpu(process) - before) / seconds if process else 0.0)
    return added, own


def _spent(daemon: psutil.Process, seconds: float) -> float:
    """Return the percentage of a core that the daemon uses in the next ``seconds``."""
    before = _cpu(daemon)
    time.sleep(seconds)
    return 100 * (_cpu(daemon) - before) / seconds


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextmanager
def watchers(watched: Watched) -> Iterator[None]:
    """Follow the running job by WATCHERS connections of this process."""
    clients = [DaemonClient(watched.emulation.directory) for _ in range(WATCHERS)]
    with ExitStack() as stack:
        for client in clients:
            stack.enter_context(client)
            thread = threading.Thread(target=_follow, args=(client, watched.runs), daemon=True)
            thread.start()
        yield


def _follow(client: DaemonClient, job: int) -> None:
    with contextlib.suppress(Exception):  # its connection is closed at the end
        for _ in client.watch(job):
            pass


@contextmanager
def top(watched: Watched) -> Iterator[psutil.Process]:
    """Run ``millpond top`` in a terminal of 80 x 24."""
    master, slave = pty.openpty()
    os.set_inheritable(slave, True)
    argv = [*MILLPOND, "top", "--fleet", str(watched.emulation.directory)]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    shown = _Reader(master)
    with subprocess.Popen(
        argv, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
    ) as process:
        os.close(slave)
        try:
            eventually(lambda: "csd0" in shown.text, "the fleet in millpond top", 60.0)
            yield psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(20)
            os.close(master)


class _Reader:
    """Reads what a terminal's program prints, for as long as it does."""

    def __init__(self, descriptor: int) -> None:
        self.text = ""
        self._descriptor = descriptor
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while data := os.read(self._descriptor, 1 << 16):
                self.text = (self.text + data.decode(errors="replace"))[-(1 << 20) :]


@contextmanager
def metrics(watched: Watched) -> Iterator[str]:
    """Run ``millpond metrics``; yields its URL when it answers."""
    where = f"127.0.0.1:{_free_port()}"
    url = f"http://{where}/metrics"
    argv = [*MILLPOND, "metrics", "--fleet", str(watched.emulation.directory), "--listen", where]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL) as process:
        try:
            eventually(lambda: 'device="csd0"' in _get(url), "the metrics of csd0", 60.0)
            yield url
        finally:
            process.terminate()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _get(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310, a URL of our own
            return str(answer.read().decode())
    except (urllib.error.URLError, OSError):
        return ""


def measure_watchers(run: Run, watched: Watched) -> Sequence[Row]:
    """Return the row ``watch_cpu``."""
    added, _ = cpu_percent(run, watched, watchers)
    about = f"daemon's CPU for {WATCHERS} watchers of one job, of a core, above that without them"
    return [summary("watch_cpu", about, added, "%", emulation=watched.about)]


def measure_top(run: Run, watched: Watched) -> Sequence[Row]:
    """Return the row ``top_cpu_percent``, and its two parts."""
    added, own = cpu_percent(run, watched, top)
    both = [a + b for a, b in zip(added, own, strict=True)]
    row = partial(summary, unit="%", emulation=watched.about)
    about = "CPU of 'millpond top' at 1 Hz, of a core"
    return [
        row("top_cpu_percent", f"{about}, client and daemon", both),
        row("top_cpu_client", f"{about}, the client alone", own),
        row("top_cpu_daemon", f"{about}, what it adds to the daemon", added),
    ]


def measure_scrape(run: Run, watched: Watched) -> Sequence[Row]:
    """Return the row ``scrape_ms`` and the size of what is scraped."""
    seconds, sizes = list[float](), list[float]()
    with metrics(watched) as url:
        for _ in range(5 * run.repeats):
            before = time.perf_counter()
            text = _get(url)
            seconds.append(1e3 * (time.perf_counter() - before))
            sizes.append(len(text) / 1e3)
            time.sleep(1)
    about = "a scrape of 'millpond metrics', one a second"
    return [
        summary("scrape_ms", about, seconds, "ms", emulation=watched.about),
        summary("scrape_kb", "size of a scrape", sizes, "kB", emulation=watched.about),
    ]
