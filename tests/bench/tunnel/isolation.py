# SPDX-License-Identifier: Apache-2.0
"""Edge: runs the benchmark in its own namespaces: all its processes end with it, also when it is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from millpond.linux import syscalls
from millpond.linux.confinement.sandbox import Sandbox, exit_code, spawn

SCRATCH = Path("/run")
"""An empty file system that only the benchmark sees; it goes away with it."""


def run_isolated(body: Callable[[], int]) -> int:
    """The exit code of ``body``, run as the first process of its own PID, mount and network namespace.

    Ctrl-C kills that first process, and the kernel everything below it.
    """

    def inside() -> int:
        syscalls.mount("tmpfs", SCRATCH, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "mode=755")
        return body()

    pid = spawn(Sandbox(own_network=True, own_pids=True, new_session=True), inside)
    try:
        return exit_code(os.waitpid(pid, 0)[1])
    except KeyboardInterrupt:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return 130
