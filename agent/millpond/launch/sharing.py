# SPDX-License-Identifier: Apache-2.0
"""Edge: the folders of the host that launches share with this device, each for as long as its connection.

The device connects to nobody: for each connection that a mount wants the host is sent a ticket, with which it
connects.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from millpond.base.deadline import Deadline
from millpond.base.errors import LocalError, ProtocolError, Refused, RemoteError
from millpond.launch.shared_mount import END_SECONDS, SharedMount, clear
from millpond.linux import sockets
from millpond.train.distributed.launch_messages import EndSharing, ShareFolder
from millpond.wire.channel import Channel
from millpond.wire.control_messages import Ticket
from millpond.wire.messages import Failure, Message, Ok

REPLY_SECONDS = 10.0
_RUN = re.compile("[0-9a-f]{32}")


Issue = Callable[[SharedMount, bool], Ticket]
"""Makes a ticket for a mount's next connection, encrypted if that is true."""


class SharedFolders:
    """The mounts of shared folders, below ``top``, for scripts of the ``user``."""

    def __init__(self, top: Path, user: int) -> None:
        self._top, self._user = top, user
        self._mounts: dict[str, SharedMount] = {}
        self._lock = threading.Lock()
        clear(top)

    def place(self, run: str) -> Path:
        """Return where the folder of a launch is mounted. Raises Refused."""
        if not (mount := self._mounts.get(run)):
            raise Refused("", "state", "the launch's shared folder is not mounted")
        return mount.place

    def serve(self, request: ShareFolder, host: Channel, issue: Issue) -> None:
        """Mount a folder until the host wants its end, or leaves. Raises RemoteError."""
        last: Message = Ok()
        try:
            with self._mounted(request.run) as mount:
                _serve(mount, host, lambda: issue(mount, request.tls))
        except (OSError, LocalError) as error:
            text = (isinstance(error, OSError) and error.strerror) or error
            last = Failure("device", f"the shared folder cannot be mounted: {text}")
        host.send(last, Deadline.after(REPLY_SECONDS))

    @contextlib.contextmanager
    def _mounted(self, run: str) -> Iterator[SharedMount]:
        with self._lock:
            if not _RUN.fullmatch(run) or run in self._mounts:
                raise ProtocolError("this is no name of a new launch")
            mount = self._mounts[run] = SharedMount(self._top / run, self._user)
        try:
            yield mount
        finally:
            mount.close()
            del self._mounts[run]


def _serve(mount: SharedMount, host: Channel, ticket: Callable[[], Ticket]) -> None:
    """Tell the host when the mount is ready, and which connections it wants, also for its end, which comes
    when the host wants it. Raises RemoteError.
    """
    watched, seconds = [host.sock, mount.socket], None
    while ready := sockets.readable(watched, seconds):
        if host.sock in ready:
            host.expect(EndSharing, Deadline.after(REPLY_SECONDS))
            mount.end()
            watched, seconds = [mount.socket], END_SECONDS
            continue
        try:
            answer: Message = Ok() if mount.is_ready() else ticket()
        except RemoteError as error:
            if seconds:
                return
            host.send(Failure("device", str(error)), Deadline.after(REPLY_SECONDS))
            watched = [host.sock]
        else:
            host.send(answer, Deadline.after(REPLY_SECONDS))
