# SPDX-License-Identifier: Apache-2.0
"""Edge: tries whether other workers can be reached before a script waits for them for minutes."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import time
from collections.abc import Collection

from millpond.train.distributed.launch_messages import Launch

HOST = "host"
SECONDS = 10.0
_PORT = 60998
"""A port that is most likely closed: a refusal is an answer, too. It is one of those that the kernel gives,
which the host's guard leaves to the host: others it refuses a second later.
"""


def why_alone(launch: Launch, seconds: float = SECONDS) -> str:
    """Return why a device's worker cannot meet the others, "" if it can reach those that are tried: of each
    host its worker, and one device, since packets to all go through the host alike.
    """
    tried: dict[str, str] = {}
    meeting = [each for each in launch.names if each[0] == launch.master_address]
    for address, names in meeting if launch.elastic else launch.names:  # other elastic ones may be lost
        name = names.split()[0]
        if address != launch.address and _kind(name) not in map(_kind, tried.values()):
            tried[address] = name
    for address in unreachable(tried, seconds):
        worker, _, other = tried[address].partition(".")
        lost = "what devices send it" if worker == HOST else "what it forwards between them"
        where = "of one of both hosts" if other else "of the host"
        return (
            f"{tried[address]} at {address} does not answer: does a firewall {where} (Docker, ufw, "
            f"firewalld) drop {lost}? The interfaces are mp-*"
        )
    return ""


def _kind(name: str) -> tuple[bool, str]:
    """Return whether a worker is on a host, and the name of its host, if that is another one."""
    worker, _, other = name.partition(".")
    return worker == HOST, other


def unreachable(addresses: Collection[str], seconds: float) -> list[str]:
    """Return the addresses that do not answer within ``seconds``."""
    waiting = {address: _begun(address) for address in addresses}
    silent = [address for address, sock in waiting.items() if sock is None]
    deadline = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        open_ones = {sock.fileno(): address for address, sock in waiting.items() if sock}
        poll = select.poll()
        for sock in waiting.values():
            if sock:
                stack.enter_context(sock)
                poll.register(sock, select.POLLOUT)
        while open_ones and (left := deadline - time.monotonic()) > 0:
            for descriptor, _ in poll.poll(1000 * left):
                poll.unregister(descriptor)
                address = open_ones.pop(descriptor)
                sock = waiting[address]
                assert sock
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) not in (0, errno.ECONNREFUSED):
                    silent.append(address)
        return [*silent, *open_ones.values()]


def _begun(address: str) -> socket.socket | None:
    """Begin a connection; None if the kernel refuses at once."""
    sock = socket.socket()
    sock.setblocking(False)
    if sock.connect_ex((address, _PORT)) in (0, errno.EINPROGRESS, errno.ECONNREFUSED):
        return sock
    sock.close()
    return None
