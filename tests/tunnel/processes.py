# SPDX-License-Identifier: Apache-2.0
"""Observes other processes from outside."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path


def runs(pid: int) -> bool:
    """Whether the process still runs; a zombie that waits for its parent does not."""
    try:
        return _fields(pid)[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid: int) -> list[int]:
    """Those that the main thread of a process started and has not waited for; none if it is gone."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def cpu_share(seconds: float, *pids: int) -> float:
    """Processor seconds per second that these processes take together."""
    before, began = sum(map(_cpu_ticks, pids)), time.monotonic()
    time.sleep(seconds)
    spent = (sum(map(_cpu_ticks, pids)) - before) / os.sysconf("SC_CLK_TCK")
    return spent / (time.monotonic() - began)


def _cpu_ticks(pid: int) -> int:
    fields = _fields(pid)
    return int(fields[11]) + int(fields[12])


def _fields(pid: int) -> list[str]:
    """Of ``/proc/PID/stat``, from the state on."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
