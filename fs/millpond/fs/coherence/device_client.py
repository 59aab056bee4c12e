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
from typing import Self, TypeVar

from millpond.base.deadline import Deadline
from millpond.base.errors import DeadlineExceeded, MillpondError
from millpond.fs.coherence.delegation_table import DEVICE
from millpond.fs.coherence.lease_file import LEASE_SECONDS
from millpond.fs.coherence.shared_bitmap import SharedBitmapView
from millpond.fs.filelocks.service import LockService
from millpond.fs.proto import delegations as m
from millpond.fs.proto import file_locks as r
from millpond.fs.vfs.inode_api import WouldBlock, may_block
from millpond.fs.vfs.path_api import os_error
from millpond.linux.sockets import connect
from millpond.wire.channel import Channel
from millpond.wire.messages import Message

R = TypeVar("R", bound=Message)
_ANSWER_SECONDS = 4 * LEASE_SECONDS  # as long as the master itself waits, and some more
_PAUSE = 0.05
_TRIES = 3
_GLANCE_SECONDS = 0.25
_PRESENT_SECONDS = 2.0


class DeviceDelegationBreaker:
    """Asks the master that listens at ``path``, for each change over a connection that is nobody else's until
    it has ended. Over one more the master knows what the kernel writes, also one that was started anew.
    """

    def __init__(self, path: Path, lease: float = LEASE_SECONDS) -> None:
        self._path, self._lease = path, lease
        self._idle: list[Channel] = []
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._writing: Counter[int] = Counter()
        self._writers: Channel | None = None
        self._marks: SharedBitmapView | None = None
        self._alone = LockService(lambda _: False)
        self._heard = time.monotonic() if path.exists() else -math.inf  # without one nothing is granted
        self._presence = threading.Thread(target=self._stay_present, name="presence", daemon=True)

    def __enter__(self) -> Self:
        """The mount is about to be there."""
        self._arrive()
        self._presence.start()
        return self

    def __exit__(self, *_: object) -> None:
        """The mount is gone, and asks no more."""
        self._stopped.set()
        with self._lock:
            if self._writers:
                self._writers.shut_down()
        self._presence.join(_PRESENT_SECONDS)
        self._forget_idle()

    @contextlib.contextmanager
    def change(self, *directories: int, inodes: tuple[int, ...] = ()) -> Iterator[_Begun]:
        """Around a change of these directories and other files. Raises WouldWait and OSError."""
        request = m.BeginChange(directories, inodes, may_block.get())
        begun = _Begun(self, request, self.ask(request))
        try:
            yield begun
        finally:
            begun.end()

    def settle(self, inode: int) -> bool:
        """Return once no client has this directory exclusively; False if it has no mark. Raises WouldWait and
        OSError.
        """
        marks = self._marks
        if marks is None and time.monotonic() > self._heard + self._lease:
            return False  # nobody has been granted anything for long
        if marks is not None and not marks.has(inode):
            return False
        if channel := self.ask(m.SettleDirectory(inode, may_block.get())):
            self.give_back(channel)
        return True

    def ask(self, request: Message, on: Channel | None = None, anew: Message | None = None) -> Channel | None:
        """The connection on which the change has begun: ``on`` which it had, or another; None where there is
        nobody to ask. If it was lost, ``anew`` is asked for. Raises OSError and WouldWait.
        """
        deadline = _deadline()
        while channel := on or self._taken():
            answer = self._call(channel, request, Message, deadline)
            if answer is None:
                on, request = None, anew or request
                continue
            if isinstance(answer, m.ChangeBegun):
                return channel
            if not on:
                self.give_back(channel)
            if isinstance(answer, m.WaitForLeases) and not may_block.get():
                raise WouldBlock
            raise os_error(answer.errno if isinstance(answer, m.ChangeRefused) else errno.EIO)
        return None

    def ask_of_locks(self, inode: int, request: r.LockRequest) -> r.LockReply:
        """What the master says of file locks, and where there is none, this mount. Raises OSError and
        WouldWait.
        """
        deadline = _deadline()
        for _ in range(_TRIES):
            channel = self._taken()
            if channel is None:
                break
            reply = self._call(channel, request, r.LockReply, deadline)
            if reply is None:
                continue
            self.give_back(channel)
            self._alone.end(DEVICE)
            return reply
        return self._alone.perform(DEVICE, inode, request)

    def give_back(self, channel: Channel) -> None:
        """Nothing goes on over this connection any more."""
        self._idle.append(channel)
        if self._stopped.is_set():
            self._forget_idle()

    def _call(self, channel: Channel, request: Message, reply: type[R], deadline: Deadline) -> R | None:
        """None if the connection was lost. Raises OSError and WouldWait when the time is up."""
        try:
            answer = channel.call(request, reply, deadline)
        except MillpondError as error:
            channel.close()
            if isinstance(error, DeadlineExceeded):
                raise _too_late() from None
            self._forget_idle()  # they are of the same master, which is gone
            return None
        except BaseException:  # an answer that comes late must not be taken for another's
            channel.close()
            raise
        self._heard = time.monotonic()
        return answer

    def _taken(self) -> Channel | None:
        """For this thread alone; None after a lease without."""
        while True:
            with contextlib.suppress(IndexError):
                return self._idle.pop()
            try:
                return self._connected()
            except OSError:
                if time.monotonic() > self._heard + self._lease:
                    return None
                if not may_block.get():
                    raise WouldBlock from None
                time.sleep(_PAUSE)

    def _forget_idle(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()

    def _connected(self) -> Channel:
        connection = connect(self._path, _GLANCE_SECONDS)  # who accepts nobody must not hold up anybody
        return Channel(connection, "the lock master")

    def _stay_present(self) -> None:
        """A master that was started anew grants nothing before it is told what is written already."""
        while not self._stopped.is_set():
            if self._writers:
                _await_end(self._writers)
            if not self._stopped.wait(_PAUSE):
                self._arrive()
        self._leave()

    def _arrive(self) -> None:
        with contextlib.suppress(MillpondError, OSError), self._lock, contextlib.ExitStack() as failed:
            self._leave()
            if self._stopped.is_set():
                return
            channel = failed.enter_context(self._connected())
            self._marks, self._heard = None, time.monotonic()  # it may grant before its marks are here
            channel.call(
                m.DevicePresent(tuple(self._writing)), m.PresenceAccepted, Deadline.after(_PRESENT_SECONDS)
            )
            self._marks = _received_marks(channel)
            self._writers = channel
            failed.pop_all()

    def _leave(self) -> None:
        if self._writers:
            self._writers.close()
            self._writers = None

    def begin_writing(self, inode: int, *, anyway: bool = False) -> bool:
        """The kernel is to write the file itself; False if a client keeps what it reads of it, and it is not
        to be written so ``anyway``: a master that cannot be reached is told when it can.
        """
        with self._lock:
            if not self._writing[inode] and not self._may_write(inode, anyway) and not anyway:
                return False
            self._writing[inode] += 1
            return True

    def _may_write(self, inode: int, anyway: bool) -> bool:
        """Whether the master says so; one that is not there will be told before it grants anything."""
        if self._writers is None:
            return True
        try:
            request = m.BeginWriting(inode, anyway)
            return self._writers.call(request, m.WritingBegun, Deadline.after(_PRESENT_SECONDS)).by_kernel
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


def _received_marks(channel: Channel) -> SharedBitmapView:
    """What follows Arrived. Raises OSError."""
    channel.sock.settimeout(_PRESENT_SECONDS)
    _, descriptors, _, _ = socket.recv_fds(channel.sock, 1, 1)
    if not descriptors:
        raise os_error(errno.EPROTO)
    os.set_inheritable(descriptors[0], False)
    return SharedBitmapView(descriptors[0])


def _deadline() -> Deadline:
    """The thread that must not wait asks once, and those that may, wait for as long as leases can take."""
    return Deadline.after(_ANSWER_SECONDS if may_block.get() else _GLANCE_SECONDS)


def _too_late() -> OSError | WouldBlock:
    return os_error(errno.EIO) if may_block.get() else WouldBlock()


class _Begun:
    """A change that has begun, on ``channel``, if anybody was asked."""

    def __init__(self, guard: DeviceDelegationBreaker, begin: m.BeginChange, channel: Channel | None) -> None:
        self._guard, self._begin, self._channel = guard, begin, channel

    def revoke(self, *inodes: int) -> None:
        """Return once nobody else keeps these, too."""
        if self._channel:
            self._begin = replace(self._begin, inodes=(*self._begin.inodes, *inodes))
            more = m.BeginChange((), inodes, may_block.get())
            self._channel = self._guard.ask(more, self._channel, self._begin)

    def end(self) -> None:
        """It is done."""
        if not self._channel:
            return
        try:
            self._channel.send(m.EndChange(), Deadline.after(_ANSWER_SECONDS))
        except MillpondError:  # with the connection it has ended
            self._channel.close()
        else:
            self._guard.give_back(self._channel)
