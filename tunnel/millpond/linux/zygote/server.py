# SPDX-License-Identifier: Apache-2.0
"""Entry: a zygote: loads modules, then forks a process in a sandbox for each request on its socket."""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from millpond.linux import syscalls
from millpond.linux.confinement.sandbox import FORWARDED_SIGNALS, accept_signals, become
from millpond.linux.confinement.sandbox_exec import parent_pid, parsed
from millpond.linux.confinement.sandboxed_process import new_pids
from millpond.linux.limits.process_limits import enter_limits
from millpond.linux.sockets import receive_with_descriptors
from millpond.linux.zygote.client import FIRST, MAX_REQUEST, REFUSED, STARTED
from millpond.linux.zygote.preloading import load

_OWN = 3
"""The first descriptor that is a child's own."""
_MOST_DESCRIPTORS = 16


@dataclass(slots=True)
class _Child:
    pid: int
    handle: int
    connection: int
    """To the process that asked for it: takes the exit status; when it closes, the child is killed."""
    ended: bool = False
    abandoned: bool = False


class Server:
    """Serves until ``control`` closes and no child is left, or for ``idle`` seconds without a child."""

    def __init__(self, control: socket.socket, idle: float) -> None:
        self._control, self._idle = control, idle
        self._pid = int(Path("/proc/self").readlink().name)  # by which /proc knows it
        self._children: list[_Child] = []
        self._request = bytearray(MAX_REQUEST)

    def serve(self) -> None:
        """Answer requests, report exit statuses, and kill children whose connection has closed."""
        is_open = True
        while (is_open or self._children) and (ready := self._wait(is_open)):
            for child in list(self._children):
                if child.connection in ready:
                    self._kill(child)
                if child.handle in ready:
                    self._report(child)
                if child.ended and child.abandoned:
                    self._reap(child)
            if self._control.fileno() in ready:
                is_open = self._answer()

    def _wait(self, is_open: bool) -> set[int]:
        poll = select.poll()
        if is_open:
            poll.register(self._control, select.POLLIN)
        for child in self._children:
            if not child.ended:
                poll.register(child.handle, select.POLLIN)
            if not child.abandoned:
                poll.register(child.connection, 0)  # a hang-up is always reported
        return {descriptor for descriptor, _ in poll.poll(None if self._children else 1000 * self._idle)}

    def _kill(self, child: _Child) -> None:
        child.abandoned = True
        if not child.ended:
            os.kill(child.pid, signal.SIGKILL)

    def _report(self, child: _Child) -> None:
        child.ended = True
        found = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # its pid stays its own
        assert found
        status = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        _write(child.connection, str(status).encode())

    def _reap(self, child: _Child) -> None:
        os.waitpid(child.pid, 0)
        os.close(child.handle)
        os.close(child.connection)
        self._children.remove(child)

    def _answer(self) -> bool:
        """Answer a request; False if ``control`` has closed."""
        size, descriptors = receive_with_descriptors(self._control, self._request, _MOST_DESCRIPTORS)
        if not descriptors:  # the end, or more than this process may open
            return size > 0
        connection, *own = descriptors
        try:
            child = self._fork(size, connection, own)
            self._children.append(child)
            _write(connection, STARTED + str(child.pid).encode())
        except OSError as error:
            _write(connection, REFUSED + str(error.strerror).encode())
            own.append(connection)
        self._request[:size] = bytes(size)  # no later child reads it in its memory
        for descriptor in own:
            os.close(descriptor)
        return True

    def _fork(self, size: int, connection: int, own: list[int]) -> _Child:
        is_first = self._request[:1] == FIRST
        with new_pids() if is_first else nullcontext():
            pid = os.fork()
            if not pid:
                self._become(size, own, is_first)
        try:
            return _Child(pid, os.pidfd_open(pid), connection)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise

    def _become(self, size: int, own: list[int], is_first: bool) -> NoReturn:
        try:
            syscalls.die_with_parent(signal.SIGKILL)
            if parent_pid() != self._pid:  # the zygote died before the kernel knew
                os._exit(70)
            self._control.detach()
            spec, arguments, entry, enters, (groups, *limits) = json.loads(self._request[1:size])
            enter_limits([own.pop() for _ in range(groups)], *limits)
            if enters:
                syscalls.enter_namespace(own.pop(), syscalls.CLONE_NEWNET)
            _place(own)
            if not is_first:
                accept_signals()
            sys.argv[1:] = arguments
            become(parsed(spec), lambda: _run(entry, arguments), is_first=is_first)
        except Exception:  # noqa: BLE001 - nothing may go on in a copy of the zygote
            traceback.print_exc()
        finally:
            os._exit(70)


def _run(entry: str, arguments: list[str]) -> int:
    accept_signals()
    syscalls.make_dumpable()
    os.environ["HOME"] = "/tmp"  # noqa: S108 - its own
    Path("/proc/self/comm").write_text(".".join(entry.split(".")[-2:]))  # such as worker.process
    return int(importlib.import_module(entry).main(arguments))


def _write(connection: int, answer: bytes) -> None:
    with suppress(ConnectionError):  # its end is noticed next
        os.write(connection, answer)


def _place(own: list[int]) -> None:
    """Make the first stdout and stderr, the others 3, 4 and so on, and close all others."""
    output, *rest = (fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, _OWN + len(own)) for number in own)
    for number in (1, 2):
        os.dup2(output, number)
    for number, descriptor in enumerate(rest, _OWN):
        os.dup2(descriptor, number, inheritable=False)
    os.closerange(_OWN + len(rest), os.sysconf("SC_OPEN_MAX"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run on the socket whose number is the first argument, for the process whose pid is the second."""
    number, parent, idle, entry, *modules = sys.argv[1:] if argv is None else argv
    syscalls.die_with_parent(signal.SIGKILL)
    if os.getppid() != int(parent):
        return 70
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED_SIGNALS)  # a service manager sends them to all
    Path("/proc/self/comm").write_text("zygote")
    if reason := load(modules):
        print(f"zygote of {entry}: nothing is loaded ahead: {reason}", file=sys.stderr, flush=True)
        argv = [sys.executable, "-I", "-m", "millpond.linux.zygote.server", number, parent, idle, entry]
        os.execv(sys.executable, argv)  # noqa: S606 - no shell
    if os.geteuid() == 0:
        syscalls.unshare(syscalls.CLONE_NEWNET)
    control = socket.socket(fileno=int(number))
    control.set_inheritable(False)
    Server(control, float(idle)).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
