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
from millpond.tunnel.datapath import native
from millpond.tunnel.endpoint.cli import parse, run
from millpond.tunnel.endpoint.zygote_client import MAX_REQUEST, REFUSED, STARTED

log = logging.getLogger("millpond.tunnel.endpoint.zygote")

_ENDS_ONLY = {signal.SIGINT, signal.SIGTERM}
"""Signals that a terminal or a service manager sends to all: each end decides for itself."""
_PRELOADED = ("pyroute2", "pyroute2.netlink.exceptions")
"""What an end imports in forks of its own: as forks of this process they find it there."""


class ZygoteServer:
    """Serves until the process ``employer`` is gone, which holds the other end of ``control``."""

    def __init__(self, control: socket.socket, employer: int) -> None:
        self._control, self._employer = control, employer
        self._children: dict[int, int] = {}
        """Handles of processes, and their numbers: nobody else's as long as they are not waited for."""

    def serve(self) -> None:
        """Answer requests, bury the dead."""
        while True:
            ready = self._wait()
            for handle in ready & self._children.keys():
                os.waitpid(self._children.pop(handle), 0)
                os.close(handle)
            if self._employer in ready or (self._control.fileno() in ready and not self._next()):
                return

    def _wait(self) -> set[int]:
        poll = select.poll()
        for descriptor in (self._control.fileno(), self._employer, *self._children):
            poll.register(descriptor, select.POLLIN)
        return {descriptor for descriptor, _ in poll.poll()}

    def _next(self) -> bool:
        """Answer a request; False if there will be none any more."""
        with suppress(ConnectionError):
            if request := self._control.recv(MAX_REQUEST):
                descriptors = receive_descriptors(self._control, 2)
                try:
                    self._answer(request.decode().split("\0"), descriptors)
                finally:
                    for descriptor in descriptors:
                        os.close(descriptor)
                return True
        return False

    def _answer(self, argv: list[str], descriptors: list[int]) -> None:
        status, counters = map(str, descriptors)
        try:
            # Not in the end, which would keep 2 MiB of its own for having done so.
            arguments = parse([*argv, "--status-fd", status, "--counters-fd", counters])
            handle = self._fork(arguments)
        except SystemExit:
            self._control.send(REFUSED + b"wrong arguments")
        except OSError as error:
            self._control.send(REFUSED + str(error.strerror).encode())
        else:
            self._control.send(STARTED)
            send_descriptors(self._control, [handle])

    def _fork(self, arguments: argparse.Namespace) -> int:
        parent = os.getpid()
        pid = os.fork()
        if not pid:
            self._control.close()
            for descriptor in (self._employer, *self._children):
                os.close(descriptor)
            _become_end(arguments, parent)
        try:
            handle = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        self._children[handle] = pid
        return handle


def _become_end(arguments: argparse.Namespace, parent: int) -> NoReturn:
    code = 1
    try:
        die_with_parent(signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDS_ONLY)
        if os.getppid() == parent:
            code = run(arguments)
    except Exception:
        log.exception("the end failed")
    finally:
        with suppress(OSError):
            sys.stderr.flush()
        os._exit(code)


def main() -> int:
    """Run on the socket whose number is the argument."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    try:
        employer = os.pidfd_open(os.getppid())
    except ProcessLookupError:
        return 0
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS_ONLY)
    for module in _PRELOADED:
        importlib.import_module(module)
    native.resolve("auto")  # loads it
    gc.collect()
    gc.freeze()
    ZygoteServer(control, employer).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
