# SPDX-License-Identifier: Apache-2.0
"""Edge: measures the resources of process trees: time, context switches, memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

_TICK = os.sysconf("SC_CLK_TCK")


class Usage(NamedTuple):
    """Seconds of processor time, how the kernel's ticks split it, context switches."""

    seconds: float = 0
    user_ticks: float = 0
    system_ticks: float = 0
    sleeps: float = 0
    preemptions: float = 0

    def plus(self, other: Usage) -> Usage:
        """Both together."""
        return Usage._make((ours + theirs for ours, theirs in zip(self, other, strict=True)))

    def since(self, before: Usage) -> Usage:
        """What was used between ``before`` and this."""
        return Usage._make((now - then for now, then in zip(self, before, strict=True)))


def tree(roots: Iterable[int]) -> list[int]:
    """The processes ``roots`` and all below them."""
    found: list[int] = []
    for pid in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return found


def usage(roots: Iterable[int]) -> Usage:
    """Of the processes ``roots`` and all below them, until now."""
    total = Usage()
    for pid in tree(roots):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                total = total.plus(_of_task(task))
    return total


def _of_task(task: Path) -> Usage:
    fields = (task / "stat").read_text().rsplit(")", 1)[1].split()
    ticks = float(fields[11]), float(fields[12])
    status = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines() if ":" in line)
    schedstat = task / "schedstat"  # to the nanosecond, where the kernel keeps it
    exact = int(schedstat.read_text().split()[0]) / 1e9 if schedstat.exists() else sum(ticks) / _TICK
    return Usage(
        exact, *ticks, int(status["voluntary_ctxt_switches"]), int(status["nonvoluntary_ctxt_switches"])
    )


def proportional_memory(roots: Iterable[int]) -> float:
    """MiB (PSS) of the processes ``roots`` and all below them: a shared page counts its part to each."""
    total = 0
    for pid in tree(roots):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            total += psutil.Process(pid).memory_full_info().pss
    return total / (1 << 20)
