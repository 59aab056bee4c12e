# SPDX-License-Identifier: Apache-2.0
"""Edge: the volume's processes: the device's own mount, and the server that shows the host the public part.

The server runs as another user in a sandbox in which the private part does not exist and which has no
network: its only connections are those that the agent has authenticated and passes to it.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

from millpond.agent.config import AgentConfig
from millpond.agent.gate import LedgerCounters
from millpond.base.errors import LocalError
from millpond.fs.coherence.lease_file import SIZE, open_leases
from millpond.fs.fuse import mounts
from millpond.fs.store.layout import PUBLIC
from millpond.linux.confinement.sandbox import Bind, Sandbox, python_binds, system_binds
from millpond.linux.confinement.sandboxed_process import end, start
from millpond.linux.sockets import listen, send_descriptors

log = logging.getLogger(__name__)


def lock_socket(config: AgentConfig) -> Path:
    """Return the path at which the server, master of the volume's locks, listens to the device's mount."""
    return Path(config.state, "locks")


class DeviceMount:
    """The FUSE mount of the whole volume on the device, which asks the server for locks."""

    def __init__(self, config: AgentConfig) -> None:
        self._mountpoint = Path(config.volume)
        self._clear()  # a mount that a killed agent has left
        self._make_mountpoint()
        command = [sys.executable, "-m", "millpond.fs.mount.device", config.flash, config.volume]
        options = ["--name", config.name, "--locks", str(lock_socket(config))]
        self.process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE)
        assert self.process.stdout
        ready, _, how = self.process.stdout.readline().decode(errors="replace").strip().partition(": ")
        if ready != "ready":
            self.stop()
            raise LocalError(f"the volume could not be mounted at {config.volume}")
        log.info("the volume is mounted at %s: %s", config.volume, how)

    def _make_mountpoint(self) -> None:
        try:
            self._mountpoint.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            self._mountpoint.stat()  # raises what is wrong with a dead mount, a file to Python 3.14
            raise

    def stop(self) -> None:
        """Unmount; kill the mount's process if it does not end, and remove the dead mount."""
        _stop(self.process)
        self._clear()

    def _clear(self) -> None:
        while mounts.is_volume(self._mountpoint) and mounts.unmount(self._mountpoint):
            pass


class VolumeServer:
    """The confined process that serves the public part. ``tally`` is its share of the ledger."""

    def __init__(self, config: AgentConfig, config_path: Path, tally: LedgerCounters) -> None:
        self.tally = tally
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        public = Path(config.flash, PUBLIC)
        sandbox = Sandbox(
            binds=(
                *system_binds(),
                *python_binds(),
                Bind(public, Path("/volume", PUBLIC), read_only=False),
                Bind(config_path, Path("/etc/agent.toml")),
            ),
            own_network=True,
            own_pids=True,
            uid=config.users.volume,
        )
        module = [sys.executable, "-m", "millpond.agent.volume_server", "/etc/agent.toml", "/volume"]
        locks_at = lock_socket(config)
        locks_at.unlink(missing_ok=True)  # also of an earlier server that still listens
        with theirs, listen(locks_at) as locks, _leases(Path(config.state, "leases")) as leases:
            descriptors = [theirs.fileno(), self.tally.descriptor, locks.fileno(), leases.fileno()]
            self.process = start(sandbox, [*module, *map(str, descriptors)], pass_fds=descriptors)

    def hand_over(self, connection: socket.socket) -> None:
        """Give the server an authenticated connection; this process's copy is closed."""
        with self._lock, connection:
            send_descriptors(self._socket, [connection.fileno()])

    def stop(self) -> None:
        """End the server and all its connections."""
        self._socket.close()
        _stop(self.process)


def _leases(path: Path) -> IO[bytes]:
    """Open the file of the leases that one server leaves to the next; without it the next has none."""
    try:
        descriptor = open_leases(path)
    except OSError as error:
        log.warning("leases are not kept for the next server of the volume: %s", error.strerror)
        descriptor = os.memfd_create("leases")
        os.ftruncate(descriptor, SIZE)
    return os.fdopen(descriptor, "r+b", buffering=0)


def _stop(process: subprocess.Popen[bytes], patience: float = 3.0) -> None:
    process.terminate()
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        end(process)
    if process.stdout:
        process.stdout.close()
