"""Edge: the device's own mount as one of those who share the volume: it asks the lock master first.

While the master cannot be reached there may be clients that still go by what it granted them, but no longer
than their leases: that long is waited for it, and then nobody is asked.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from millpond.fs import lock_messages as m
from millpond.fs import range_messages as r
from millpond.fs.file_locks import SharedLocks
from millpond.fs.locks import DEVICE
from millpond.fs.master import LEASE_SECONDS
from millpond.fs.tree import WouldWait, patient
from millpond.fs.volume import failure
from millpond.wire.channel import Channel
from millpond.wire.deadline import Deadline
from millpond.wire.errors import DeadlineExceeded, MillpondError
from millpond.wire.message import Message

_ANSWER_SECONDS = 4 * LEASE_SECONDS  # as long as the master itself waits, and some more
_PAUSE = 0.05
_TRIES = 3
_GLANCE_SECONDS = 0.25
_PRESENT_SECONDS = 2.0


class DeviceGuard:
    """Asks the master that listens at ``path``, each thread over a connection of its own. Over one more the
    master knows what the kernel writes, also one that was started anew.
    """

    def __init__(self, path: Path, lease: float = LEASE_SECONDS) -> None:
        self._path, self._lease = path, lease
        self._own = threading.local()
        self._lock = threading.Lock()
        self._writing: Counter[int] = Counter()
        self._writers: Channel | None = None
        self._alone = SharedLocks(lambda _: False)
        self._heard = (
            time.monotonic() if path.exists() else -math.inf
        )  # without one nobody is granted anything

    @contextlib.contextmanager
    def change(self, *directories: int, inodes: tuple[int, ...] = ()) -> Iterator[_Begun]:
        """Around a change of these directories and other files. Raises WouldWait and OSError."""
        request = m.Begin(directories, inodes, patient.get())
        begun = _Begun(self, request, self.ask(request))
        try:
            yield begun
        finally:
            begun.end()

    def start(self) -> None:
        """The mount is about to be there."""
        self._arrive()
        threading.Thread(target=self._stay_present, name="presence", daemon=True).start()

    def ask(self, request: Message, anew: Message | None = None) -> Channel | None:
        """The connection on which the change has begun; None where there is nobody to ask. If it was lost,
        ``anew`` is asked for. Raises OSError and WouldWait.
        """
        deadline = _deadline()
        while channel := self._channel():
            try:
                answer = channel.call(request, Message, deadline)
            except DeadlineExceeded:
                self._hang_up(channel)
                raise _too_late() from None
            except MillpondError:
                self._hang_up(channel)
                request = anew or request
                continue
            self._heard = time.monotonic()
            if isinstance(answer, m.Begun):
                return channel
            if isinstance(answer, m.Wait) and not patient.get():
                raise WouldWait
            raise failure(answer.errno if isinstance(answer, m.Refused) else errno.EIO)
        return None

    def ask_of_locks(self, inode: int, request: r.LockRequest) -> r.LockReply:
        """What the master says of file locks, and where there is none, this mount. Raises OSError and
        WouldWait.
        """
        deadline = _deadline()
        for _ in range(_TRIES):
            channel = self._channel()
            if channel is None:
                break
            try:
                reply = channel.call(request, r.LockReply, deadline)
            except DeadlineExceeded:
                self._hang_up(channel)
                raise _too_late() from None
            except MillpondError:
                self._hang_up(channel)
                continue
            self._heard = time.monotonic()
            self._alone.end(DEVICE)
            return reply
        return self._alone.perform(DEVICE, inode, request)

    def _hang_up(self, channel: Channel) -> None:
        channel.close()
        self._own.channel = None

    def _channel(self) -> Channel | None:
        """This thread's; None after a lease without."""
        channel: Channel | None = getattr(self._own, "channel", None)
        while channel is None:
            try:
                channel = self._own.channel = self._connected()
            except OSError:
                if time.monotonic() > self._heard + self._lease:
                    return None
                if not patient.get():
                    raise WouldWait from None
                time.sleep(_PAUSE)
        return channel

    def _connected(self) -> Channel:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        connection.settimeout(_GLANCE_SECONDS)  # one that accepts nobody must not hold up anybody
        try:
            connection.connect(os.fspath(self._path))
        except OSError:
            connection.close()
            raise
        return Channel(connection, "the lock master")

    def _stay_present(self) -> None:
        """A master that was started anew grants nothing before it is told what is written already."""
        while True:
            if self._writers:
                _await_end(self._writers)
            time.sleep(_PAUSE)
            self._arrive()

    def _arrive(self) -> None:
        with contextlib.suppress(MillpondError, OSError), self._lock, contextlib.ExitStack() as failed:
            if self._writers:
                self._writers.close()
                self._writers = None
            channel = failed.enter_context(self._connected())
            channel.call(m.Present(tuple(self._writing)), m.Begun, Deadline.after(_PRESENT_SECONDS))
            self._writers = channel
            failed.pop_all()

    def begin_writing(self, inode: int, *, anyway: bool = False) -> bool:
        """The kernel is to write the file itself; False if a client keeps what it reads of it."""
        with self._lock:
            if not self._writing[inode] and not self._may_write(inode, anyway):
                return False
            self._writing[inode] += 1
            return True

    def _may_write(self, inode: int, anyway: bool) -> bool:
        """Whether the master says so; one that is not there will be told before it grants anything."""
        if self._writers is None:
            return True
        try:
            request = m.BeginWriting(inode, anyway)
            return self._writers.call(request, m.Writing, Deadline.after(_PRESENT_SECONDS)).by_kernel
        except (MillpondError, OSError):
            self._writers.close()  # an answer that comes late must not be taken for another's
            return False

    def end_writing(self, inode: int) -> None:
        """The kernel has closed it."""
        with self._lock:
            self._writing[inode] -= 1
            if self._writing[inode]:
                return
            del self._writing[inode]
            if self._writers is None:
                return
            with contextlib.suppress(MillpondError):  # who is gone knows of no file any more
                self._writers.send(m.EndWriting(inode), Deadline.after(_PRESENT_SECONDS))


def _await_end(channel: Channel) -> None:
    """Until the other end has closed the connection; what it says is others' to hear."""
    state = select.poll()
    with contextlib.suppress(OSError, ValueError):
        state.register(channel.sock.fileno(), select.POLLRDHUP)
        state.poll()


def _deadline() -> Deadline:
    """The thread that must not wait asks once, and those that may, wait for as long as leases can take."""
    return Deadline.after(_ANSWER_SECONDS if patient.get() else _GLANCE_SECONDS)


def _too_late() -> OSError | WouldWait:
    return failure(errno.EIO) if patient.get() else WouldWait()


class _Begun:
    """A change that has begun, on ``channel``, if anybody was asked."""

    def __init__(self, guard: DeviceGuard, begin: m.Begin, channel: Channel | None) -> None:
        self._guard, self._begin, self._channel = guard, begin, channel

    def revoke(self, *inodes: int) -> None:
        """Return once nobody else keeps these, too."""
        if self._channel:
            self._begin = replace(self._begin, inodes=(*self._begin.inodes, *inodes))
            self._channel = self._guard.ask(m.Revoke(inodes, patient.get()), self._begin)

    def end(self) -> None:
        """It is done."""
        if self._channel:
            with contextlib.suppress(MillpondError):  # with the connection it has ended
                self._channel.send(m.End(), Deadline.after(_ANSWER_SECONDS))
