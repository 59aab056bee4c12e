# SPDX-License-Identifier: Apache-2.0
"""Edge: the mount of a launch's shared folder, on the host or a device, as its parent process sees it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

from millpond.base.errors import LocalError, RemoteError
from millpond.base.text import printable
from millpond.fs.fuse.mounts import unmount
from millpond.fs.mount.passed import MOST_SAID, READY, WANTED
from millpond.linux.confinement.userns import has_many_uids
from millpond.linux.sockets import send_descriptors

END_SECONDS = 5.0


class SharedMount:
    """A process that mounts a shared folder at ``place``, which is made, for ``user``. It ends with the
    thread that has started it, at the latest. Raises OSError.
    """

    def __init__(self, place: Path, user: int) -> None:
        shown = str(user) if os.geteuid() == 0 and has_many_uids() else ""
        self.place = place
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        """Readable when ``is_ready`` has something to say."""
        command = [sys.executable, "-m", "millpond.fs.mount.passed", str(theirs.fileno()), str(place)]
        with contextlib.ExitStack() as failed, theirs:
            failed.callback(self.socket.close)
            place.mkdir(mode=0o700, parents=True)
            self._process = subprocess.Popen(
                [*command, f"launch-{place.name}", shown],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
            failed.pop_all()

    def is_ready(self) -> bool:
        """Take what the process says next: it has mounted, or wants a connection, if not. Raises RemoteError
        if it has ended.
        """
        said = self.socket.recv(MOST_SAID)
        if said not in (READY, WANTED):
            why = printable(said.decode(errors="replace")) or "its mount has ended"
            raise RemoteError(f"the shared folder: {why}")
        return said == READY

    def hand_over(self, connection: socket.socket) -> None:
        """Pass a connection to the folder's server; this process's copy is closed."""
        with connection, contextlib.suppress(OSError):  # it may have ended
            send_descriptors(self.socket, [connection.fileno()])

    def end(self) -> None:
        """Have the process send all that programs have written, unmount, and end. It may want connections
        for that.
        """
        self._process.terminate()

    def close(self) -> None:
        """Wait for the end, and kill what does not end."""
        self.end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self._process.kill()
        self.socket.close()
        take_away(self.place)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)


def clear(top: Path) -> None:
    """Remove all places below ``top``, which a process that was killed has left."""
    for left in top.glob("*"):
        take_away(left)


def take_away(place: Path) -> None:
    """Remove a place and what is mounted there."""
    with contextlib.suppress(OSError, LocalError):
        while unmount(place):
            pass
        place.rmdir()
