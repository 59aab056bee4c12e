# SPDX-License-Identifier: Apache-2.0
"""Edge (signals): the end of a copy at Ctrl-C, at a point where nothing unfinished stays."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class CopyEnd:
    """Knows the signal by which a user has ended the copy, 0 while none has come."""

    def __init__(self) -> None:
        self.signal = 0

    def is_asked_for(self) -> bool:
        """Return whether the copy is to end."""
        return bool(self.signal)

    def note(self, number: int, _frame: object) -> None:
        """Note a signal; the second one interrupts whatever is under way."""
        if self.signal:
            raise KeyboardInterrupt
        self.signal = number


@contextlib.contextmanager
def noted_signals() -> Iterator[CopyEnd]:
    """Note Ctrl-C, SIGTERM and SIGHUP within the block, instead of being interrupted anywhere."""
    end = CopyEnd()
    before = {number: signal.signal(number, end.note) for number in _SIGNALS}
    try:
        yield end
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
