# SPDX-License-Identifier: Apache-2.0
"""Edge: run programs of this package in forks of a process that has loaded their modules, in place of
interpreters that load them again: a start takes a tenth of the CPU time, and forks share memory.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from millpond.linux import syscalls
from millpond.linux.confinement.sandbox import FORWARDED_SIGNALS

_ARGUMENTS_BEGIN, _ARGUMENTS_END = 45, 46
"""Places in /proc/self/stat, counted behind the name, of where the kernel reads the command line."""


class ForkedProgram:
    """A child that runs a program, used as a ``subprocess.Popen`` is. Thread-safe."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout: IO[bytes] | None = None
        self._lock, self._handle = threading.Lock(), os.pidfd_open(pid)
        weakref.finalize(self, os.close, self._handle)

    def poll(self) -> int | None:
        """Return the exit code, -N for signal N; None while it runs."""
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once it has ended. Raises subprocess.TimeoutExpired."""
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        if not poll.poll(None if timeout is None else 1000 * timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def terminate(self) -> None:
        """Ask it to end (SIGTERM)."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it (SIGKILL)."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)


Child = subprocess.Popen[bytes] | ForkedProgram


def load(modules: Sequence[str]) -> None:
    """Import modules that forks of this process are to share; a collection in a fork copies none of it."""
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def start(command: Sequence[str], environment: Mapping[str, str]) -> Child:
    """Start a command; one that is ``python -m MODULE`` calls ``main`` of that module in a fork of this
    process, which must have one thread. Raises OSError.
    """
    if list(command[:2]) != [sys.executable, "-m"]:
        return subprocess.Popen(command, env=environment)
    return fork(lambda: run(command[2], command[3:], environment))


def fork(body: Callable[[], int], *, keep: Sequence[int] = ()) -> ForkedProgram:
    """Run ``body`` in a fork, which dies with this process; its result is the exit code. It has the standard
    descriptors, and those to ``keep``. Raises OSError.
    """
    _flush()  # or the child would write buffered output a second time
    parent = os.getpid()
    if pid := os.fork():
        return ForkedProgram(pid)
    code = 70
    try:
        gc.freeze()  # what the parent owns is never collected here: its descriptors are others' by then
        syscalls.die_with_parent(signal.SIGKILL)
        _forget(keep)
        if os.getppid() in (parent, 0):  # of another PID namespace, or the parent died before prctl
            code = body()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - nothing may go on in a copy of the caller
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        _flush()
        os._exit(code)


def run(module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Call ``main`` of a module in a fork, under the command line that a program of its own would have."""
    name_process([sys.executable, "-m", module, *arguments])
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = [module, *arguments]
    for number in FORWARDED_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED_SIGNALS)
    return int(importlib.import_module(module).main(list(arguments)))


def name_process(command: Sequence[str]) -> None:
    """Show a command line for this process, in place of the one that it has as a fork, if there is room."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[_ARGUMENTS_BEGIN]), int(fields[_ARGUMENTS_END])
    shown = "\0".join(command).encode()[: max(end - begin - 1, 0)]
    ctypes.memmove(begin, shown.ljust(end - begin, b"\0"), end - begin)


def _forget(keep: Sequence[int]) -> None:
    """Forget what was the parent's: what it does at its end, its signal handlers, log and descriptors."""
    atexit._clear()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    first = 3
    for descriptor in sorted(keep):
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # a daemon may have none
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
