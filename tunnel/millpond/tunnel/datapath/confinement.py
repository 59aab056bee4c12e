# SPDX-License-Identifier: Apache-2.0
"""Edge: restrict an endpoint's processes to what they need once they have started."""

from __future__ import annotations

import logging
import os

from millpond.linux.confinement import seccomp
from millpond.linux.syscalls import (
    CAP_NET_ADMIN,
    drop_capabilities,
    filter_system_calls,
    keep_capabilities,
    no_new_privileges,
)

log = logging.getLogger(__name__)

PACKETS = frozenset(
    [
        "read",
        "readv",
        "write",
        "writev",
        "poll",
        "ppoll",
        "epoll_create1",
        "epoll_ctl",
        "epoll_wait",
        "epoll_pwait",
    ]
)
"""System calls to carry packets on open descriptors. No fcntl: with F_SETOWN it could signal any process."""


def confine_endpoint(*capabilities: int) -> None:
    """Keep NET_ADMIN, to change the interface's MTU, and the transport's ``capabilities``."""
    no_new_privileges()
    keep_capabilities(CAP_NET_ADMIN, *capabilities)


def confine_pump(calls: frozenset[str], *, privileged: bool) -> None:
    """Allow a pump only to carry packets and to make ``calls``: it can open no file or socket, start nothing
    and signal nobody. Without ``privileged`` it keeps no capability either.
    """
    no_new_privileges()
    if not privileged:
        drop_capabilities()
    machine = os.uname().machine
    if not seccomp.known(machine):
        log.warning("no system call filter is known for %s", machine)
        return
    try:
        filter_system_calls(seccomp.program(machine, seccomp.INTERPRETER | PACKETS | calls))
    except OSError as error:  # a kernel without seccomp
        log.warning("the kernel takes no system call filter: %s", error)
