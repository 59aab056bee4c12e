# SPDX-License-Identifier: Apache-2.0
"""Edge: turn signals that end a process in order into a readable descriptor, or an event."""

from __future__ import annotations

import os
import signal
import sys
import threading


def stop_event() -> threading.Event:
    """Return an event that SIGTERM, SIGINT and the end of this daemon's terminal set. Without a terminal
    SIGHUP changes nothing: a daemon reads its configuration when it starts. Nor is it logged: the handler may
    run while its thread holds the log's lock. Programs that this process executes have the default again.
    """
    stop = threading.Event()
    on_terminal = any(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr))
    signal.signal(signal.SIGHUP, lambda *_: stop.set() if on_terminal else None)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop


def stop_descriptor() -> int:
    """Return a descriptor that SIGTERM and SIGINT make readable from now on."""
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(writer)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: None)
    return reader


def forget_stop_descriptor() -> None:
    """Restore signals in a fork: SIGTERM ends it; SIGINT, which a terminal sends to the whole group, is for
    the main process alone.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
