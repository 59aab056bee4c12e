# SPDX-License-Identifier: Apache-2.0
"""Edge: the volume's processes: the device's own mount, and the server that shows the host the public part.

The server runs as another user in a sandbox in which the private part does not exist and which has no
network: its only connections are those that the agent has authenticated and passes to it.
"""

from __future__ import annotations

import contextlib
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
from millpond.fs.mount.volume_root import lay_out, take_away
from millpond.fs.store.layout import PUBLIC
from millpond.linux.child import first_line
from millpond.linux.confinement import landlock
from millpond.linux.confinement.sandbox import Bind, Sandbox, python_binds, system_binds
from millpond.linux.confinement.sandboxed_process import end, start
from millpond.linux.files import storage_id
from millpond.linux.progress import ProcessorShare
from millpond.linux.sockets import QUESTION, listen, send_descriptors
from millpond.linux.zygote.forked import Child
from millpond.linux.zygote.prepared import PreparedFork

log = logging.getLogger(__name__)
_RESTART_SECONDS, _PAUSE = 5.0, 0.05
_MOST_ANSWERS = 1 << 10
_SILENT_LOOKS = 8
"""A server that leaves so many questions in a row unanswered, one a second, stands still. Seconds in which it
waits for a processor do not count.
"""
_STARTING_LOOKS = 600  # it counts all files for a quota before it answers the first one
_MOUNT_SECONDS = 120.0  # a journal may have to be replayed by a slow board


def lock_socket(config: AgentConfig) -> Path:
    """Return the path at which the server, master of the volume's locks, listens to the device's mount."""
    return Path(config.state, "locks")


def _check_confinement(config: AgentConfig) -> None:
    """Raise LocalError if the server cannot be restricted, and must be."""
    if config.privacy.landlock == "required" and (reason := landlock.why_off()):
        raise LocalError(
            f"the volume's server cannot be restricted by Landlock: {reason}; to run it all the same, set "
            "landlock in [privacy] to 'best-effort'"
        )


class DeviceMount:
    """The volume on the device: the private part is the flash's own directory, the public part a FUSE mount
    that announces changes to the server.
    """

    def __init__(self, config: AgentConfig, prepared: PreparedFork | None = None) -> None:
        self._mountpoint = Path(config.volume)
        take_away(self._mountpoint)  # a mount that a killed agent has left
        self._make_mountpoint()
        lay_out(Path(config.flash), self._mountpoint)
        options = ["--name", config.name, "--locks", str(lock_socket(config))]
        self.process = _start_mount([config.flash, config.volume, *options], prepared)
        assert self.process.stdout
        try:
            ready, _, how = first_line(self.process.stdout.fileno(), _MOUNT_SECONDS).partition(": ")
        except TimeoutError as error:
            ready, how = "", str(error)
        if ready != "ready":
            self.stop()
            raise LocalError(f"the volume could not be mounted at {config.volume}{how and f': {how}'}")
        log.info("the volume is mounted at %s: %s", config.volume, how)

    @property
    def alive(self) -> bool:
        """Whether the process of the public part's mount lives."""
        return self.process.poll() is None

    def _make_mountpoint(self) -> None:
        try:
            self._mountpoint.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            self._mountpoint.stat()  # raises what is wrong with a dead mount, a file to Python 3.14
            raise

    def stop(self) -> None:
        """Unmount; kill the mount's process if it does not end, and remove the dead mount."""
        _stop(self.process)
        take_away(self._mountpoint)


def _start_mount(arguments: list[str], prepared: PreparedFork | None) -> Child:
    module = "millpond.fs.mount.device"
    if prepared is None:
        return subprocess.Popen([sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE)
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        process = prepared.start(module, arguments, stdout=writer)
    except OSError:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    process.stdout = os.fdopen(reader, "rb", buffering=0)
    return process


class VolumeServer:
    """The confined process that serves the public part. ``tally`` is its share of the ledger. The first is
    ``prepared``, those after it are programs of their own. Raises LocalError where the kernel cannot confine
    it as the configuration demands, OSError.
    """

    def __init__(
        self,
        config: AgentConfig,
        config_path: Path,
        tally: LedgerCounters,
        prepared: PreparedFork | None = None,
    ) -> None:
        _check_confinement(config)
        self.tally, self._config, self._config_path = tally, config, config_path
        self._restarted = threading.Condition()
        self._start(prepared)

    def _start(self, prepared: PreparedFork | None = None) -> None:
        config = self._config
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)  # a server that stands still must hold no caller up
        self.unanswered = _SILENT_LOOKS - _STARTING_LOOKS
        public = Path(config.flash, PUBLIC)
        sandbox = Sandbox(
            binds=(
                *system_binds(),
                *python_binds(),
                Bind(public, Path("/volume", PUBLIC), read_only=False),
                Bind(self._config_path, Path("/etc/agent.toml")),
            ),
            own_network=True,
            own_pids=True,
            uid=config.users.volume,
        )
        module = "millpond.agent.volume_server"
        arguments = ["/etc/agent.toml", "/volume", storage_id(public).hex()]
        new = Path(config.state, "locks.new")
        with theirs, listen(new) as locks, _leases(Path(config.state, "leases")) as leases:
            new.replace(lock_socket(config))  # one without a socket would have delegated nothing
            descriptors = [theirs.fileno(), self.tally.descriptor, locks.fileno(), leases.fileno()]
            arguments += map(str, descriptors)
            self.process: Child
            if prepared:
                self.process = prepared.start(module, arguments, descriptors, sandbox=sandbox)
            else:
                command = [sys.executable, "-m", module, *arguments]
                self.process = start(sandbox, command, pass_fds=descriptors)
        self._share = ProcessorShare(self.process.pid)

    @property
    def alive(self) -> bool:
        """Whether the server's process lives."""
        return self.process.poll() is None

    def is_well(self) -> bool:
        """Return whether the server lives and answers. To be called once a second: each call asks it, and
        kills one that has left several questions unanswered, to be restarted.
        """
        with self._restarted:
            if not self.alive:
                return False
            with contextlib.suppress(OSError):
                if self._socket.recv(_MOST_ANSWERS):
                    self.unanswered = 0
            if self.unanswered >= _SILENT_LOOKS:
                log.warning("the volume's server stands still, and is killed")
                end(self.process)
                return False
            with contextlib.suppress(OSError):
                self._socket.send(QUESTION)
            self.unanswered += not (self.unanswered > 0 and self._share.is_lacking())
            return True

    def restart(self) -> None:
        """Start a server in the place of one that has died. Hosts and the device's mount connect again, and
        go on with the files that they have open. Raises OSError.
        """
        with self._restarted:
            self.stop()
            self._start()
            self._restarted.notify_all()

    def hand_over(self, connection: socket.socket) -> None:
        """Give the server an authenticated connection, once it has been restarted if it has died; this
        process's copy is closed. Raises OSError, BlockingIOError if it stands still.
        """
        with self._restarted, connection:
            if not self.alive:
                self._restarted.wait_for(lambda: self.alive, _RESTART_SECONDS)
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


def _stop(process: Child, patience: float = 3.0) -> None:
    process.terminate()
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        end(process)
    if process.stdout:
        process.stdout.close()
