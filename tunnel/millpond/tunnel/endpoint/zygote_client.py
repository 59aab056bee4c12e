"""Edge: the nursery, a process whose forks are the ends of many tunnels and share its memory."""

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
"""The first answer comes when the process has started, on a machine that does other things too."""


class EndpointProcess:
    """A process that the nursery forked; thread-safe."""

    def __init__(self, handle: int) -> None:
        self._handle: int | None = handle
        self._lock = threading.Lock()

    def terminate(self) -> None:
        """Ask it to end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with self._lock, suppress(ProcessLookupError):
            if self._handle is not None:
                signal.pidfd_send_signal(self._handle, number)

    def wait(self) -> None:
        """Until it has ended; for one thread."""
        if self._handle is None:
            return
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        poll.poll()
        with self._lock:
            os.close(self._handle)
            self._handle = None


class EndpointZygote:
    """Starts ends. Its process begins with the first of them, and anew if it was killed; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self.pid = 0
        """Of its process, once there is one."""

    def start(self, arguments: Sequence[str], status: int, counters: int) -> EndpointProcess:
        """An end with the arguments of ``python -m millpond.tunnel``, which gets the two descriptors. It dies
        with the nursery, and that with this process. Raises OSError.
        """
        request = "\0".join(arguments).encode()
        if len(request) > MAX_REQUEST:
            raise OSError("the arguments are too long")
        with self._lock:
            try:
                return self._ask(request, status, counters)
            except TimeoutError:
                self._forget()
                raise
            except ConnectionError:
                self._forget()
                log.info("the nursery of tunnel ends was killed: starting another")
                return self._ask(request, status, counters)

    def _ask(self, request: bytes, status: int, counters: int) -> EndpointProcess:
        if self._control is None:
            self._control, self.pid = _start_process()
        self._control.send(request)
        sockets.send_descriptors(self._control, [status, counters])
        answer = self._control.recv(MAX_REQUEST)
        if not answer:
            raise ConnectionResetError("the nursery is gone")
        if answer[:1] == REFUSED:
            raise OSError(answer[1:].decode(errors="replace"))
        return EndpointProcess(*sockets.receive_descriptors(self._control, 1))

    def _forget(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None

    def close(self) -> None:
        """End its process and every end that still runs."""
        with self._lock:
            self._forget()


def _start_process() -> tuple[socket.socket, int]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        argv = [sys.executable, "-P", "-m", "millpond.tunnel.endpoint.zygote", str(theirs.fileno())]
        try:
            process = subprocess.Popen(argv, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
        except OSError:
            ours.close()
            raise
    threading.Thread(target=process.wait, name="nursery", daemon=True).start()  # no zombie when it ends
    ours.settimeout(_ANSWER_SECONDS)
    return ours, process.pid
