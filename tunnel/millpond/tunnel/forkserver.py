"""Entry: the nursery's process: forks an end of a tunnel for each request on the socket that it is given."""

from __future__ import annotations

import argparse
import gc
import importlib
import logging
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from typing import NoReturn

from millpond.linux.sockets import receive_descriptors, send_descriptors
from millpond.linux.syscalls import die_with_parent
from millpond.tunnel.__main__ import parse, run
from millpond.tunnel.nursery import MAX_REQUEST, REFUSED, STARTED

log = logging.getLogger("millpond.tunnel.forkserver")

_PRELOADED = ("pyroute2", "pyroute2.netlink.exceptions")
"""What an end imports in forks of its own: as forks of this process they find it there."""


def main() -> int:
    """Serve until the process that holds the other end of the socket is gone."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    try:
        employer = os.pidfd_open(os.getppid())
    except ProcessLookupError:
        return 0
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)  # the ends decide on their own; the kernel buries them
    for module in _PRELOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    while _next(control, employer):
        pass
    return 0


def _next(control: socket.socket, employer: int) -> bool:
    """Answer a request; False once there will be none."""
    poll = select.poll()
    for descriptor in (control.fileno(), employer):
        poll.register(descriptor, select.POLLIN)
    if employer in dict(poll.poll()):
        return False
    with suppress(ConnectionError):
        if request := control.recv(MAX_REQUEST):
            descriptors = receive_descriptors(control, 2)
            try:
                _answer(control, employer, request.decode().split("\0"), descriptors)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            return True
    return False


def _answer(control: socket.socket, employer: int, argv: list[str], descriptors: list[int]) -> None:
    status, counters = map(str, descriptors)
    try:
        # Not in the end, which would keep 2 MiB of its own for having done so.
        arguments = parse([*argv, "--status-fd", status, "--counters-fd", counters])
        pid = os.fork()
    except SystemExit:
        control.send(REFUSED + b"wrong arguments")
        return
    except OSError as error:
        control.send(REFUSED + str(error.strerror).encode())
        return
    if not pid:
        control.close()
        os.close(employer)
        _become_end(arguments)
    handle = os.pidfd_open(pid)
    try:
        control.send(STARTED)
        send_descriptors(control, [handle])
    finally:
        os.close(handle)


def _become_end(arguments: argparse.Namespace) -> NoReturn:
    code = 1
    try:
        die_with_parent(signal.SIGKILL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        code = run(arguments)
    except Exception:
        log.exception("the end failed")
    finally:
        with suppress(OSError):
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
