# SPDX-License-Identifier: Apache-2.0
"""A device and its host: a server and mounts in processes of their own, also for ``make conformance``."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from millpond.base.deadline import Deadline
from millpond.base.errors import LocalError
from millpond.fs.coherence.device_server import accept_all
from millpond.fs.coherence.lease_file import LEASE_SECONDS, PersistentLeases
from millpond.fs.coherence.manager import DelegationManager
from millpond.fs.mount import device
from millpond.fs.mount.host import mount_and_serve
from millpond.fs.server.connection import serve
from millpond.fs.server.sessions import SessionTable
from millpond.fs.store.backing_fs import BackingFs
from millpond.linux.confinement.sandbox import Bind, Sandbox, spawn
from millpond.wire.channel import Channel

from .support import listening


def forked(body: Callable[[int], int]) -> tuple[int, str]:
    """A process that runs ``body``, and the first line that it writes to the pipe that it is given."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            gc.freeze()  # or the first collection copies all that pytest has in memory
            os.close(reading)
            code = body(writing)
        except BaseException:  # noqa: BLE001 - shown, and the exit code tells
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        return pid, pipe.readline()


def served(serve: Callable[[Callable[[], None]], None]) -> int:
    """A process that serves something, once it has said that it is ready."""

    def body(pipe: int) -> int:
        def ready() -> None:
            os.write(pipe, b"ready\n")
            os.close(pipe)

        serve(ready)
        return 0

    pid, said = forked(body)
    if said != "ready\n":
        raise LocalError("what is to be served did not come up")
    return pid


@dataclass
class World:
    """A device and its host: the volume's directory, where each of the two sees it, their processes. A server
    that ``gives_away`` gives what is made to whoever makes it; a host that ``waits`` dials until it is there.
    """

    backing: Path
    device: Path
    host: Path
    listener: Path
    locks: Path
    binding: str = "auto"
    host_binding: str = "auto"
    lease: float = LEASE_SECONDS
    timeout: float = 10.0
    server_uid: int = 65534
    gives_away: bool = False
    waits: bool = False
    how: str = ""
    device_pid: int = 0
    server_pid: int = 0
    host_pid: int = 0
    leases: int = -1
    storage: bytes = b"\1" * 16

    def mount_device(self, *, as_command: bool = False) -> None:
        """Mount by ``python -m millpond.fs.mount.device``, or by a fork that calls its ``main``: an
        interpreter takes longer to start than all else that a test mounts.
        """
        argv = [*map(str, (self.backing, self.device)), "--name", "csd0"]
        argv += ["--binding", self.binding, "--locks", str(self.locks)]

        def body(pipe: int) -> int:
            if as_command:
                os.dup2(pipe, 1)
                os.execv(sys.executable, [sys.executable, "-m", "millpond.fs.mount.device", *argv])
            sys.stdout = os.fdopen(pipe, "w")
            return device.main(argv)

        self.device_pid, self.how = forked(body)
        if not self.how.startswith("ready: "):
            raise LocalError(f"the device's mount ({self.binding}) did not come up")

    def start_server(self) -> None:
        """The confined server: another user, a root that holds the public part and no network."""
        server, locks = listening(self.listener), listening(self.locks)

        def body() -> int:
            root = os.open("/volume", os.O_PATH | os.O_DIRECTORY)
            leases = PersistentLeases(self.leases, self.lease) if self.leases >= 0 else None
            manager = DelegationManager(self.lease, device=True, leases=leases)
            flash = BackingFs(root, chown_new=self.gives_away, public=b"public")
            sessions = SessionTable(flash, manager, storage=self.storage)
            threading.Thread(target=accept_all, args=(locks, sessions.delegations), daemon=True).start()
            while True:
                channel = Channel(server.accept()[0], "the host")
                threading.Thread(target=serve, args=(channel, sessions), daemon=True).start()

        public = Bind(self.backing / "public", Path("/volume/public"), read_only=False)
        self.server_pid = spawn(Sandbox(binds=(public,), own_network=True, uid=self.server_uid), body)
        server.close()
        locks.close()

    def dial(self, deadline: Deadline) -> Channel:
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(deadline.remaining())
            try:
                sock.connect(str(self.listener))
            except OSError:
                sock.close()
                if not self.waits:
                    raise
                time.sleep(0.01)
            else:
                return Channel(sock, "csd0")

    @property
    def numbers(self) -> Path:
        """Where the host's mounts tell their numbers."""
        return self.backing.with_name("n")

    def mount_host(
        self,
        read_only: bool = False,
        *,
        at: Path | None = None,
        uid: int | None = None,
        gid: int | None = None,
    ) -> int:
        """The process that serves it."""

        def serve(ready: Callable[[], None]) -> None:
            mount_and_serve(
                self.dial,
                at or self.host,
                name="csd0",
                allow_other=True,
                read_only=read_only,
                binding=self.host_binding,
                timeout=self.timeout,
                numbers=self.numbers,
                uid=uid,
                gid=gid,
                on_ready=lambda _: ready(),
            )

        pid = served(serve)
        self.host_pid = self.host_pid if at else pid
        return pid

    def end(self) -> None:
        """End the mounts as SIGTERM does: a process that is killed does not say which lines it has run."""
        for pid in (self.host_pid, self.device_pid):
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid or (1 << 22), signal.SIGCONT)
                os.kill(pid, signal.SIGTERM)
                os.waitpid(pid, 0)

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
