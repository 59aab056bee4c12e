# SPDX-License-Identifier: Apache-2.0
"""Edge: restrict an endpoint's processes to what they need once they have started."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from millpond.base.errors import LocalError
from millpond.linux.confinement import seccomp
from millpond.linux.syscalls import (
    CAP_NET_ADMIN,
    filter_system_calls,
    has_system_call_filters,
    keep_capabilities,
    no_new_privileges,
)
from millpond.tunnel.datapath.context import PumpNeeds

log = logging.getLogger(__name__)

CONFINEMENTS = ("required", "best-effort")
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
_STANDARD_ERROR = 2


def why_unfiltered() -> str:
    """Return why pumps cannot have a filter of system calls here; empty if they can."""
    machine = os.uname().machine
    if not seccomp.known(machine):
        return f"no system call filter is known for {machine}"
    return "" if has_system_call_filters() else "the kernel takes no system call filter"


def check_confinement(confinement: str) -> str:
    """Return how pumps will be confined, in words for the status. Raises LocalError if they cannot be and
    ``confinement`` is ``required``.
    """
    reason = why_unfiltered()
    if not reason:
        return "on"
    if confinement == "required":
        raise LocalError(
            f"the tunnel's pumps cannot be confined: {reason}; to run them all the same, set confinement to "
            "'best-effort'"
        )
    log.warning("%s: pumps run without", reason)
    return f"off: {reason}"


def confine_endpoint(*capabilities: int) -> None:
    """Keep NET_ADMIN, to change the interface's MTU, and the transport's ``capabilities``."""
    no_new_privileges()
    keep_capabilities(CAP_NET_ADMIN, *capabilities)


def confine_pump(needs: PumpNeeds, descriptors: Iterable[int]) -> None:
    """Allow a pump only to carry packets and what it ``needs``: it can open no file or socket, start nothing
    and signal nobody, and keeps ``descriptors`` and standard error open, but not the endpoint's status.
    Raises OSError where the kernel has filters and takes none.
    """
    _close_others({_STANDARD_ERROR, *needs.descriptors, *descriptors})
    no_new_privileges()
    keep_capabilities(*needs.capabilities)
    if why_unfiltered():
        return  # the endpoint has said so, and was told to go on
    calls = seccomp.INTERPRETER | PACKETS | needs.calls
    filter_system_calls(seccomp.program(os.uname().machine, calls, needs.requests))


def _close_others(kept: set[int]) -> None:
    for number in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        if number not in kept:
            with suppress(OSError):  # the descriptor that the list was read by
                os.close(number)
