# SPDX-License-Identifier: Apache-2.0
"""Edge: fork children that report through a pipe, such as one that speaks netlink by pyroute2."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from millpond.linux.signals import forget_stop_descriptor
from millpond.linux.syscalls import die_with_parent

if TYPE_CHECKING:
    from pyroute2 import IPRoute

NO_LOCAL_ADDRESS = {"attrs": [["AF_INET6", {"attrs": [["IFLA_INET6_ADDR_GEN_MODE", 1]]}]]}
"""IFLA_AF_SPEC of an interface without an IPv6 link-local address: with one the kernel sends router
solicitations over the link for ever.
"""
_DONE, _FAILED = b"D", b"F"
_MAX_REPORT = 1000


def fork(body: Callable[[int], None]) -> tuple[int, int]:
    """Run ``body`` with the writing end of a pipe in a child that dies with this process; returns its pid and
    the pipe's reading end. The child keeps all descriptors: an endpoint is gone for its peer only when its
    children are gone too.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC)
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        os.close(reader)
        os.close(writer)
        raise
    if pid:
        os.close(writer)
        return pid, reader
    try:
        die_with_parent(signal.SIGKILL)
        if os.getppid() == parent:
            forget_stop_descriptor()
            body(writer)
    finally:
        os._exit(1)


def in_child(work: Callable[[IPRoute], None]) -> str:
    """Run ``work`` in a forked child and return the reason for its failure, empty for success. pyroute2 takes
    25 MiB, which a process would keep for its few messages.
    """

    def body(report: int) -> None:
        from pyroute2 import IPRoute
        from pyroute2.netlink.exceptions import NetlinkError

        try:
            with IPRoute() as netlink:
                work(netlink)
        except (NetlinkError, ValueError, OSError) as error:
            os.write(report, _FAILED + str(error).encode()[: _MAX_REPORT - 1])
        else:
            os.write(report, _DONE)

    try:
        pid, report = fork(body)
    except OSError as error:
        return str(error)
    try:
        answer = os.read(report, _MAX_REPORT)
    finally:
        os.close(report)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
    if answer == _DONE:
        return ""
    return answer[1:].decode(errors="replace") or "the process that should do it ended"
