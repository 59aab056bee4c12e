# SPDX-License-Identifier: Apache-2.0
"""Edge: other work on a machine or in a cgroup: gzip, as the Stannis paper has it."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from .cgroups import Cgroup


def count_for(share: float, threads: int = 1) -> int:
    """How many gzip take ``share`` of the processor time for which they compete with ``threads`` of a worker:
    the scheduler gives everyone the same. 0.75 is 3 for each thread, 0.5 is 1.
    """
    return round(threads * share / (1 - share))


@dataclass(frozen=True, slots=True)
class Load:
    """Running gzip processes."""

    processes: tuple[psutil.Process, ...]

    def cpu_seconds(self) -> float:
        """Of processor time that they have had so far: what the load really was."""
        spent = [process.cpu_times() for process in self.processes]
        return sum(times.user + times.system for times in spent)


@contextlib.contextmanager
def gzip(count: int, group: Cgroup | None = None) -> Iterator[Load]:
    """``count`` processes that compress zeros until the end of the context, in ``group`` if it is given."""
    with contextlib.ExitStack() as undo:
        processes = []
        zeros = undo.enter_context(open("/dev/zero", "rb"))  # noqa: PTH123
        for _ in range(count):
            process = subprocess.Popen(["gzip", "-9", "-c"], stdin=zeros, stdout=subprocess.DEVNULL)
            undo.callback(process.wait)
            undo.callback(process.kill)
            processes.append(psutil.Process(process.pid))
            if group is not None:
                group.add(process.pid)
        yield Load(tuple(processes))
