# SPDX-License-Identifier: Apache-2.0
"""Entry: mounts a folder that is served elsewhere, by connections that its parent process passes to it.

The two talk by a socket of packets: this process says READY once it has mounted, or why it cannot, and
WANTED for each connection that it needs. Once it has mounted it gives up all rights but those of the mount's
user, for what it reads comes from another machine.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path

from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, DeadlineExceeded, MillpondError
from millpond.fs.mount.host import mount_and_serve
from millpond.linux.sockets import receive_descriptors
from millpond.linux.syscalls import die_with_parent, no_new_privileges
from millpond.wire.channel import Channel

READY, WANTED = b"ready", b"?"
MOST_SAID = 1 << 12


class PassedConnections:
    """Asks the parent for connections, by the socket that leads to it."""

    def __init__(self, parent: socket.socket) -> None:
        self._parent, self._one = parent, threading.Lock()

    def dial(self, deadline: Deadline) -> Channel:
        """Return a new connection to the server. Raises RemoteError."""
        if not self._one.acquire(timeout=deadline.remaining() or threading.TIMEOUT_MAX):
            raise DeadlineExceeded("no connection came in time")
        try:
            self._parent.send(WANTED)
            self._parent.settimeout(deadline.remaining())
            (descriptor,) = receive_descriptors(self._parent, 1)
        except TimeoutError:
            raise DeadlineExceeded("no connection came in time") from None
        except OSError as error:
            raise ConnectionLost(f"the folder is shared no more: {error.strerror or error}") from None
        finally:
            self._one.release()
        return Channel(socket.socket(fileno=descriptor), "the shared folder")


def main(parent: str, mountpoint: str, name: str, user: str) -> int:
    """Mount, and serve until it is unmounted or the parent has gone. All files show as the ``user``'s, who is
    let in, too; as this process's if that is empty.
    """
    die_with_parent(signal.SIGTERM)
    logging.basicConfig(level=logging.INFO, format=f"{name}: %(message)s")
    link, uid = socket.socket(fileno=int(parent)), int(user) if user else None
    if uid is not None:  # else it may need fusermount's
        no_new_privileges()  # which threads inherit: those of the mount run before it is ready

    def ready(_how: str) -> None:
        if uid is not None:
            _become(uid)
        link.send(READY)

    try:
        mount_and_serve(
            PassedConnections(link).dial,
            Path(mountpoint),
            name=name,
            allow_other=uid is not None,
            uid=uid,
            gid=uid,
            on_ready=ready,
        )
    except (MillpondError, OSError) as error:
        link.send(str(error).encode(errors="replace")[:MOST_SAID])
        return 1
    return 0


def _become(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    die_with_parent(signal.SIGTERM)  # a change of credentials clears it


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
