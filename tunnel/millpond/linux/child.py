# SPDX-License-Identifier: Apache-2.0
"""Edge: fork children that report through a pipe, such as one that speaks netlink by pyroute2."""

from __future__ import annotations

import errno
import os
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from millpond.linux.signals import forget_stop_descriptor
from millpond.linux.syscalls import die_with_parent

if TYPE_CHECKING:
    from pyroute2 import IPRoute

_NO_LOCAL_ADDRESS = {"attrs": [["AF_INET6", {"attrs": [["IFLA_INET6_ADDR_GEN_MODE", 1]]}]]}
_NO_IPV6 = (errno.EAFNOSUPPORT, errno.EOPNOTSUPP)
CHILD_SECONDS, KILL_SECONDS = 30.0, 3.0
_LOOK_SECONDS = 0.002
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
    25 MiB, which a process would keep for its few messages. The child is killed if it does not end in time.
    """

    def body(report: int) -> None:
        from pyroute2 import IPRoute
        from pyroute2.netlink.exceptions import NetlinkError

        try:
            with IPRoute() as netlink:
                work(netlink)
        except (NetlinkError, ValueError, OSError) as error:
            text = " ".join(str(error).split())
            os.write(report, _FAILED + text.encode()[: _MAX_REPORT - 2] + b"\n")
        else:
            os.write(report, _DONE + b"\n")

    try:
        pid, report = fork(body)
    except OSError as error:
        return str(error)
    try:
        answer = first_line(report, CHILD_SECONDS)
    except TimeoutError as error:
        return str(error)
    finally:
        os.close(report)
        end(pid)
    if answer == _DONE.decode():
        return ""
    return answer.removeprefix(_FAILED.decode()) or "the process that should do it ended"


def leave_out_local_address(netlink: IPRoute, index: int) -> None:
    """Give an interface no IPv6 link-local address: with one the kernel sends router solicitations over the
    link for ever. A kernel or an interface without IPv6 (ipv6.disable=1, an MTU below 1280) needs nothing.
    """
    from pyroute2.netlink.exceptions import NetlinkError

    try:
        netlink.link("set", index=index, IFLA_AF_SPEC=_NO_LOCAL_ADDRESS)
    except NetlinkError as error:
        if error.code not in _NO_IPV6:
            raise


def end(pid: int) -> None:
    """Kill and reap a child, if it has not ended yet. One that the kernel does not let go is left behind."""
    last = time.monotonic() + KILL_SECONDS
    with suppress(ChildProcessError, ProcessLookupError):
        while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < last:
            os.kill(pid, signal.SIGKILL)  # a child that was not waited for yet: nobody else has its pid
            time.sleep(_LOOK_SECONDS)


def first_line(descriptor: int, seconds: float) -> str:
    """Return the first line that a child writes to a pipe, with what there is of it if the child ends. Raises
    TimeoutError after so many seconds.
    """
    poll, end, line = select.poll(), time.monotonic() + seconds, b""
    poll.register(descriptor, select.POLLIN)
    while not line.endswith(b"\n") and len(line) < _MAX_REPORT:
        if not poll.poll(max(0.0, 1000 * (end - time.monotonic()))):
            raise TimeoutError(f"the process said nothing for {seconds:g} s")
        if not (byte := os.read(descriptor, 1)):  # the next lines are another reader's
            break
        line += byte
    return line.decode(errors="replace").strip()
