# SPDX-License-Identifier: Apache-2.0
"""Edge: configure a new network namespace: its loopback, and low ports; and see what listens in one."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from pathlib import Path

_SIOCGIFFLAGS = 0x8913
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 0x1
_LISTENS = "0A"
_LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")
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


def listening() -> dict[int, int]:
    """Return the TCP ports of this network namespace at which others than this machine may begin connections,
    by the inodes of their sockets.
    """
    found: dict[int, int] = {}
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError), Path("/proc/self/net", name).open() as table:
            next(table)
            for line in table:  # those that listen come first
                _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
                if state != _LISTENS:
                    break
                address, port = local.split(":")
                if address not in _LOOPBACK:
                    found[int(inode)] = int(port, 16)
    return found


def own_sockets() -> set[int]:
    """Return the inodes of the sockets of all processes that this one sees and may look at."""
    found: set[int] = set()
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            for path in folder.iterdir():
                with contextlib.suppress(OSError):
                    kind, _, inode = str(path.readlink()).partition(":")
                    if kind == "socket":
                        found.add(int(inode[1:-1]))
    return found
