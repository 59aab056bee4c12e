# SPDX-License-Identifier: Apache-2.0
"""Edge: the delegation manager's end of the connections of the device's own mount."""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections.abc import Callable

from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, DeadlineExceeded, ProtocolError
from millpond.fs.coherence.delegation_table import DEVICE, WriteIntent
from millpond.fs.coherence.manager import DelegationManager
from millpond.fs.coherence.shared_bitmap import send_bitmap
from millpond.fs.proto import delegations as m
from millpond.linux.sockets import serve_in_thread
from millpond.wire.channel import Channel
from millpond.wire.messages import Message

log = logging.getLogger(__name__)
_PAUSE = 0.5
_ANSWER_SECONDS = 10.0


def accept_all(listener: socket.socket, delegations: DelegationManager) -> None:
    """Serve each connection of the device's mount in a thread, as long as the process lives."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                return
            log.warning("cannot accept the device's mount yet: %s", error.strerror)
            time.sleep(_PAUSE)
            continue
        serve_in_thread(connection, lambda sock: serve(Channel(sock, "the mount"), delegations))


def serve(channel: Channel, delegations: DelegationManager) -> None:
    """Answer one connection until it ends; its write intent and its passthrough writers end with it."""
    device = _Device(delegations)
    channel.eager = True
    try:
        with channel:
            while True:
                request = channel.receive(Deadline.after(None)).message
                reply = device.perform(request)
                if reply is not None:
                    channel.send(reply, Deadline.after(_ANSWER_SECONDS))
                if isinstance(reply, m.PresenceAccepted):
                    delegations.share_bitmap()
                    send_bitmap(channel.sock, delegations.bitmap)
    except (ConnectionLost, ConnectionError, DeadlineExceeded):
        pass
    except OSError as error:
        log.warning("cannot share memory with the device's mount: %s", error.strerror)
    finally:
        device.end()


class _Device:
    """State of one connection: at most one write intent, and the files that the kernel writes by
    passthrough.
    """

    def __init__(self, delegations: DelegationManager) -> None:
        self._delegations = delegations
        self._change = WriteIntent(DEVICE)
        self._written: list[int] = []

    def end(self) -> None:
        """Release everything that ended with the connection."""
        self._delegations.end(self._change)
        self._delegations.lose_device(self)  # first: its kernel may go on writing
        for inode in self._written:
            self._delegations.end_writing(inode)

    def perform(self, request: Message) -> Message | None:
        """Perform a request. Returns the reply, None if it is not answered. Raises ProtocolError."""
        match request:
            case m.BeginChange():
                return self._begin(request)
            case m.EndChange():
                self._delegations.end(self._change)
            case m.RecallWriter():
                return _awaited(lambda: self._delegations.recall_writer(DEVICE, request.inode))
            case m.AwaitLocks(at_once=True) if self._delegations.others_reclaim(DEVICE):
                return m.WaitForLeases()
            case m.AwaitLocks():
                return _awaited(lambda: self._delegations.await_locks(DEVICE))
            case m.DevicePresent():
                return self._report_presence(request.inodes)
            case m.BeginWriting():
                return self._begin_writing(request)
            case m.EndWriting():
                self._end_writing(request.inode)
            case _:
                raise ProtocolError(f"'{request.NAME}' is no request to a delegation manager")
        return None

    def _begin(self, request: m.BeginChange) -> Message:
        def begin() -> None:
            self._delegations.add(self._change, sorted(set(request.directories)), alone=True)
            self._delegations.add(self._change, request.inodes, alone=False)

        answer = _awaited(begin)
        if not isinstance(answer, m.ChangeBegun):
            self._delegations.end(self._change)
        return answer

    def _report_presence(self, inodes: tuple[int, ...]) -> Message:
        for inode in inodes:  # unconditionally: these writes began before this connection
            self._delegations.begin_writing(inode, already=True)
        self._written += inodes
        self._delegations.report_device(self)
        return m.PresenceAccepted()

    def _begin_writing(self, request: m.BeginWriting) -> Message:
        may = self._delegations.begin_writing(request.inode, already=request.force)
        if may:
            self._written.append(request.inode)
        return m.WritingBegun(may)

    def _end_writing(self, inode: int) -> None:
        if inode in self._written:
            self._written.remove(inode)
            self._delegations.end_writing(inode)


def _awaited(wait: Callable[[], object]) -> Message:
    try:
        wait()
    except OSError as error:
        return m.ChangeRefused(error.errno or errno.EIO)
    return m.ChangeBegun()
