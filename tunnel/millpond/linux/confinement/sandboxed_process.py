# SPDX-License-Identifier: Apache-2.0
"""Edge: start a command in a sandbox from a process with threads, without a process that waits for it."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from typing import Protocol

from millpond.linux import syscalls
from millpond.linux.confinement.sandbox import FORWARDED_SIGNALS, Sandbox
from millpond.linux.confinement.sandbox_exec import confined

END_SECONDS = 2.0


class SandboxedProcess(Protocol):
    """A process as its parent sees it."""

    pid: int

    def kill(self) -> None:
        """Kill it."""

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, -N for signal N. Raises subprocess.TimeoutExpired."""


def start(
    sandbox: Sandbox,
    command: list[str],
    *,
    pass_fds: Sequence[int] = (),
    stdout: int | None = None,
    stderr: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start ``command`` in ``sandbox``; it dies with the calling thread. Raises OSError."""
    is_first = can_be_first(sandbox)
    with new_pids() if is_first else contextlib.nullcontext():
        return subprocess.Popen(
            confined(sandbox, command, is_first=is_first),
            pass_fds=pass_fds,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
        )


def end(process: SandboxedProcess) -> None:
    """Kill a command and all its descendants. Waits until they are gone, but at most 2 s: a process that
    reads from a hanging file system dies only when that answers, and the PID 1 of its namespace after it.
    """
    process.kill()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        threading.Thread(target=process.wait, name=f"end of {process.pid}", daemon=True).start()


def can_be_first(sandbox: Sandbox) -> bool:
    """Whether a process that starts in ``new_pids`` can be the first of the sandbox's own PIDs."""
    return sandbox.own_pids and not sandbox.renames and _may_return()


def _may_return() -> bool:
    """Whether this thread, once it has unshared its PID namespace, may enter the old one again, without which
    it could start no more threads. Root of a user namespace may not where the old one belongs to another.
    """
    with _own_pids() as own:
        try:
            syscalls.enter_namespace(own, syscalls.CLONE_NEWPID)  # where it still is
        except OSError as error:
            if error.errno != errno.EPERM:
                raise
            return False
    return True


@contextlib.contextmanager
def _own_pids() -> Iterator[int]:
    own = os.open("/proc/thread-self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield own
    finally:
        os.close(own)


@contextlib.contextmanager
def new_pids() -> Iterator[None]:
    """Make the next process of this thread PID 1 of a new PID namespace, so that no other Python process, of
    5 MiB, has to wait between the two for as long as it runs. Raises OSError.
    """
    mask = signal.pthread_sigmask(
        signal.SIG_BLOCK, FORWARDED_SIGNALS
    )  # see accept_signals; what starts inherits it
    try:
        with _own_pids() as own:
            syscalls.unshare(syscalls.CLONE_NEWPID)
            try:
                yield
            finally:
                syscalls.enter_namespace(own, syscalls.CLONE_NEWPID)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
