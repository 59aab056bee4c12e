"""Edge: forks of an end, each with a pipe on which it tells how it went."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from millpond.linux.signals import forget_stop_descriptor
from millpond.linux.syscalls import die_with_parent


def fork(body: Callable[[int], None]) -> tuple[int, int]:
    """Run ``body`` with a pipe's writing end in a child that dies with this process: its pid and the pipe's
    reading end. It keeps all descriptors: an end is gone for its peer only when its children are gone too.
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
