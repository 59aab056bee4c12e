"""Entry: the confined process that serves the public part of the volume to the host."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import socket
import sys
import threading
from pathlib import Path

from millpond.agent.config import read
from millpond.agent.gate import CanaryError, Gate, Tally, patterns
from millpond.fs.layout import PUBLIC
from millpond.fs.operations import Operations
from millpond.fs.server import serve
from millpond.fs.sessions import Sessions
from millpond.linux import landlock
from millpond.linux.sockets import receive_descriptors
from millpond.wire.channel import Channel

log = logging.getLogger(__name__)


def main(config: str, root: str, descriptor: str, tally: str) -> None:
    """Serve each connection passed over ``descriptor`` until the agent closes it."""
    logging.basicConfig(level=logging.INFO, format="volume: %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    gate = Gate(patterns(read(Path(config)).privacy), Tally(int(tally)))
    log.info("Landlock: %s", landlock.restrict(Path(root)))
    sessions = Sessions(Operations(os.open(root, os.O_PATH | os.O_DIRECTORY), measured=PUBLIC))
    agent = socket.socket(fileno=int(descriptor))
    with contextlib.suppress(ConnectionError):
        while True:
            connection = socket.socket(fileno=receive_descriptors(agent, 1)[0])
            threading.Thread(target=_serve, args=(connection, sessions, gate), daemon=True).start()


def _serve(connection: socket.socket, sessions: Sessions, gate: Gate) -> None:
    with Channel(connection, "host", outlet=gate.outlet()) as channel:
        try:
            if error := serve(channel, sessions):
                log.info("connection ended: %s", error)
        except CanaryError as caught:
            log.error("connection cut: %s", caught)


if __name__ == "__main__":
    main(*sys.argv[1:])
