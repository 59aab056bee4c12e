# SPDX-License-Identifier: Apache-2.0
"""Edge: report the state of a service to systemd (sd_notify(3)); without systemd nothing happens."""

from __future__ import annotations

import os
import socket


def notify(state: str) -> bool:
    """Send ``READY=1``, ``STATUS=...``, ``WATCHDOG=1`` or ``STOPPING=1``; False if no manager takes it."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        try:
            sock.sendto(state.encode(), address)
        except OSError:  # a missing manager must not end the service
            return False
    return True


def watchdog_interval() -> float | None:
    """Return the seconds between two ``WATCHDOG=1``, half of the interval of the unit; None without a
    watchdog.
    """
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None  # meant for the process that started this one
    return int(microseconds) / 2e6 if microseconds.isdigit() and int(microseconds) else None
