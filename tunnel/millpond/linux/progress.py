# SPDX-License-Identifier: Apache-2.0
"""Edge (/proc, psutil): measure the processor time of processes, to detect those that hang."""

from __future__ import annotations

from pathlib import Path

import psutil

HANG_SECONDS = 0.75
"""A process that owes an answer, and has used no processor time in the second interval of this length, hangs.
The first is not checked: a check takes some ms.
"""


def processor_time(pid: int) -> int | None:
    """Return the nanoseconds that the threads of a process and its descendants have run or waited for a
    processor.

    The sum grows while threads are runnable, and stands still when all of them are blocked. None where the
    kernel does not tell, or there is no such process.
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
