# SPDX-License-Identifier: Apache-2.0
"""Edge: the device's own mount as a client of the delegation manager: each change is announced first.

While the manager cannot be reached there may be hosts that still hold delegations, but no longer than their
leases: the mount waits that long for the manager, and then goes on without it.
"""

from __future__ import annotations

import contextlib
import errno
import math
import select
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Self, TypeVar

from millpond.base.deadline import Deadline
from millpond.base.errors import DeadlineExceeded, MillpondError
from millpond.fs.coherence.lease_file import LEASE_SECONDS
from millpond.fs.coherence.shared_bitmap import SharedBitmapView, receive_bitmap
from millpond.fs.proto import delegations as m
from millpond.fs.vfs.operation import about_to_wait, current, held, pause, woken_by
from millpond.fs.vfs.path_api import os_error
from millpond.linux.sockets import connect
from millpond.wire.channel import Channel
from millpond.wire.messages import Message

R = TypeVar("R", bound=Message)
_ANSWER_SECONDS = 4 * LEASE_SECONDS  # longer than the manager itself waits
_PAUSE = 0.05
_TRIES = 3
_CONNECT_SECONDS = 0.25
_PRESENT_SECONDS = 2.0


class DeviceDelegationBreaker:
    """Announces the mount's changes over the Unix socket at ``path``. Each write intent has a connection to
    itself until it ends. Over one more, kept open, the manager learns which files the kernel writes, also
    after the manager was restarted. ``lease`` and ``clock`` are in seconds.
    """

    def __init__(
        self, path: Path, lease: float = LEASE_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path, self._lease, self._clock = path, lease, clock
        self._idle: list[Channel] = []
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._writing: Counter[int] = Counter()
        self._presence_channel: Channel | None = None
        self.bitmap: SharedBitmapView | None = None
        self._settled: Channel | None = None
        self._last_heard = (
            clock() if path.exists() else -math.inf
        )  # no socket: no manager has granted anything
        self._presence = threading.Thread(target=self._keep_present, name="presence", daemon=True)

    def __enter__(self) -> Self:
        """Register the mount with the manager, and keep it registered."""
        self._report_presence()
        self._presence.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Withdraw the mount."""
        self._stopped.set()
        with self._lock:
            if self._presence_channel:
                self._presence_channel.shut_down()
        self._presence.join(_PRESENT_SECONDS)
        self._forget_idle()

    @contextlib.contextmanager
    def write_intent(self, *directories: int, inodes: tuple[int, ...] = ()) -> Iterator[Callable[..., None]]:
        """Hold a write intent on these directories and other files; yields what adds more of these. Raises
        OSError.
        """
        begin = m.BeginChange(directories, inodes)
        channel = self.ask(begin)

        def recall(*more: int) -> None:
            nonlocal begin, channel
            if channel:
                begin = replace(begin, inodes=(*begin.inodes, *more))
                channel = self.ask(m.BeginChange((), more), channel, begin)

        try:
            yield recall
        finally:
            if channel:
                self._end(channel)

    def _end(self, channel: Channel) -> None:
        try:
            channel.send(m.EndChange(), Deadline.after(_ANSWER_SECONDS))
        except MillpondError:  # the intent has ended with its connection
            channel.close()
        else:
            self.return_channel(channel)

    def recall_writer(self, inode: int) -> bool:
        """Recall a host's write delegation of a file and wait. False if the shared bitmap shows none. Raises
        OSError.
        """
        bitmap = self.bitmap
        if bitmap is None and self._leases_are_over:
            return False
        if bitmap is not None and not bitmap.has(inode):
            return False
        if channel := self.ask(m.RecallWriter(inode)):
            self.return_channel(channel)
        return True

    def ask(self, request: Message, on: Channel | None = None, anew: Message | None = None) -> Channel | None:
        """Send a request that begins or extends a write intent. Returns the connection that holds the intent:
        ``on``, or a new one; None if there is no manager. If ``on`` was lost, ``anew`` is sent over a new
        one. Raises OSError.
        """
        deadline = Deadline.after(_ANSWER_SECONDS)
        while channel := on or self._take_channel(deadline):
            answer = self._call(channel, request, Message, deadline)
            if answer is None:
                on, request = None, anew or request
                continue
            if isinstance(answer, m.ChangeBegun):
                return channel
            if not on:
                self.return_channel(channel)
            raise os_error(answer.errno if isinstance(answer, m.ChangeRefused) else errno.EIO)
        return None

    def await_hosts(self) -> None:
        """Wait, once for each manager, until the hosts that have had locks from an earlier one have reclaimed
        them, or are late. Raises OSError.
        """
        channel = self._presence_channel
        if channel is None or channel is not self._settled or channel.peer_has_closed:
            if asked := self.ask(m.AwaitLocks()):
                self.return_channel(asked)
            self._settled = channel

    def is_settled(self) -> bool:
        """Return whether the manager that was waited for so still answers, or there is none."""
        with held(self._lock):
            answer = self._over_presence(m.AwaitLocks(at_once=True), Message)
        return isinstance(answer, m.ChangeBegun) or self._leases_are_over

    @property
    def _leases_are_over(self) -> bool:
        """Whether every delegation has expired: there has been no manager for a whole lease."""
        return self._presence_channel is None and self._clock() > self._last_heard + self._lease

    def return_channel(self, channel: Channel) -> None:
        """Return a connection that holds no write intent to the pool."""
        self._idle.append(channel)
        if self._stopped.is_set():
            self._forget_idle()

    def _call(self, channel: Channel, request: Message, reply: type[R], deadline: Deadline) -> R | None:
        """Send a request and return its reply, None if the connection was lost. Raises OSError when the
        deadline has passed.
        """
        try:
            answer = _call_interruptibly(channel, request, reply, deadline)
        except MillpondError as error:
            channel.close()
            if (operation := current.get()) and operation.is_interrupted:
                raise os_error(errno.EINTR) from None
            if isinstance(error, DeadlineExceeded):
                raise os_error(errno.EIO) from None
            self._forget_idle()  # the others lead to the same manager, which is gone
            return None
        except BaseException:  # a late answer must not be taken for the next request's
            channel.close()
            raise
        self._last_heard = self._clock()
        return answer

    def _take_channel(self, deadline: Deadline) -> Channel | None:
        """Take a connection from the pool, or dial; None if the manager was unreachable for a whole lease.
        Raises OSError when the deadline has passed, or the program that waits has received a signal.
        """
        while True:
            with contextlib.suppress(IndexError):
                return self._idle.pop()
            try:
                return self._connect()
            except OSError:
                if self._leases_are_over:
                    return None
                if deadline.passed:  # it stands still, and takes no connection
                    raise os_error(errno.EIO) from None
                about_to_wait()
                pause(_PAUSE)

    def _forget_idle(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()

    def _connect(self) -> Channel:
        connection = connect(self._path, _CONNECT_SECONDS)  # a hung manager must not hold up this mount
        return Channel(connection, "the delegation manager")

    def _keep_present(self) -> None:
        """Register again whenever the manager was restarted: it grants nothing before it knows which files
        the kernel writes.
        """
        while not self._stopped.is_set():
            if self._presence_channel:
                _await_end(self._presence_channel)
                self._last_heard = self._clock()  # so long the manager may have granted something
            if not self._stopped.wait(_PAUSE):
                self._report_presence()
        self._drop_presence()

    def _report_presence(self) -> None:
        with contextlib.suppress(MillpondError, OSError), self._lock, contextlib.ExitStack() as failed:
            self._drop_presence()
            if self._stopped.is_set():
                return
            channel = failed.enter_context(self._connect())
            self.bitmap, self._last_heard = None, self._clock()  # it may grant before its bitmap is here
            channel.call(
                m.DevicePresent(tuple(self._writing)), m.PresenceAccepted, Deadline.after(_PRESENT_SECONDS)
            )
            self.bitmap = receive_bitmap(channel.sock, _PRESENT_SECONDS)
            self._presence_channel = channel
            failed.pop_all()

    def _drop_presence(self) -> None:
        if self._presence_channel:
            self._presence_channel.close()
            self._presence_channel = None

    def begin_writing(self, inode: int, *, force: bool = False) -> bool:
        """Register that the kernel is to write the file by passthrough, within a write intent on it. False if
        a client caches it, unless ``force``. A manager that cannot be reached is informed once it can.
        """
        with held(self._lock):
            if not self._writing[inode] and self._presence_channel:
                answer = self._over_presence(m.BeginWriting(inode, force), Message)
                if not (force or (isinstance(answer, m.WritingBegun) and answer.passthrough)):
                    return False
            self._writing[inode] += 1
            return True

    def _over_presence(self, request: Message, reply: type[R]) -> R | None:
        """With the lock: send a request over the presence connection, and return the reply; None if there is
        no manager.
        """
        if (channel := self._presence_channel) is None:
            return None
        try:
            deadline = Deadline.after(_PRESENT_SECONDS)
            channel.send(request, deadline)
            about_to_wait(channel.sock.fileno(), _PRESENT_SECONDS)
            return channel.expect(reply, deadline)
        except (MillpondError, OSError):
            channel.close()  # a late answer must not be taken for the next request's
            return None

    def end_writing(self, inode: int) -> None:
        """Report that the kernel has closed the file."""
        with held(self._lock):
            self._writing[inode] -= 1
            if self._writing[inode]:
                return
            del self._writing[inode]
            if self._presence_channel is None:
                return
            with contextlib.suppress(MillpondError):  # a manager that is gone knows of no file any more
                self._presence_channel.send(m.EndWriting(inode), Deadline.after(_PRESENT_SECONDS))


def _await_end(channel: Channel) -> None:
    """Wait until the peer has closed the connection, without reading what it sends."""
    state = select.poll()
    with contextlib.suppress(OSError, ValueError):
        state.register(channel.sock.fileno(), select.POLLRDHUP)
        state.poll()


def _call_interruptibly(channel: Channel, request: Message, reply: type[R], deadline: Deadline) -> R:
    """Send a request and return its reply. Others are served meanwhile, and a signal to the program that
    waits cuts the connection, and with it a write intent: then the reply does not count. Raises OSError
    (EINTR).
    """
    with woken_by(channel.shut_down) as operation:
        channel.send(request, deadline)
        operation.about_to_wait(channel.sock.fileno(), deadline.remaining() or _ANSWER_SECONDS)
        answer = channel.expect(reply, deadline)
    if operation.is_interrupted:
        raise os_error(errno.EINTR)
    return answer
