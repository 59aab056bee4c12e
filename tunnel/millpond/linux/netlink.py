# SPDX-License-Identifier: Apache-2.0
"""Edge: run netlink requests of pyroute2 in a child process."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from millpond.linux.child import fork

if TYPE_CHECKING:
    from pyroute2 import IPRoute

NO_LOCAL_ADDRESS = {"attrs": [["AF_INET6", {"attrs": [["IFLA_INET6_ADDR_GEN_MODE", 1]]}]]}
"""IFLA_AF_SPEC of an interface without an IPv6 link-local address: with one the kernel sends router
solicitations over the link for ever.
"""
_DONE, _FAILED = b"D", b"F"
_MAX_REPORT = 1000


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
