# SPDX-License-Identifier: Apache-2.0
"""Edge (the process): standard streams that are closed, or that another program has made non-blocking."""

from __future__ import annotations

import io
import os
import select
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_NAMES = ("stdin", "stdout", "stderr")


class WholeOutput(io.RawIOBase):
    """Writes all that it is given to a descriptor, and waits where that does not take it yet. A program
    that shares the descriptor may have made it non-blocking (rsync, ssh, node), and needs it so.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Return whether it is a terminal."""
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        """Return that it can be written."""
        return True

    def write(self, data: ReadableBuffer, /) -> int:
        """Write all data. Raises OSError."""
        left = memoryview(data).cast("B")
        size = len(left)
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:
                _wait(self._descriptor, select.POLLOUT)
        return size


def read(descriptor: int, most: int) -> bytes:
    """Return what there is to read, once there is something; b"" at the end. Raises OSError."""
    while True:
        try:
            return os.read(descriptor, most)
        except BlockingIOError:
            _wait(descriptor, select.POLLIN)


def _wait(descriptor: int, what: int) -> None:
    poll = select.poll()
    poll.register(descriptor, what)
    poll.poll()


def prepare() -> None:
    """Open /dev/null as each standard stream that is closed, and let prints wait for output that does not
    block.
    """
    for number, name in enumerate(_NAMES):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            os.set_inheritable(null, True)  # what is started has standard streams, too
            setattr(sys, name, open(null, "w" if number else "r", errors="replace"))  # noqa: SIM115, PTH123
        elif number and not os.get_blocking(number):
            text = getattr(sys, name)
            waiting = io.BufferedWriter(WholeOutput(number))
            setattr(
                sys, name, io.TextIOWrapper(waiting, text.encoding, text.errors, line_buffering=number == 2)
            )
