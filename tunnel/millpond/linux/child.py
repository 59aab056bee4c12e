# SPDX-License-Identifier: Apache-2.0
"""Edge: fork children that report through a pipe."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from millpond.linux.signals import forget_stop_descriptor
from millpond.linux.syscalls import die_with_parent


def fork(body: Callable[[int], None]) -> tuple[int, int]:
    """Run ``body`` with the writing end of a pipe in a child that dies with this process; returns its pid and
    the pipe's reading end. The child keeps all descriptors: an endpoint is gone for its peer only when its
    children are gone too.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC)
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        os.close(reader)
        os.close(writer)
        raise
    if pid:
        os.close(writer)
        return pid, reader
    try:
        die_with_parent(signal.SIGKILL)
        if os.getppid() == parent:
            forget_stop_descriptor()
            body(writer)
    finally:
        os._exit(1)
