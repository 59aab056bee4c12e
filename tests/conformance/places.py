# SPDX-License-Identifier: Apache-2.0
"""Edge: a volume in mounts of this process alone: the file system below, the device's mount, the host's."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

from millpond.base.deadline import Deadline
from millpond.base.errors import LocalError
from millpond.fs.coherence.device_server import accept_all
from millpond.fs.coherence.manager import DelegationManager
from millpond.fs.mount.host import mount_and_serve
from millpond.fs.server.connection import serve
from millpond.fs.server.sessions import SessionTable
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.store.layout import PRIVATE, PUBLIC, prepare
from millpond.linux import syscalls
from millpond.linux.confinement.sandbox import Bind, Sandbox, spawn
from millpond.linux.files import storage_id
from millpond.linux.sockets import listen
from millpond.wire.channel import Channel

_SIZE = 2 << 30
_TIMEOUT = 15.0


def make_flash(scratch: Path) -> tuple[Path, str]:
    """A volume's directory on a file system of its own, whose name is the other value: ext4, if a file can
    be mounted here. All lies in memory and is gone with this process's mounts.
    """
    syscalls.mount("tmpfs", scratch, "tmpfs", 0, "mode=755")
    image, flash = scratch / "image", scratch / "flash"
    flash.mkdir()
    with image.open("wb") as file:
        file.truncate(_SIZE)
    commands = (["mke2fs", "-q", "-t", "ext4", str(image)], ["mount", "-o", "loop", str(image), str(flash)])
    kind = "ext4" if all(_works(command) for command in commands) else "tmpfs"
    prepare(flash)
    (flash / PRIVATE).chmod(0o755)  # those whom the tests try things as have to get there
    return flash, kind


def _works(argv: list[str]) -> bool:
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    try:
        done = subprocess.run(argv, capture_output=True, check=False, env=os.environ | {"PATH": path})
    except FileNotFoundError:
        return False
    return done.returncode == 0


@contextlib.contextmanager
def device(flash: Path, mountpoint: Path, binding: str) -> Iterator[str]:
    """The device's mount; how it says that it works."""
    pid, how = start_device(flash, mountpoint, binding)
    try:
        yield how
    finally:
        stop(pid, signal.SIGTERM)


@contextlib.contextmanager
def host(flash: Path, mountpoint: Path, listener: Path, *, gives_away: bool) -> Iterator[str]:
    """The host's mount, of a server that is root, in a root directory that holds the public part; beside it
    the device's own mount, as always. A server that ``gives_away`` gives what is made to whoever makes it;
    one that does not is as on a device, where it is no root.
    """
    served = start_server(flash, listener, gives_away=gives_away)
    beside = beside_of(mountpoint)
    beside.mkdir(exist_ok=True)
    files = "new files are their makers'" if gives_away else "new files are its own"
    try:
        with device(flash, beside, "raw"):
            mounted = start_host(mountpoint, listener)
            try:
                yield f"over a Unix socket, without a tunnel, by a server that is root; {files}"
            finally:
                stop(mounted, signal.SIGTERM)
    finally:
        stop(served, signal.SIGKILL)
        listener.unlink()


def beside_of(mountpoint: Path) -> Path:
    """Where the device's own mount is, beside the host's."""
    return mountpoint.with_suffix(".device")


def start_device(flash: Path, mountpoint: Path, binding: str) -> tuple[int, str]:
    """The process that serves the device's mount, which is up, and how it says that it works."""
    argv = [sys.executable, "-m", "millpond.fs.mount.device", str(flash), str(mountpoint), "--name", "csd0"]
    argv += ["--locks", str(_locks(flash))]
    process = subprocess.Popen([*argv, "--binding", binding], stdout=subprocess.PIPE, text=True)
    process.returncode = 0  # waited for by its pid
    assert process.stdout
    with process.stdout:
        how = process.stdout.readline()
    if not how.startswith("ready: "):
        stop(process.pid, signal.SIGTERM)
        raise LocalError(f"the device's mount ({binding}) did not come up")
    return process.pid, how.removeprefix("ready: ").strip()


def start_server(flash: Path, listener: Path, *, gives_away: bool = False) -> int:
    """The process that serves the host at ``listener``, also where an earlier one did."""
    with _listening(listener) as server, _listening(_locks(flash)) as locks:
        public = Bind(flash / PUBLIC, Path("/volume") / PUBLIC, read_only=False)
        storage = storage_id(flash)
        return spawn(
            Sandbox(binds=(public,), own_network=True), lambda: _serve(server, locks, gives_away, storage)
        )


def _locks(flash: Path) -> Path:
    """Where the server is asked for locks by the device's mount of this flash."""
    return flash.with_suffix(".locks")


def _listening(path: Path) -> socket.socket:
    """Also where an earlier one still listens."""
    path.unlink(missing_ok=True)
    return listen(path)


def _serve(server: socket.socket, locks: socket.socket, gives_away: bool, storage: bytes) -> int:
    root = os.open("/volume", os.O_PATH | os.O_DIRECTORY)
    sessions = SessionTable(
        BackingFs(root, chown_new=gives_away, public=PUBLIC.encode()),
        DelegationManager(device=True),
        storage=storage,
    )
    threading.Thread(target=accept_all, args=(locks, sessions.delegations), daemon=True).start()
    while True:
        channel = Channel(server.accept()[0], "the host")
        threading.Thread(target=serve, args=(channel, sessions), daemon=True).start()


def start_host(mountpoint: Path, listener: Path) -> int:
    """The process that serves the host's mount, which is up."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _be_host(mountpoint, listener, writing)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        if pipe.read() != "ready":
            raise LocalError("the host's mount did not come up")
    return pid


def _be_host(mountpoint: Path, listener: Path, writing: int) -> None:
    def dial(deadline: Deadline) -> Channel:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(deadline.remaining())
        connection.connect(str(listener))
        return Channel(connection, "csd0")

    def ready(_how: str) -> None:
        os.write(writing, b"ready")
        os.close(writing)

    try:
        mount_and_serve(
            dial,
            mountpoint,
            name="csd0",
            allow_other=True,
            timeout=_TIMEOUT,
            numbers=_numbers(listener),
            on_ready=ready,
        )
    except BaseException:  # noqa: BLE001 - shown; nothing may go on in a copy of the caller
        traceback.print_exc()
    finally:
        os._exit(0)


def _numbers(listener: Path) -> Path:
    return listener.with_suffix(".numbers")


def stop(pid: int, number: signal.Signals) -> None:
    """Send it the signal and wait for its end; a process that has ended already is no matter."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, number)
        os.waitpid(pid, 0)
