# SPDX-License-Identifier: Apache-2.0
"""Edge: the folder of the host that all ranks of a launch share: its server, and the mounts of the ranks.

The server is a confined process of the folder's owner, without network: its connections are made here. To a
device the host connects, each time that the device's mount asks for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, LocalError, MillpondError, ProtocolError, RemoteError
from millpond.base.text import printable
from millpond.host.fleet import worker_user
from millpond.host.fleet.device import Device
from millpond.launch.shared_mount import SharedMount
from millpond.linux import sockets
from millpond.linux.confinement import landlock
from millpond.linux.confinement.sandbox import Sandbox, python_binds, system_binds
from millpond.linux.confinement.sandboxed_process import end, start
from millpond.linux.sockets import serve_in_thread
from millpond.train.distributed.launch_messages import EndSharing, ShareFolder
from millpond.wire.channel import Channel
from millpond.wire.control_messages import Ticket
from millpond.wire.messages import Ok
from millpond.wire.relay import is_readable, relay

log = logging.getLogger(__name__)

READY_SECONDS, END_SECONDS, DIAL_SECONDS, LOOK_SECONDS = 60.0, 10.0, 5.0, 0.1
MOST_RELAYED = 256
"""Encrypted connections of a device, each of which takes a thread here; a busy mount has a hundred."""


class SharedFolder:
    """The folder of the open descriptor ``folder``, served until ``close``. The host's rank has it mounted
    below ``top``. Raises OSError, LocalError.
    """

    def __init__(self, folder: int, top: Path) -> None:
        self._top, self._lock = top, threading.Lock()
        sandbox = _sandbox(folder)
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(DIAL_SECONDS)  # a server that stands still must hold nobody up
        with contextlib.ExitStack() as failed, theirs:
            failed.callback(self._socket.close)
            descriptors = [folder, theirs.fileno()]
            command = [sys.executable, "-m", "millpond.fs.mount.folder_server", *map(str, descriptors)]
            self._process = start(sandbox, command, pass_fds=descriptors)
            failed.pop_all()

    def close(self) -> None:
        """End the server, and all connections with it."""
        self._socket.close()
        end(self._process)

    def _take(self, connection: socket.socket) -> None:
        """Give the server a connection; this process's copy is closed."""
        with connection, self._lock, contextlib.suppress(OSError):  # a server that has died has its rank fail
            sockets.send_descriptors(self._socket, [connection.fileno()])

    @contextlib.contextmanager
    def on_host(self, run: str) -> Iterator[Path]:
        """Mount it for the host's rank inside the context; yields where. Raises RemoteError, OSError."""
        mount = SharedMount(self._top / run, worker_user.UID)
        with contextlib.closing(mount):
            self._until_ready(mount)
            thread = threading.Thread(
                target=self._connect_all, args=(mount,), name="shared host", daemon=True
            )
            thread.start()
            try:
                yield mount.place
            finally:
                mount.end()
                thread.join(END_SECONDS)

    def _until_ready(self, mount: SharedMount) -> None:
        deadline = Deadline.after(READY_SECONDS)
        while sockets.readable([mount.socket], deadline.remaining()):
            if mount.is_ready():
                return
            self._connect(mount)
        raise RemoteError("the shared folder could not be mounted in time")

    def _connect_all(self, mount: SharedMount) -> None:
        """Give the mount each connection that it wants, until it ends."""
        with contextlib.suppress(RemoteError, OSError):
            while not mount.is_ready():
                self._connect(mount)

    def _connect(self, mount: SharedMount) -> None:
        ours, theirs = socket.socketpair()
        self._take(theirs)
        mount.hand_over(ours)

    @contextlib.contextmanager
    def on_device(
        self, device: Device, run: str, is_over: Callable[[], bool] = lambda: False
    ) -> Iterator[None]:
        """Have a device mount the folder inside the context. Raises RemoteError, also when the launch
        ``is_over`` before it has.
        """
        with device.control(Deadline.after(READY_SECONDS)) as agent:
            share = _DeviceShare(device, agent, self._take)
            agent.send(ShareFolder(run, device.config.encrypt == "always"), Deadline.after(READY_SECONDS))
            share.until_ok(Deadline.after(READY_SECONDS), is_over)
            thread = threading.Thread(target=share.serve, name=f"shared {device.name}", daemon=True)
            thread.start()
            try:
                yield
            finally:
                share.ending = True
                thread.join(2 * END_SECONDS)


class _DeviceShare:
    """Makes the connections that the mount of a ``device`` wants, and gives them to ``take``. It logs the
    first that fails alone: a device may want any number.
    """

    def __init__(self, device: Device, agent: Channel, take: Callable[[socket.socket], None]) -> None:
        self._device, self._agent, self._take = device, agent, take
        self._places = threading.BoundedSemaphore(MOST_RELAYED)
        self._unsaid, self.ending = threading.Lock(), False

    def until_ok(self, deadline: Deadline, is_over: Callable[[], bool] = lambda: False) -> None:
        """Serve the agent until it says Ok. Raises RemoteError, also when it ``is_over``."""
        while not (is_readable(self._agent.sock, LOOK_SECONDS) and self._is_ok(deadline)):
            deadline.remaining()
            if is_over():
                raise ConnectionLost("the launch is over")

    def serve(self) -> None:
        """Serve the agent until the mount is to end, and has ended; logs an end before that."""
        try:
            while not self.ending:
                if is_readable(self._agent.sock, LOOK_SECONDS) and self._is_ok(Deadline.after(END_SECONDS)):
                    raise ProtocolError("it sent 'ok' without a reason")
            self._agent.send(EndSharing(), Deadline.after(END_SECONDS))
            self.until_ok(Deadline.after(END_SECONDS))
        except (MillpondError, OSError) as error:
            log.warning("%s: the shared folder: %s", self._device.name, printable(str(error)))

    def _is_ok(self, deadline: Deadline) -> bool:
        """Take a message: Ok, or a Ticket for a connection, which is made. Raises RemoteError."""
        head = self._agent.receive(deadline)
        if isinstance(head.message, Ticket) and not head.payload_size:
            self._connect(head.message)
            return False
        self._agent.checked(head, Ok)
        return True

    def _connect(self, ticket: Ticket) -> None:
        try:
            channel = self._device.bulk(ticket.token, ticket.tls, Deadline.after(DIAL_SECONDS))
        except RemoteError as error:  # the mount asks again
            self._log(printable(str(error)))
            return
        if ticket.tls:
            serve_in_thread(channel.sock, self._relay)
        else:
            self._take(channel.sock)

    def _log(self, text: str) -> None:
        if self._unsaid.acquire(blocking=False):
            log.info("%s: the shared folder: %s", self._device.name, text)

    def _relay(self, secure: socket.socket) -> None:
        with secure:
            if not self._places.acquire(blocking=False):
                self._log(f"{MOST_RELAYED} encrypted connections are in use: one more was refused")
                return
            try:
                relay(secure, self._take)
            finally:
                self._places.release()


def _sandbox(folder: int) -> Sandbox:
    """Return the server's sandbox, which holds no files: it is of the folder's owner, whose all new files are
    then; root has no privileges in it. Raises LocalError where nothing would keep root's from other files.
    """
    sandbox = Sandbox(binds=(*system_binds(), *python_binds()), own_network=True, own_pids=True)
    found = os.fstat(folder)
    if worker_user.is_separate() and found.st_uid:
        return replace(sandbox, uid=found.st_uid, gid=found.st_gid)
    if worker_user.is_separate() and (reason := landlock.why_off()):
        raise LocalError(
            f"root's folders are shared only where Landlock keeps their server below them: {reason}; share "
            "one of another user"
        )
    return replace(sandbox, capabilities=False)
