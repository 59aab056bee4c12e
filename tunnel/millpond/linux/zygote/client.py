# SPDX-License-Identifier: Apache-2.0
"""Edge: processes that start as forks of a zygote, which has loaded what they need, each in its sandbox."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence

from millpond.linux.confinement.sandbox import Sandbox
from millpond.linux.confinement.sandbox_exec import kept_environment, serialized
from millpond.linux.confinement.sandboxed_process import can_be_first, end
from millpond.linux.limits.process_limits import LimitedTree, ProcessLimits, Shortage
from millpond.linux.zygote import forked
from millpond.linux.zygote.prepared import PreparedFork

log = logging.getLogger(__name__)

MAX_REQUEST = 1 << 17
FIRST, NESTED = b"F", b"N"
STARTED, REFUSED = b"S", b"R"
LOAD_SECONDS = 240.0
"""The first answer comes when all is loaded: on an ARM board that is busy, after minutes."""
START_SECONDS = ANSWER_SECONDS = 30.0
_STATUS_SECONDS = 5.0
_Started = queue.SimpleQueue[forked.Child | OSError]
_SERVER = "millpond.linux.zygote.server"


class Child:
    """A process that a zygote forked, with the part of ``subprocess.Popen`` that its parent needs. It is
    thread-safe. The zygote keeps the pid from being used again until it has been waited for.
    """

    def __init__(self, pid: int, zygote: _Process, connection: socket.socket, tree: LimitedTree) -> None:
        self.pid, self._zygote, self._connection, self._tree = pid, zygote, connection, tree
        self.returncode: int | None = None
        self._killed = False
        self._lock = threading.Lock()
        self._handle = os.pidfd_open(pid)
        weakref.finalize(self, os.close, self._handle)

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it is still there."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        """Kill it."""
        self._killed = True
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, -N for signal N. Raises subprocess.TimeoutExpired."""
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        if not poll.poll(None if timeout is None else 1000 * timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        with self._lock:
            if self.returncode is None:
                self.returncode = self._status()
                self._tree.end(self._own_end)
                self._connection.close()
                self._zygote.count(-1)
            return self.returncode

    def shortage(self, patience: float = 0.0, code: int | None = None) -> Shortage:
        """Return the memory that the process and its descendants have run out of so far, if any. Waits for
        its end at most ``patience`` seconds. ``code`` is the exit code of the descendant that matters, if
        not its own.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(patience)
        return self._tree.shortage(self._own_end if code is None else code)

    @property
    def refusals(self) -> int:
        """The number of processes and threads that it and its descendants were refused so far."""
        return self._tree.refusals

    @property
    def _own_end(self) -> int | None:
        """The exit code, None as long as it runs or if it was killed from here."""
        return None if self._killed else self.returncode

    def _status(self) -> int:
        self._connection.settimeout(_STATUS_SECONDS)
        try:
            return int(self._connection.recv(16))
        except (OSError, ValueError):  # the zygote died, which killed this one, or hangs
            return -signal.SIGKILL


class _Process:
    """The process that is the zygote. The kernel kills it and its children when this process ends."""

    def __init__(self, program: Sequence[str], prepared: PreparedFork | None) -> None:
        self._lock = threading.Lock()
        self._children = 0
        self._left = self._answered = False
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        weakref.finalize(self, self._control.close)
        self._control.settimeout(ANSWER_SECONDS)
        started = _Started()
        arguments = (program, prepared, theirs, started)
        threading.Thread(target=_keep, args=arguments, name="zygote", daemon=True).start()
        try:
            process = started.get(timeout=START_SECONDS)
        except queue.Empty:
            self._control.close()  # at which it ends if it starts later
            raise TimeoutError(f"its program has not started in {START_SECONDS:g} s") from None
        if isinstance(process, OSError):
            raise process
        self.process = process

    def start(self, request: bytes, descriptors: Sequence[int], tree: LimitedTree) -> Child:
        """See Zygote. Raises ConnectionError if the zygote died, TimeoutError if it does not answer."""
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as failed:
            failed.callback(near.close)  # then the zygote kills what it may have started for it
            with far:
                socket.send_fds(self._control, [request], [far.fileno(), *descriptors])
            near.settimeout(ANSWER_SECONDS if self._answered else LOAD_SECONDS)
            answer = near.recv(MAX_REQUEST)
            if not answer:
                raise ConnectionResetError("the zygote died")
            self._answered = True
            if answer[:1] == REFUSED:
                raise OSError(answer[1:].decode(errors="replace"))
            child = Child(int(answer[1:]), self, near, tree)
            self.count(1)
            failed.pop_all()
        return child

    @property
    def has_children(self) -> bool:
        """Whether it lives, and processes that it has started do."""
        return self._children > 0 and self.process.poll() is None

    def count(self, change: int) -> None:
        """Note that a child has started or ended."""
        with self._lock:
            self._children += change
            if self._left and not self._children:
                self.process.kill()

    def leave(self) -> None:
        """Ask nothing more of it; it ends with its last child, if it hangs, too."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)  # not closed: another thread may be about to ask
        self._left = True
        self.count(0)


def _keep(
    program: Sequence[str], prepared: PreparedFork | None, control: socket.socket, started: _Started
) -> None:
    """Start the zygote, which dies with this thread, and wait for its end."""
    try:
        process = _begin(program, prepared, control.fileno())
    except OSError as error:
        started.put(error)
        return
    finally:
        control.close()
    started.put(process)
    process.wait()


def _begin(program: Sequence[str], prepared: PreparedFork | None, number: int) -> forked.Child:
    arguments = [str(number), str(os.getpid()), *program]
    if prepared:
        return prepared.start(_SERVER, arguments, [number])
    # As -I, but for the hash seed: what forks derive from hash() is the same on all machines, at all times.
    return subprocess.Popen(
        [sys.executable, "-sP", "-m", _SERVER, *arguments],
        pass_fds=(number,),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=kept_environment() | {"HOME": "/", "PYTHONHASHSEED": "0"},
        cwd="/",
        start_new_session=True,
    )


class Zygote:
    """Starts processes that call ``main`` of the module ``entry``; thread-safe. The zygote begins with the
    first of them, loads ``modules``, which must start no threads, and ends ``idle`` seconds after the last.
    It runs as this process's user, without network. Each process and its descendants are within ``limits``.
    The first zygote is ``prepared``, or a program of its own, as those after it.
    """

    def __init__(
        self,
        entry: str,
        *modules: str,
        idle: float,
        limits: ProcessLimits | None = None,
        prepared: PreparedFork | None = None,
    ) -> None:
        self._entry, self._program = entry, (str(idle), entry, *modules)
        self._limits, self._prepared = limits or ProcessLimits(), prepared
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Return the pid of the zygote, or of the last one that ran; None if there was none."""
        process = self._process
        return process.process.pid if process else None

    @property
    def is_busy(self) -> bool:
        """Whether processes of the zygote run."""
        process = self._process
        return process is not None and process.has_children

    def warm_up(self) -> None:
        """Have it begin to load its modules, if it has not. Does not wait. Raises OSError."""
        self._current()

    def start(
        self,
        sandbox: Sandbox,
        arguments: Sequence[str],
        descriptors: Sequence[int],
        output: int,
        *,
        entry: str = "",
        network: bool = False,
    ) -> Child:
        """Start a process in ``sandbox``, of another module than the zygote's own if ``entry`` names one. It
        has ``descriptors`` as 3, 4 and so on, writes what it prints to ``output``, and has this process's
        network if ``network``. It dies with the zygote, and that with this process. Raises OSError.
        """
        with contextlib.ExitStack() as stack:
            passed = [output, *descriptors]
            if enters := network and os.geteuid() == 0:  # otherwise the zygote has not left it
                passed.append(os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
                stack.callback(os.close, passed[-1])
            limits, tree = self._limits, self._limits.begin()
            stack.callback(tree.joined)
            passed += tree.descriptors
            request = FIRST if can_be_first(sandbox) else NESTED
            bounds = [len(tree.descriptors), limits.memory, limits.processes]
            about = [serialized(sandbox), arguments, entry or self._entry, enters, bounds]
            try:
                return self._start(request + json.dumps(about).encode(), passed, tree)
            except OSError:
                tree.end(None)
                raise

    def _start(self, request: bytes, passed: Sequence[int], tree: LimitedTree) -> Child:
        if len(request) > MAX_REQUEST:
            raise OSError("the request to the zygote is too long")
        for _ in range(2):
            process = self._current()
            try:
                return process.start(request, passed, tree)
            except TimeoutError:
                self._leave(process)
                raise TimeoutError(f"the zygote of {self._entry} does not answer") from None
            except ConnectionError:
                self._leave(process)
                log.info("the zygote of %s has ended: another is started", self._entry)
        raise OSError(f"the zygote of {self._entry} died twice")

    def _current(self) -> _Process:
        with self._lock:
            if self._closed:
                raise OSError(f"the zygote of {self._entry} is closed")
            self._process = self._process or _Process(self._program, self._prepared)
            self._prepared = None
            return self._process

    def _leave(self, process: _Process) -> None:
        with self._lock:
            if self._process is process:
                self._process = None
        process.leave()

    def close(self) -> None:
        """End it, and all that it started, for good."""
        with self._lock:
            self._closed, process = True, self._process
        if process:
            end(process.process)
