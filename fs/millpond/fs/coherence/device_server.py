"""Edge: the lock master's end of a connection of the device's own mount."""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time

from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, ProtocolError
from millpond.fs.coherence.delegation_table import DEVICE, Inode, WriteIntent
from millpond.fs.coherence.manager import DelegationManager
from millpond.fs.proto import delegations as m
from millpond.fs.proto import file_locks as r
from millpond.fs.vfs.inode_api import WouldBlock, may_block
from millpond.wire.channel import Channel
from millpond.wire.messages import Message

log = logging.getLogger(__name__)
_PAUSE = 0.5
_ANSWER_SECONDS = 10.0


def accept_all(listener: socket.socket, master: DelegationManager) -> None:
    """Serve each connection of the device's mount in a thread, as long as the process lives."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                return
            log.warning("the device's mount has to wait: %s", error.strerror)
            time.sleep(_PAUSE)
            continue
        threading.Thread(target=serve, args=(Channel(connection, "the mount"), master), daemon=True).start()


def serve(channel: Channel, master: DelegationManager) -> None:
    """Answer one connection until it ends; what it has begun ends with it."""
    device = _Device(master)
    channel.eager = True
    try:
        with channel:
            while True:
                reply = device.perform(channel.receive(Deadline.after(None)).message)
                if reply is not None:
                    channel.send(reply, Deadline.after(_ANSWER_SECONDS))
                if isinstance(reply, m.PresenceAccepted):
                    socket.send_fds(channel.sock, [b"m"], [master.shared_marks()])
    except (ConnectionLost, ConnectionError):
        pass
    except OSError as error:
        log.warning("the device's mount cannot see what is marked: %s", error.strerror)
    finally:
        device.end()


class _Device:
    """What one connection has begun: at most one change, and files that the kernel writes."""

    def __init__(self, master: DelegationManager) -> None:
        self._master = master
        self._change = WriteIntent(DEVICE)
        self._written: list[int] = []
        self._is_presence = False

    def end(self) -> None:
        """The connection is gone, and with it the mount."""
        self._master.end(self._change)
        for inode in self._written:
            self._master.end_writing(inode)
        if self._is_presence:
            self._master.files.end(DEVICE)

    def perform(self, request: Message) -> Message | None:
        """The reply, if there is to be any. Raises ProtocolError."""
        match request:
            case m.BeginChange():
                return self._begin(request)
            case m.EndChange():
                self._master.end(self._change)
            case m.SettleDirectory():
                return self._settle(request)
            case m.DevicePresent():
                return self._arrive(request.inodes)
            case m.BeginWriting():
                return self._begin_writing(request.inode, request.anyway)
            case m.EndWriting():
                self._end_writing(request.inode)
            case r.LockRequest():
                return self._file_locks(request)
            case _:
                raise ProtocolError(f"'{request.NAME}' is no request to a lock master")
        return None

    def _file_locks(self, request: r.LockRequest) -> Message:
        inode = request.file if isinstance(request, r.OfFile) else 0
        try:
            return self._master.files.perform(DEVICE, inode, request)
        except OSError as error:
            return r.LockSet(error.errno or errno.EIO)

    def _begin(self, request: m.BeginChange) -> Message:
        may_block.set(request.patient)
        try:
            self._master.add(self._change, [Inode(i) for i in sorted(set(request.directories))], alone=True)
            self._master.add(self._change, [Inode(i) for i in request.inodes], alone=False)
        except WouldBlock:
            self._master.end(self._change)
            return m.WaitForLeases()
        except OSError as error:
            self._master.end(self._change)
            return m.ChangeRefused(error.errno or errno.EIO)
        return m.ChangeBegun()

    def _settle(self, request: m.SettleDirectory) -> Message:
        may_block.set(request.patient)
        try:
            self._master.settle(DEVICE, request.inode)
        except WouldBlock:
            return m.WaitForLeases()
        except OSError as error:
            return m.ChangeRefused(error.errno or errno.EIO)
        return m.ChangeBegun()

    def _arrive(self, inodes: tuple[int, ...]) -> Message:
        for inode in inodes:  # whether they may or not: it goes on since before this master began
            self._master.begin_writing(inode, already=True)
        self._written += inodes
        self._is_presence = True
        self._master.device_is_present()
        return m.PresenceAccepted()

    def _begin_writing(self, inode: int, anyway: bool) -> Message:
        may = self._master.begin_writing(inode, already=anyway)
        if may:
            self._written.append(inode)
        return m.WritingBegun(may)

    def _end_writing(self, inode: int) -> None:
        if inode in self._written:
            self._written.remove(inode)
            self._master.end_writing(inode)
