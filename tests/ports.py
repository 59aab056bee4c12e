# SPDX-License-Identifier: Apache-2.0
"""Ports for programs that are told one, and listen at it later."""

from __future__ import annotations

import itertools
import os
import socket

_FIRST, _PROCESSES, _EACH = 10_000, 1000, 20
"""Of 1000 processes each has 20 ports, below those that the kernel gives to connections (from 32768)."""
_turns = itertools.count()


def unused_port() -> int:
    """Return a port at which nobody listens. No connection gets it from the kernel before it is used, and no
    other process of a test run.
    """
    begin = _FIRST + os.getpid() % _PROCESSES * _EACH
    for _ in range(_EACH):
        port = begin + next(_turns) % _EACH
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError(f"all ports from {begin} on are in use")
