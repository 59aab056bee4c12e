# SPDX-License-Identifier: Apache-2.0
"""Detection of progress in a tree of processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from millpond.linux import progress
from millpond.linux.progress import HangDetector, ProcessorShare, processor_time

from ..starved import starved
from ..waiting import eventually

BUSY = "while True: pass"
SLEEPING = "import time; time.sleep(100)"
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
LOOK = 0.2
START = 500_000_000
"""Nanoseconds, far more than two interpreters take to start."""


@contextmanager
def child_of_a_child(program: str) -> Iterator[int]:
    """The process ID of one that waits for another, which runs ``program``."""
    with subprocess.Popen([sys.executable, "-c", PARENT, program]) as process:
        try:
            yield process.pid
        finally:
            subprocess.run(["pkill", "-KILL", "-P", str(process.pid)], check=False)
            process.kill()


def advances(pid: int) -> bool:
    before = processor_time(pid)
    time.sleep(LOOK)
    after = processor_time(pid)
    assert before is not None and after is not None
    return after > before


def test_a_busy_child_makes_progress() -> None:
    with child_of_a_child(BUSY) as pid:
        eventually(lambda: (processor_time(pid) or 0) > START, "the child takes processor time")
        eventually(lambda: advances(pid), "progress is seen")


def test_a_sleeping_child_makes_none() -> None:
    with child_of_a_child(SLEEPING) as pid:
        eventually(lambda: not advances(pid) and not advances(pid), "no progress is seen any more")


def test_nothing_is_known_of_nobody() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
        assert processor_time(process.pid) is None


READER = "import time; from millpond.linux.progress import reading\nwith reading(): time.sleep(100)"


@pytest.mark.parametrize(("program", "hangs"), [(SLEEPING, True), (READER, False), (BUSY, False)])
def test_one_that_neither_computes_nor_reads_hangs(program: str, hangs: bool) -> None:
    with child_of_a_child(program) as pid:
        if program is not BUSY:
            eventually(lambda: not advances(pid) and not advances(pid), "it has started")
        detector = HangDetector(pid)
        assert not detector.is_hung()
        time.sleep(LOOK)
        assert detector.is_hung() == hangs


def test_one_that_waits_for_a_processor_does_not_hang() -> None:
    with child_of_a_child(BUSY) as pid:
        eventually(lambda: (processor_time(pid) or 0) > START, "the child takes processor time")
        with starved(pid):
            detector, share = HangDetector(pid), ProcessorShare(pid)
            share.is_lacking()
            for _ in range(4):
                time.sleep(LOOK)
                assert not detector.is_hung()
                assert share.is_lacking()


def _before_others(pid: int) -> None:
    """Give a child a processor of its own, nearly, on a machine that does other things, too."""
    child = eventually(lambda: psutil.Process(pid).children(), "the busy child has begun")[0]
    try:
        child.nice(-20)
    except psutil.AccessDenied:
        pytest.skip("only root has processes that go before others")


def test_one_that_computes_or_is_stopped_lacks_no_processor() -> None:
    with child_of_a_child(BUSY) as pid:
        _before_others(pid)
        share = ProcessorShare(pid)
        share.is_lacking()
        eventually(lambda: not share.is_lacking(), "it has half of a processor")
        for each in (child := psutil.Process(pid), *child.children(recursive=True)):
            each.suspend()
        eventually(lambda: not progress.is_runnable(pid), "it has stopped")
        assert not share.is_lacking()


def test_where_the_kernel_counts_nothing_nobody_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_of_one", lambda _pid: (0, 0))
    detector = HangDetector(os.getpid())
    assert processor_time(os.getpid()) is None
    assert not any(detector.is_hung() for _ in range(3))
