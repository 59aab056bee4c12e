"""Edge (/proc, psutil): whether processes do anything at all."""

from __future__ import annotations

from pathlib import Path

import psutil

HANG_SECONDS = 0.75
"""Whoever owes an answer and has done nothing in the second so many seconds will not answer. In the first
nobody looks: it takes some ms.
"""


def processor_time(pid: int) -> int | None:
    """Nanoseconds that the threads of a process, and of all below it, have run or waited for a processor.

    Threads that are busy, or would be if they were let, have more each time; those that hang do not. None
    where the kernel does not tell, or there is no such process.
    """
    try:
        top = psutil.Process(pid)
        return sum(_of_one(process.pid) for process in (top, *top.children(recursive=True)))
    except (OSError, ValueError, psutil.Error):
        return None


def _of_one(pid: int) -> int:
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        ran, waited, _ = (task / "schedstat").read_text().split()
        total += int(ran) + int(waited)
    return total
