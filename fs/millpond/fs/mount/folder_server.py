# SPDX-License-Identifier: Apache-2.0
"""Entry: the process that serves a folder to mounts elsewhere, whose connections it is passed.

It is to run in a sandbox that holds no files: it has the folder by a descriptor, whose mount may be one of
another namespace. No client gets beyond it: names are looked up one by one, links are followed nowhere, and
Landlock restricts the process to what is below it, where the kernel can.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import socket
import sys
from functools import partial
from pathlib import Path

from millpond.fs.server.connection import serve
from millpond.fs.server.sessions import SessionTable
from millpond.fs.store.backing_fs import BackingFs
from millpond.linux.confinement import landlock
from millpond.linux.descriptors import allow_most
from millpond.linux.files import boot_id
from millpond.linux.sockets import serve_passed
from millpond.wire.channel import Channel

log = logging.getLogger(__name__)
MOST_CONNECTIONS = 1024  # a busy mount has a hundred
MOST_LINES = 1000
"""Lines that the process logs: its clients could fill a disk with them."""


def main(folder: str, connections: str) -> None:
    """Serve the open directory ``folder`` over each connection that is passed by the socket ``connections``,
    until its other end is closed.
    """
    logging.basicConfig(level=logging.INFO, format="shared folder: %(message)s")
    lines = itertools.count()
    logging.root.handlers[0].addFilter(lambda _line: next(lines) < MOST_LINES)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which a service manager may send to all of a unit
    os.umask(0)  # files have exactly the mode that their client asks for
    most = allow_most()
    boot_id()  # cannot be read any more once this process is restricted
    log.info("Landlock: %s", landlock.restrict(Path(f"/proc/self/fd/{folder}")))
    tree = BackingFs(int(folder), plain=True)
    tree.max_descriptors = max(most // 2, most - 2 * MOST_CONNECTIONS)
    link = socket.socket(fileno=int(connections))
    serve_passed(link, MOST_CONNECTIONS, partial(_serve, SessionTable(tree)))
    os._exit(0)  # threads of a restricted process cannot be ended: the library for that lies out of its reach


def _serve(sessions: SessionTable, connection: socket.socket) -> None:
    with Channel(connection, "a rank") as channel:
        if error := serve(channel, sessions):
            log.info("connection ended: %s", error)


if __name__ == "__main__":
    main(*sys.argv[1:])
