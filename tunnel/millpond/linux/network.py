# SPDX-License-Identifier: Apache-2.0
"""Edge: configure a new network namespace: its loopback, and ports below 1024 for all users."""

from __future__ import annotations

import fcntl
import socket
import struct
from pathlib import Path

_SIOCGIFFLAGS = 0x8913
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 0x1
_IFREQ = struct.Struct("16sh22x")


def loopback_up() -> None:
    """Bring up ``lo`` of this network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        answer = fcntl.ioctl(sock, _SIOCGIFFLAGS, _IFREQ.pack(b"lo", 0))
        _, flags = _IFREQ.unpack(answer)
        fcntl.ioctl(sock, _SIOCSIFFLAGS, _IFREQ.pack(b"lo", flags | _IFF_UP))


def allow_low_ports() -> None:
    """Let any user of this network namespace listen on ports below 1024, as sshd does."""
    Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").write_text("0")
