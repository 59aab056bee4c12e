# SPDX-License-Identifier: Apache-2.0
"""Entry: the endpoint zygote's process: fork an endpoint for each request on its control socket."""

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

_FOR_ENDPOINTS_ONLY = {signal.SIGINT, signal.SIGTERM}
"""Signals that a terminal or service manager sends to the whole group: each endpoint handles its own."""
_PRELOADED = ("pyroute2", "pyroute2.netlink.exceptions")
"""Modules that an endpoint imports only in its own forks: loaded here once, they are shared by all."""


class ZygoteServer:
    """Serves requests on ``control`` until the process that holds its other end, the parent, is gone."""

    def __init__(self, control: socket.socket, parent_pidfd: int) -> None:
        self._control, self._parent_pidfd = control, parent_pidfd
        self._children: dict[int, int] = {}
        """Pids of the children by pidfd; a pid cannot be reused before its process has been reaped."""

    def serve(self) -> None:
        """Serve requests and reap exited children."""
        while True:
            ready = self._wait()
            for pidfd in ready & self._children.keys():
                os.waitpid(self._children.pop(pidfd), 0)
                os.close(pidfd)
            if self._parent_pidfd in ready or (self._control.fileno() in ready and not self._serve_request()):
                return

    def _wait(self) -> set[int]:
        poll = select.poll()
        for descriptor in (self._control.fileno(), self._parent_pidfd, *self._children):
            poll.register(descriptor, select.POLLIN)
        return {descriptor for descriptor, _ in poll.poll()}

    def _serve_request(self) -> bool:
        """Serve one request; False if there will be none any more."""
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
            # Parsed before the fork: in the endpoint this would leave 2 MiB of private memory.
            arguments = parse([*argv, "--status-fd", status, "--counters-fd", counters])
            pidfd = self._fork(arguments)
        except SystemExit:
            self._control.send(REFUSED + b"wrong arguments")
        except OSError as error:
            self._control.send(REFUSED + str(error.strerror).encode())
        else:
            self._control.send(STARTED)
            send_descriptors(self._control, [pidfd])

    def _fork(self, arguments: argparse.Namespace) -> int:
        parent = os.getpid()
        pid = os.fork()
        if not pid:
            self._control.close()
            for descriptor in (self._parent_pidfd, *self._children):
                os.close(descriptor)
            _run_endpoint(arguments, parent)
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        self._children[pidfd] = pid
        return pidfd


def _run_endpoint(arguments: argparse.Namespace, parent: int) -> NoReturn:
    code = 1
    try:
        die_with_parent(signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FOR_ENDPOINTS_ONLY)
        if os.getppid() == parent:
            code = run(arguments)
    except Exception:
        log.exception("the endpoint failed")
    finally:
        with suppress(OSError):
            sys.stderr.flush()
        os._exit(code)


def main() -> int:
    """Serve on the socket whose descriptor is the first argument."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    try:
        parent_pidfd = os.pidfd_open(os.getppid())
    except ProcessLookupError:
        return 0
    signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_ENDPOINTS_ONLY | {signal.SIGHUP})
    for module in _PRELOADED:
        importlib.import_module(module)
    native.resolve("auto")  # loads the C engine
    gc.collect()
    gc.freeze()
    ZygoteServer(control, parent_pidfd).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
