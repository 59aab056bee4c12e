# SPDX-License-Identifier: Apache-2.0
"""Edge (/proc, psutil): the progress of processes, to detect those that hang.

A process that computes uses its processor. One that waits for a slow disk does not: its thread says so by its
name in /proc, which any process may read.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from millpond.linux.syscalls import set_thread_name, thread_name

HANG_SECONDS = 0.75
"""A process that owes an answer, and has used no processor time in the second interval of this length, hangs,
unless it reads. The first is not checked: a check takes some ms.
"""
READ_SECONDS = 60.0
"""A process that reads hangs after so long without processor time, which each finished read takes."""
_READING = b"reading samples"


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Say that this thread waits for data, or for a disk to take them."""
    before = thread_name()
    set_thread_name(_READING)
    try:
        yield
    finally:
        set_thread_name(before)


class HangDetector:
    """Detects that a process and its descendants hang; ``is_hung`` is to be called each HANG_SECONDS."""

    def __init__(self, pid: int) -> None:
        self._pid, self._since = pid, time.monotonic()
        self._seen: int | None = None

    def is_hung(self) -> bool:
        """Return whether the process has made no progress since the last call, or for READ_SECONDS if it
        reads. One that waits for a processor does not hang.
        """
        now = processor_time(self._pid)
        if now is None or now != self._seen:
            self._seen, self._since = now, time.monotonic()
            return False
        if is_runnable(self._pid):
            return False
        return not _is_reading(self._pid) or time.monotonic() - self._since > READ_SECONDS


def processor_time(pid: int) -> int | None:
    """Return the nanoseconds that the threads of a process and its descendants have run or waited for a
    processor.

    The sum grows while threads are runnable, and stands still when all of them are blocked. None where the
    kernel does not tell (it may count nothing: all figures are 0), or there is no such process.
    """
    try:
        return sum(sum(_of_one(process)) for process in _family(pid)) or None
    except (OSError, ValueError, psutil.Error):
        return None


def is_runnable(pid: int) -> bool:
    """Return whether a thread of a process or of its descendants runs, or waits for a processor."""
    with contextlib.suppress(OSError, psutil.Error):
        for process in _family(pid):
            stats = [(task / "stat").read_bytes() for task in Path(f"/proc/{process}/task").iterdir()]
            if any(stat.rpartition(b")")[2].split()[0] == b"R" for stat in stats):
                return True
    return False


class ProcessorShare:
    """Watches whether a process and its descendants have the processor time that they want."""

    def __init__(self, pid: int) -> None:
        self._pid, self._ran, self._at = pid, 0, 0.0

    def is_lacking(self) -> bool:
        """Return whether the process is runnable, and has run for less than half of the time since the last
        call. False where the kernel does not tell.
        """
        ran, now = 0, time.monotonic()
        with contextlib.suppress(OSError, ValueError, psutil.Error):
            ran = sum(_of_one(process)[0] for process in _family(self._pid))
        had, self._ran = ran - self._ran, ran
        seconds, self._at = now - self._at, now
        return ran > 0 and had < 0.5e9 * seconds and is_runnable(self._pid)


def _is_reading(pid: int) -> bool:
    with contextlib.suppress(OSError, psutil.Error):
        for process in _family(pid):
            names = (task / "comm" for task in Path(f"/proc/{process}/task").iterdir())
            if any(name.read_bytes().rstrip(b"\n") == _READING for name in names):
                return True
    return False


def _family(pid: int) -> list[int]:
    top = psutil.Process(pid)
    return [process.pid for process in (top, *top.children(recursive=True))]


def _of_one(pid: int) -> tuple[int, int]:
    """Return the nanoseconds that the threads of a process have run, and have waited."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    found = [(task / "schedstat").read_text().split() for task in tasks]
    return sum(int(one[0]) for one in found), sum(int(one[1]) for one in found)
