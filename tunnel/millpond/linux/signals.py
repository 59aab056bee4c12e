# SPDX-License-Identifier: Apache-2.0
"""Edge: turn SIGTERM and SIGINT into a readable descriptor, for processes that loop over descriptors."""

from __future__ import annotations

import os
import signal


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
