# SPDX-License-Identifier: Apache-2.0
"""Entry: the confined process that serves the public part of the volume to the host."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from millpond.agent.config import read
from millpond.agent.gate import CanaryError, Gate, LedgerCounters, patterns
from millpond.fs.coherence.device_server import accept_all
from millpond.fs.coherence.lease_file import LEASE_SECONDS, PersistentLeases
from millpond.fs.coherence.manager import DelegationManager
from millpond.fs.server.connection import serve
from millpond.fs.server.sessions import SessionTable
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.store.layout import PUBLIC
from millpond.linux.confinement import landlock
from millpond.linux.descriptors import allow_most
from millpond.linux.files import boot_id
from millpond.linux.malloc import trim_heap
from millpond.linux.sockets import serve_passed
from millpond.wire.channel import Channel

log = logging.getLogger(__name__)
_MOST_CONNECTIONS = 1024  # a busy mount has a hundred
_FOR_CONNECTIONS = 2048  # of the descriptors that this process may have


def main(arguments: Sequence[str]) -> int:
    """Serve on what the arguments name until the agent closes it."""
    _serve_all(*arguments)
    return 0


def _serve_all(
    config: str, root: str, storage: str, descriptor: str, tally: str, locks: str, leases: str
) -> None:
    """Serve each connection passed over ``descriptor`` until the agent closes it, and lock requests of the
    device's own mount at the listening socket ``locks``. The file ``leases`` outlasts this process;
    ``storage`` names the file system below.
    """
    logging.basicConfig(level=logging.INFO, format="volume: %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which a service manager may send to all of a unit
    most = allow_most()
    settings = read(Path(config))
    gate = Gate(patterns(settings.privacy), LedgerCounters(int(tally)))
    boot_id()  # cannot be read any more once this process is restricted
    sandbox = f"Landlock: {landlock.restrict(Path(root))}"
    log.info("%s", sandbox)
    tree = _tree(Path(root), settings.public_quota)
    tree.max_descriptors = max(most // 2, most - _FOR_CONNECTIONS)
    sessions = SessionTable(
        tree,
        DelegationManager(device=True, leases=PersistentLeases(int(leases), LEASE_SECONDS)),
        storage=bytes.fromhex(storage),
    )
    sessions.sandbox = sandbox
    listener = socket.socket(fileno=int(locks))
    threading.Thread(target=accept_all, args=(listener, sessions.delegations), daemon=True).start()
    agent = socket.socket(fileno=int(descriptor))
    trim_heap()
    serve_passed(agent, _MOST_CONNECTIONS, partial(_serve, sessions, gate))


def _tree(root: Path, quota: int | None) -> BackingFs:
    """Open the public part, with a quota if there is one."""
    tree = BackingFs(os.open(root, os.O_PATH | os.O_DIRECTORY), public=PUBLIC.encode(), limit=quota)
    if quota is not None:
        log.info("the quota of the public part is %d bytes, of which %d are taken", quota, tree.quota.used)
        tree.quota.keep_counting()
    return tree


def _serve(sessions: SessionTable, gate: Gate, connection: socket.socket) -> None:
    with Channel(connection, "host", outlet=gate.outlet()) as channel:
        try:
            if error := serve(channel, sessions):
                log.info("connection ended: %s", error)
        except CanaryError as caught:
            log.error("connection cut: %s", caught)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
