# SPDX-License-Identifier: Apache-2.0
"""Edge: a volume in mounts of this process alone: the file system below, the device's mount, the host's."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fs.world import World
from millpond.fs.store.layout import PRIVATE, prepare
from millpond.linux import syscalls
from millpond.linux.files import storage_id

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
            mounted = start_host(flash, mountpoint, listener)
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
    world = _world(flash, device=mountpoint, binding=binding)
    world.mount_device(as_command=True)
    return world.device_pid, world.how.removeprefix("ready: ").strip()


def start_server(flash: Path, listener: Path, *, gives_away: bool = False) -> int:
    """The process that serves the host at ``listener``, also where an earlier one did."""
    world = _world(flash, listener=listener, server_uid=0, gives_away=gives_away, storage=storage_id(flash))
    world.start_server()
    return world.server_pid


def start_host(flash: Path, mountpoint: Path, listener: Path) -> int:
    """The process that serves the host's mount, which is up."""
    return _world(flash, host=mountpoint, listener=listener, timeout=_TIMEOUT).mount_host()


def _world(flash: Path, **parts: Any) -> World:
    """The parts of a volume that are named; its server is asked for locks beside its flash."""
    places = dict.fromkeys(("device", "host", "listener"), flash)
    return World(flash, locks=flash.with_suffix(".locks"), **places | parts)


def stop(pid: int, number: signal.Signals) -> None:
    """Send it the signal and wait for its end; a process that has ended already is no matter."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, number)
        os.waitpid(pid, 0)
