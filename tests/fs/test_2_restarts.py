# SPDX-License-Identifier: Apache-2.0
"""The volume while the device's server is away, and over its restarts: programs wait, files stay open."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from millpond.fs.client import session
from millpond.fs.client.remote_fs import RemoteFs
from millpond.fs.vfs.inode_api import ROOT
from millpond.fs.vfs.operation import Operation, current
from millpond.fs.vfs.path_adapter import PathAdapter
from millpond.linux import syscalls

from .support import Doing, Server, errno_of, lasts


def test_fsync_does_not_promise_what_may_be_gone(volume: PathAdapter, server: Server) -> None:
    handle = volume.open("f", os.O_RDWR | os.O_CREAT, 0o644)
    volume.write(handle, b"1", 0)
    server.drop()
    volume.fsync(handle)  # the server lives: it has what was written
    server.restart()
    volume.fsync(handle)  # nothing was outstanding
    volume.write(handle, b"2", 0)
    server.restart()
    volume.fsync(handle)  # the device's kernel has it, whoever has written it
    volume.write(handle, b"2", 0)
    server.reboot()
    volume.write(handle, b"3", 1)
    assert errno_of(volume.fsync, handle) == errno.EIO
    volume.fsync(handle)
    server.reboot()
    volume.fsync(handle)  # nothing was outstanding


def test_open_files_are_opened_again_whatever_their_permissions(
    volume: PathAdapter, server: Server, top: Path
) -> None:
    """As files of git, that are made with mode 0444 and then written."""
    handles = [
        volume.open("f", os.O_WRONLY | os.O_CREAT, 0o444),
        volume.open("g", os.O_RDWR | os.O_CREAT, 0o644),
    ]
    volume.chmod("g", 0)
    with syscalls.without_capability(syscalls.CAP_DAC_OVERRIDE):
        server.restart()
        for handle in handles:
            volume.write(handle, b"written", 0)
        assert errno_of(volume.open, "f", os.O_WRONLY) == errno.EACCES  # who opens it anew
    for name, mode in (("f", 0o444), ("g", 0)):
        assert (top / name).read_bytes() == b"written"
        assert (top / name).stat().st_mode & 0o777 == mode


def test_another_file_of_the_same_name_is_not_mistaken(
    volume: PathAdapter, server: Server, top: Path
) -> None:
    handles = [volume.open(name, os.O_RDWR | os.O_CREAT, 0o644) for name in ("f", "g")]
    (top / "other").write_text("other")
    (top / "other").rename(top / "f")
    (top / "g").unlink()
    server.restart()
    for handle in handles:
        assert errno_of(volume.read, handle, 5, 0) == errno.ESTALE
        volume.release(handle)
    server.restart()
    assert errno_of(volume.read, handles[0], 1, 0) == errno.EBADF


def test_nobody_there(volume: PathAdapter, server: Server) -> None:
    handle = volume.open("f", os.O_RDWR | os.O_CREAT, 0o644)
    server.drop()
    server.refusing = True
    assert errno_of(volume.getattr, "f") == errno.EIO
    assert errno_of(volume.read, handle, 1, 0) == errno.EIO
    volume.release(handle)
    server.refusing = False
    assert volume.getattr("f").size == 0


def _performed(operation: Operation, do: Callable[[], object]) -> object:
    current.set(operation)
    return do()


def test_a_program_waits_for_a_server_that_is_being_started_again(tree: RemoteFs, server: Server) -> None:
    tree.statfs()
    server.drop()
    server.refusing = True
    waiting = Doing(_performed, Operation(), tree.statfs)
    operation = Operation()
    interrupted = Doing(_performed, operation, tree.statfs)
    assert lasts(lambda: not waiting.done and not interrupted.done)
    operation.interrupt()
    assert errno_of(interrupted.result) == errno.EINTR
    server.refusing = False
    waiting.result()


def test_no_program_waits_long_for_a_server_that_is_away(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "SILENT_SECONDS", 0.4)
    tree = RemoteFs(server.dial)
    server.refusing = True
    assert errno_of(_performed, Operation(), tree.statfs) == errno.EIO
    dialled = server.dialled
    assert errno_of(_performed, Operation(), tree.statfs) == errno.EIO and server.dialled == dialled + 1
    current.set(None)
    tree.close()


def test_a_removed_file_is_not_mistaken_for_one_that_gets_its_inode_number(
    tree: RemoteFs, server: Server, top: Path
) -> None:
    """As a program's temporary file, which nobody holds while the server is away."""
    _, handle = tree.create(ROOT, b"f", os.O_RDWR, 0o644, None)
    number = (top / "f").stat().st_ino
    tree.unlink(ROOT, b"f")
    server.restart()
    names = [f"g{count}" for count in range(20)]  # ext4 gives the first of them the number
    for name in names:
        (top / name).write_bytes(b"other")
    taken = [name for name in names if (top / name).stat().st_ino == number]
    for name in taken or names[:1]:
        assert tree.lookup(ROOT, name.encode()).attributes.size == 5
        assert errno_of(tree.write, handle, b"mine", 0) == errno.ESTALE
        assert (top / name).read_bytes() == b"other"
