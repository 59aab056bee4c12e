# SPDX-License-Identifier: Apache-2.0
"""Hooks of all tests: an unexpected warning in the log fails a test; mounts get a namespace of their own."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import resource
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from millpond.linux.confinement import sandbox_exec
from millpond.linux.confinement.sandbox import Sandbox, spawn
from millpond.linux.zygote.client import Zygote
from millpond.train.worker.start import workers_zygote

from . import effort, schedule

InNamespace = Callable[[Callable[[], None]], None]
SKIPPED = 77
COVERAGE = "COVERAGE_PROCESS_CONFIG"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--effort``."""
    parser.addoption(
        "--effort", choices=effort.EFFORTS, default="quick", help="how often tests repeat what they try"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose the effort before test modules read it, and divide the tests if several processes share them."""
    gc.disable()  # until all modules are imported: half of the time would go into looking through them
    effort.choose(config.getoption("--effort"))
    # An example may take long because others compute.
    slow = [HealthCheck.too_slow]
    examples = effort.scaled(quick=25, full=100)
    settings.register_profile("tests", deadline=None, suppress_health_check=slow, max_examples=examples)
    settings.load_profile("tests")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # one process has the worlds of a thousand tests
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if COVERAGE in os.environ:  # make coverage: sandboxed processes and zygotes measure themselves, too
        sandbox_exec.KEPT_VARIABLES.append(COVERAGE)
    if plugin := schedule.plugin(config):
        config.pluginmanager.register(plugin)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no module that has no test of the serial pass, where that alone is asked for."""
    if config.getoption("markexpr") != "serial" or collection_path.suffix != ".py":
        return None
    return b"mark.serial" not in collection_path.read_bytes() or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that are marked for a greater effort."""
    marks = effort.marks_left_out()
    left_out = [item for item in items if not marks.isdisjoint(mark.name for mark in item.iter_markers())]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if marks.isdisjoint(mark.name for mark in item.iter_markers())]


def pytest_collection_finish() -> None:
    """Let later collections of garbage, and those of forks, leave alone what lives as long as the process."""
    gc.freeze()
    gc.enable()


class _Unexpected(logging.Handler):
    """Collects the records from WARNING up that match none of ``expected``."""

    def __init__(self, expected: list[re.Pattern[str]]) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self._expected = expected

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if not any(pattern.search(text) for pattern in self._expected):
            self.lines.append(f"{record.levelname} {record.name}: {text}")


@pytest.fixture(autouse=True)
def no_unexpected_log(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail on log records from WARNING up, but for those of ``@pytest.mark.expected_log(regex)``."""
    marks = request.node.iter_markers("expected_log")
    handler = _Unexpected([re.compile(pattern) for mark in marks for pattern in mark.args])
    root = logging.getLogger()
    root.addHandler(handler)
    yield
    root.removeHandler(handler)
    if handler.lines:
        pytest.fail("unexpected in the log:\n" + "\n".join(handler.lines), pytrace=False)


@pytest.fixture
def in_namespace(tmp_path: Path) -> InNamespace:
    """Run a function in a process with mounts and pids of its own: nothing that it does outlives it."""

    def run(body: Callable[[], None]) -> None:
        report = tmp_path / "report"

        def inside() -> int:
            try:
                body()
            except pytest.skip.Exception as why:
                report.write_text(str(why))
                return SKIPPED
            except BaseException:  # noqa: BLE001 - the parent raises it
                report.write_text(traceback.format_exc())
                return 1
            return 0

        pid = spawn(Sandbox(own_pids=True), inside)
        try:
            status = _wait(pid, 100)
        finally:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        if status == SKIPPED << 8:
            pytest.skip(report.read_text())
        if status != 0:
            pytest.fail(report.read_text() if report.exists() else f"the namespace ended with {status}")

    return run


def _wait(pid: int, seconds: float) -> int:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.005)
    return -1


@pytest.fixture
def wait() -> Callable[[int, float], int]:
    return _wait


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """The zygote of all workers that tests start: torch is loaded once, before the first of them."""
    made = workers_zygote(idle=3600.0)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        number = theirs.fileno()  # nothing is prepared, so that any descriptors will do for the memory
        first = made.start(Sandbox(), ["3", "--shared", "4", "5", "--code", "/"], [number, number, number], 2)
    assert first.wait() == 0
    yield made
    made.close()


def _why_no_fuse() -> str | None:
    if os.geteuid() != 0:
        return "mounting needs root"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        return f"/dev/fuse: {error.strerror}"
    return None


@pytest.fixture(scope="session")
def fuse_usable() -> None:
    if reason := _why_no_fuse():
        pytest.skip(reason)
