# SPDX-License-Identifier: Apache-2.0
"""Edge: the init of an emulated board, its PID 1: starts the agent and the SSH servers, and restarts them."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from millpond.linux.confinement.sandbox import accept_signals
from millpond.linux.pid1 import reap_orphans
from millpond.linux.zygote import forked
from millpond.linux.zygote.forked import Child

log = logging.getLogger(__name__)

RESTART_SECONDS = 0.5
STOP_SECONDS = 5.0
_NOTIFY = Path("/run/notify")
_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}


class EmulatedInit:
    """Runs the agent as systemd would (READY=1 by sd_notify), and the SSH servers, which need its volume,
    after it.
    """

    def __init__(self, agent: Sequence[str], then: Sequence[Sequence[str]]) -> None:
        self._agent_command, self._then = list(agent), [list(command) for command in then]
        self._agent: Child | None = None
        self._others: list[Child] = []
        self._stopping = False

    def run(self) -> int:
        """Run until SIGTERM. All other processes of the board die with this one."""
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
        self._agent = forked.start(self._agent_command, _ENVIRONMENT | {"NOTIFY_SOCKET": str(_NOTIFY)})

    def _wait(self, notify: socket.socket) -> None:
        poll = select.poll()
        poll.register(notify, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        poll.poll(1000)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)
        with contextlib.suppress(BlockingIOError):
            if b"READY=1" in notify.recv(4096) and not self._others:
                self._others = [forked.start(command, _ENVIRONMENT) for command in self._then]

    def _reap(self) -> None:
        if self._agent and self._agent.poll() is not None:
            log.warning("the agent ended with %d; it is started again", self._agent.returncode)
            self._agent = None
            self._end_others()
            time.sleep(RESTART_SECONDS)
        for place, other in enumerate(self._others):
            if other.poll() is not None:
                log.warning("'%s' ended with %d", " ".join(self._then[place]), other.returncode)
                time.sleep(RESTART_SECONDS)
                self._others[place] = forked.start(self._then[place], _ENVIRONMENT)
        reap_orphans({process.pid for process in (self._agent, *self._others) if process})

    def _end_others(self) -> None:
        for other in self._others:
            other.kill()
            other.wait()
        self._others = []

    def _stop(self) -> None:
        self._end_others()
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
