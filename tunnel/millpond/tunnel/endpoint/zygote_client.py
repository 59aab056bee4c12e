# SPDX-License-Identifier: Apache-2.0
"""Edge: start and use the endpoint zygote, whose forks are endpoints that share its memory."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

from millpond.linux import sockets

log = logging.getLogger(__name__)

MAX_REQUEST = 4096
STARTED, REFUSED = b"S", b"R"
_ANSWER_SECONDS = 30.0
"""Seconds for an answer; the first comes only once the zygote has started, on a loaded machine."""


class EndpointProcess:
    """An endpoint's process that the zygote forked. Thread-safe."""

    def __init__(self, pidfd: int) -> None:
        self._pidfd: int | None = pidfd
        self._lock = threading.Lock()

    def terminate(self) -> None:
        """Ask the process to end (SIGTERM)."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process (SIGKILL)."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with self._lock, suppress(ProcessLookupError):
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, number)

    def wait(self) -> None:
        """Wait until the process has ended; for one thread only."""
        if self._pidfd is None:
            return
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        poll.poll()
        with self._lock:
            os.close(self._pidfd)
            self._pidfd = None


class EndpointZygote:
    """Forks endpoints from a preloaded process, which starts with the first request, and again after it was
    killed.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self.pid = 0
        """The zygote's pid, 0 before it has started."""

    def start(self, arguments: Sequence[str], status: int, counters: int) -> EndpointProcess:
        """Start an endpoint with the ``arguments`` of ``python -m millpond.tunnel``, and with the descriptors
        that get its ``status`` and ``counters``. It dies with the zygote, and the zygote with this process.
        Raises OSError.
        """
        request = "\0".join(arguments).encode()
        if len(request) > MAX_REQUEST:
            raise OSError("the arguments are too long")
        with self._lock:
            try:
                return self._request_start(request, status, counters)
            except TimeoutError:
                self._disconnect()
                raise
            except ConnectionError:
                self._disconnect()
                log.info("the zygote of tunnel endpoints was killed: starting another")
                return self._request_start(request, status, counters)

    def _request_start(self, request: bytes, status: int, counters: int) -> EndpointProcess:
        if self._control is None:
            self._control, self.pid = _start_process()
        self._control.send(request)
        sockets.send_descriptors(self._control, [status, counters])
        answer = self._control.recv(MAX_REQUEST)
        if not answer:
            raise ConnectionResetError("the zygote is gone")
        if answer[:1] == REFUSED:
            raise OSError(answer[1:].decode(errors="replace"))
        return EndpointProcess(*sockets.receive_descriptors(self._control, 1))

    def _disconnect(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None

    def close(self) -> None:
        """End the zygote and every endpoint that still runs."""
        with self._lock:
            self._disconnect()


def _start_process() -> tuple[socket.socket, int]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        argv = [sys.executable, "-P", "-m", "millpond.tunnel.endpoint.zygote", str(theirs.fileno())]
        try:
            process = subprocess.Popen(argv, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
        except OSError:
            ours.close()
            raise
    threading.Thread(
        target=process.wait, name="endpoint zygote", daemon=True
    ).start()  # no zombie when it ends
    ours.settimeout(_ANSWER_SECONDS)
    return ours, process.pid
