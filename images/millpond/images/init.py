"""Edge: the init of an emulated board, its PID 1: starts the agent and the SSH server, and restarts them."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from millpond.linux.reaping import reap_orphans
from millpond.linux.sandbox import accept_signals

log = logging.getLogger(__name__)

RESTART_SECONDS = 0.5
STOP_SECONDS = 5.0
_NOTIFY = Path("/run/notify")


class Init:
    """Runs the agent as systemd would (READY=1 by sd_notify), and what needs the agent's volume after it."""

    def __init__(self, agent: Sequence[str], then: Callable[[], list[str]]) -> None:
        self._agent_command, self._then = list(agent), then
        self._agent: subprocess.Popen[bytes] | None = None
        self._second: subprocess.Popen[bytes] | None = None
        self._stopping = False

    def run(self) -> int:
        """Until SIGTERM. All other processes of the board die with this one."""
        self._catch_signals()
        with _notify_socket() as notify:
            while not self._stopping:
                if self._agent is None:
                    self._start_agent()
                self._wait(notify)
                self._reap()
        self._stop()
        return 0

    def _catch_signals(self) -> None:
        self._wake, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_stop)
        accept_signals()

    def _on_stop(self, *_: object) -> None:
        self._stopping = True

    def _start_agent(self) -> None:
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}
        environment["NOTIFY_SOCKET"] = str(_NOTIFY)
        self._agent = subprocess.Popen(self._agent_command, env=environment)

    def _wait(self, notify: socket.socket) -> None:
        poll = select.poll()
        poll.register(notify, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        poll.poll(1000)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)
        with contextlib.suppress(BlockingIOError):
            if b"READY=1" in notify.recv(4096) and self._second is None:
                self._second = subprocess.Popen(self._then())

    def _reap(self) -> None:
        if self._agent and self._agent.poll() is not None:
            log.warning("the agent ended with %d; it is started again", self._agent.returncode)
            self._agent = None
            self._end_second()
            time.sleep(RESTART_SECONDS)
        if self._second and self._second.poll() is not None:
            log.warning("the SSH server ended with %d", self._second.returncode)
            self._second = subprocess.Popen(self._then()) if self._agent else None
            time.sleep(RESTART_SECONDS)
        reap_orphans({process.pid for process in (self._agent, self._second) if process})

    def _end_second(self) -> None:
        if self._second:
            self._second.kill()
            self._second.wait()
            self._second = None

    def _stop(self) -> None:
        self._end_second()
        if self._agent:
            self._agent.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._agent.wait(STOP_SECONDS)


def _notify_socket() -> socket.socket:
    _NOTIFY.parent.mkdir(parents=True, exist_ok=True)
    _NOTIFY.unlink(missing_ok=True)
    notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    notify.bind(str(_NOTIFY))
    return notify
