# SPDX-License-Identifier: Apache-2.0
"""Processes that want a processor and do not get it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest


@contextlib.contextmanager
def starved(pid: int) -> Iterator[None]:
    """Keep a process and its descendants from their processor for most of each second: another process, in
    real time, has it. At the end that is gone.
    """
    processor = {min(os.sched_getaffinity(0))}
    top = psutil.Process(pid)
    for each in [top, *top.children(recursive=True)]:
        for thread in each.threads():
            os.sched_setaffinity(thread.id, processor)
    busy = f"import os; os.sched_setaffinity(0, {processor}); print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-S", "-c", busy], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout and other.stdout.readline()
            try:
                os.sched_setscheduler(other.pid, os.SCHED_FIFO, os.sched_param(1))
            except PermissionError:
                pytest.skip("only root has processes in real time")
            yield
        finally:
            other.kill()
