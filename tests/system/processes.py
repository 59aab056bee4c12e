# SPDX-License-Identifier: Apache-2.0
"""Processes and mounts of emulated fleets, as this machine sees them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import psutil


def descendants(pid: int) -> list[psutil.Process]:
    """A process and all below it that are alive."""
    try:
        process = psutil.Process(pid)
        return running([process, *process.children(recursive=True)])
    except psutil.NoSuchProcess:
        return []


def running(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that live, zombies not counted."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def command(process: psutil.Process) -> list[str]:
    """Nothing if it has ended meanwhile."""
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def hostname(process: psutil.Process) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process.pid}/root/etc/hostname").read_text().strip()
    return ""


def _namespaced(process: psutil.Process, key: str) -> list[int]:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith(key):
                return [int(number) for number in line.split()[1:]]
    return []


def innermost_pid(process: psutil.Process) -> int:
    return (_namespaced(process, "NSpid:") or [0])[-1]


def parent_pid(process: psutil.Process) -> int:
    """The pid of its parent, in the innermost namespace; 0 if the parent is outside."""
    with contextlib.suppress(psutil.Error):
        parent = process.parent()
        if parent and hostname(parent) == hostname(process) and "agent" in " ".join(command(process)):
            return innermost_pid(parent)
    return 0


def mounts_below(directory: Path) -> list[str]:
    """What is mounted below a directory, as this process sees it."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if line.split()[4].startswith(str(directory))]
