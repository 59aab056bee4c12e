# SPDX-License-Identifier: Apache-2.0
"""Edge: start and use the endpoint zygote, whose forks are endpoints that share its memory."""

from __future__ import annotations

import functools
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from millpond.linux import sockets

log = logging.getLogger(__name__)

MAX_REQUEST = 4096
STARTED, REFUSED = b"S", b"R"
_ANSWER_SECONDS = 30.0
"""Seconds for an answer; the first comes only once the zygote has started, on a loaded machine."""


class EndpointProcess:
    """An endpoint's process that a zygote forked; ``ended`` is called once it has ended. Thread-safe."""

    def __init__(self, pidfd: int, ended: Callable[[], None]) -> None:
        self._pidfd: int | None = pidfd
        self._ended = ended
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
        self._ended()


class _ZygoteProcess:
    """One zygote process and the connection that it lives as long as."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            argv = [sys.executable, "-P", "-m", "millpond.tunnel.endpoint.zygote", str(theirs.fileno())]
            try:
                self._process = subprocess.Popen(argv, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
            except OSError:
                ours.close()
                raise
        # No zombie when it ends.
        threading.Thread(target=self._process.wait, name="endpoint zygote", daemon=True).start()
        self._control, self.pid, self.ends = ours, self._process.pid, 0

    def request(self, request: bytes, status: int, counters: int) -> int:
        """Have an endpoint started; returns its pidfd. Raises OSError: TimeoutError if there is no answer,
        ConnectionError if the zygote is gone.
        """
        self._control.settimeout(_ANSWER_SECONDS)
        self._control.send(request)
        sockets.send_descriptors(self._control, [status, counters])
        answer = self._control.recv(MAX_REQUEST)
        if not answer:
            raise ConnectionResetError("the zygote is gone")
        if answer[:1] == REFUSED:
            raise OSError(answer[1:].decode(errors="replace"))
        (pidfd,) = sockets.receive_descriptors(self._control, 1)
        return pidfd

    def close(self) -> None:
        """End the zygote, and every endpoint that it has started."""
        self._control.close()

    def kill(self) -> None:
        """End the zygote also if it is stopped."""
        self._process.kill()
        self._control.close()


class EndpointZygote:
    """Forks endpoints from a preloaded process, which starts with the first request, and again after it was
    killed.

    A zygote that does not answer in time gets no more requests: another takes its place, and it stays as long
    as an endpoint that it has started. Thread-safe.
    """

    def __init__(self) -> None:
        self._starting, self._lock = threading.Lock(), threading.Lock()
        """One start at a time; the zygotes."""
        self._zygote: _ZygoteProcess | None = None
        self._stalled: list[_ZygoteProcess] = []

    @property
    def pid(self) -> int:
        """The pid of the present zygote, 0 before it has started."""
        zygote = self._zygote
        return 0 if zygote is None else zygote.pid

    def start(self, arguments: Sequence[str], status: int, counters: int) -> EndpointProcess:
        """Start an endpoint with the ``arguments`` of ``python -m millpond.tunnel``, and with the descriptors
        that get its ``status`` and ``counters``. It dies with the zygote, and the zygote with this process.
        Raises OSError.
        """
        request = "\0".join(arguments).encode()
        if len(request) > MAX_REQUEST:
            raise OSError("the arguments are too long")
        with self._starting:
            try:
                return self._request_start(request, status, counters)
            except TimeoutError:
                self._set_aside()
                raise
            except ConnectionError:
                self.close()
                log.info("the zygote of tunnel endpoints was killed: starting another")
                return self._request_start(request, status, counters)

    def _request_start(self, request: bytes, status: int, counters: int) -> EndpointProcess:
        with self._lock:
            zygote = self._zygote = self._zygote or _ZygoteProcess()
        pidfd = zygote.request(request, status, counters)
        with self._lock:
            zygote.ends += 1
        return EndpointProcess(pidfd, functools.partial(self._forget_end, zygote))

    def _set_aside(self) -> None:
        """Give the zygote that did not answer no more requests; its endpoints go on. An endpoint that it
        starts later finds nobody who reads its status, and ends.
        """
        with self._lock:
            if self._zygote is not None:
                log.warning("the zygote of tunnel endpoints does not answer: starting another")
                self._stalled.append(self._zygote)
                self._zygote = None
        self._end_unused()

    def _forget_end(self, zygote: _ZygoteProcess) -> None:
        with self._lock:
            zygote.ends -= 1
        self._end_unused()

    def _end_unused(self) -> None:
        with self._lock:
            for zygote in [stalled for stalled in self._stalled if not stalled.ends]:
                self._stalled.remove(zygote)
                zygote.kill()

    def close(self) -> None:
        """End the zygote and every endpoint that still runs, but those of a zygote that was set aside, which
        end with this process.
        """
        with self._lock:
            zygote, self._zygote = self._zygote, None
            if zygote is not None:
                zygote.close()
