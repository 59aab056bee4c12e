# SPDX-License-Identifier: Apache-2.0
"""Edge: mounts a volume through fuse-python; the only module that knows it.

The C module is called directly: through its Python wrapper it leaks a tuple for every file opened. Reads and
writes bypass the page cache (``direct_io``) and nothing else is cached, so that each operation sees the other
side's changes.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fuse

from millpond.base.errors import LocalError
from millpond.fs.fuse.mounts import require_mountable
from millpond.fs.vfs.inode_api import SetAttr
from millpond.fs.vfs.ownership import OwnerMap
from millpond.fs.vfs.path_adapter import PathAdapter
from millpond.fs.vfs.path_api import Attributes, Handle, Owner
from millpond.linux.confinement.userns import has_many_uids

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_UNKNOWN_INODE = 0xFFFFFFFF  # readdir(3) skips names whose inode is 0
_STAT = (
    *("st_ino", "st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks", "st_blksize"),
    *("st_atime", "st_mtime", "st_ctime", "st_dev", "st_rdev"),
)
_OPTIONS = (
    "direct_io,use_ino,big_writes,default_permissions,nosuid,nodev,subtype=millpond,"
    "attr_timeout=0,entry_timeout=0,negative_timeout=0"
)


def mount_and_serve(
    volume: PathAdapter,
    mountpoint: Path,
    *,
    name: str,
    allow_other: bool,
    read_only: bool = False,
    owners: OwnerMap | None = None,
    on_ready: Callable[[], None],
) -> None:
    """Mount ``volume`` at ``mountpoint`` as ``name`` and serve it, in this thread, until it is unmounted.

    SIGTERM, SIGINT and SIGHUP unmount it. ``owners`` says whose the files show as. ``on_ready`` is called
    once the kernel uses the mount. The thread
    must be the main one; no other one of this process runs meanwhile. Raises LocalError if it cannot mount.
    """
    require_mountable(mountpoint, name)
    options = _options(name, allow_other, read_only)
    binding = _Binding(volume, has_many_uids(), owners or OwnerMap())
    with _libfuse_signals(), _CapturedErrors() as captured:

        def ready() -> None:
            captured.stop()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            binding.ready(on_ready)

        try:
            fuse.main(
                **binding.callbacks(),
                fsinit=ready,
                fuse_args=["millpond", str(mountpoint), "-f", "-o", options],
                multithreaded=0,
            )
        except fuse.FuseError:
            if not binding.served:  # once served, a signal or an unmount has ended the loop
                raise LocalError(f"{mountpoint}: cannot mount: {captured.last_line()}") from None
    if binding.failure:
        raise binding.failure


def _options(name: str, allow_other: bool, read_only: bool) -> str:
    options = f"{_OPTIONS},fsname={name}{',allow_other' * allow_other}{',ro' * read_only}"
    if has_many_uids():
        return options
    # the kernel refuses writes to files of unmapped users: the one mapped user owns all
    return f"{options},uid={os.geteuid()},gid={os.getegid()}"


@contextlib.contextmanager
def _libfuse_signals() -> Iterator[None]:
    """Leave the signals to libfuse, which handles those at their default; block them until libfuse
    is ready.
    """
    before = {number: signal.signal(number, signal.SIG_DFL) for number in _SIGNALS}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class _CapturedErrors:
    """Captures the standard error of libfuse while it mounts, for the one line that is raised."""

    def __enter__(self) -> _CapturedErrors:
        self._file = io.FileIO(os.memfd_create("libfuse"), "r+")
        self._stderr: int | None = os.dup(2)
        os.dup2(self._file.fileno(), 2)
        return self

    def stop(self) -> None:
        """Restore standard error."""
        if self._stderr is not None:
            os.dup2(self._stderr, 2)
            os.close(self._stderr)
            self._stderr = None

    def last_line(self) -> str:
        """Return the last line printed."""
        self._file.seek(0)
        lines = self._file.read().decode(errors="replace").splitlines()
        return lines[-1].removeprefix("fuse: ") if lines else "the kernel refused"

    def __exit__(self, *_exc: object) -> None:
        self.stop()
        self._file.close()


class _OpenFile:
    """The object that libfuse holds for an open file. Reused, with the tuple that the C module expects.

    The C module never drops the tuple that ``open`` returns: reuse makes that cost a reference count, not
    memory.
    """

    __slots__ = ("answer", "handle")
    keep_cache = False
    direct_io = True

    def __init__(self) -> None:
        self.handle = Handle(0)
        self.answer = (self, True)


class _Binding:
    """Performs the requests that the C module passes on, on a volume. Each callback returns a value, 0 or
    -errno.
    """

    def __init__(self, volume: PathAdapter, chowns: bool, owners: OwnerMap) -> None:
        self._volume, self._chowns, self._owners = volume, chowns, owners
        self._spare: list[_OpenFile] = []
        self.served = False
        self.failure: OSError | None = None

    def callbacks(self) -> dict[str, Callable[..., Any]]:
        """Return the functions by the names that the C module knows."""
        v = self._volume
        plain: dict[str, Callable[..., Any]] = {
            "getattr": lambda path: _stat(self._owners.shown(v.getattr(path[1:]))),
            "fgetattr": lambda _, file: _stat(self._owners.shown(v.fgetattr(file.handle))),
            "readdir": self._readdir,
            "readlink": lambda path: v.readlink(path[1:]),
            "mknod": lambda path, mode, rdev: v.mknod(path[1:], mode, self._caller(), rdev),
            "mkdir": lambda path, mode: v.mkdir(path[1:], mode, self._caller()),
            "unlink": lambda path: v.unlink(path[1:]),
            "rmdir": lambda path: v.rmdir(path[1:]),
            "symlink": lambda target, path: v.symlink(target, path[1:], self._caller()),
            "rename": lambda old, new: v.rename(old[1:], new[1:]),
            "link": lambda old, new: v.link(old[1:], new[1:]),
            "chmod": lambda path, mode: v.chmod(path[1:], mode),
            "chown": self._chown,
            "truncate": lambda path, size: v.truncate(path[1:], size),
            "ftruncate": lambda _, size, file: v.ftruncate(file.handle, size),
            "utimens": self._utimens,
            "open": lambda path, flags: self._opened(v.open(path[1:], flags)),
            "create": lambda path, flags, mode: self._opened(v.open(path[1:], flags, mode, self._caller())),
            "read": lambda _, size, offset, file: v.read(file.handle, size, offset),
            "write": lambda _, data, offset, file: v.write(file.handle, data, offset),
            "fsync": lambda _, data_only, file: v.fsync(file.handle, bool(data_only)),
            "release": lambda _path, _flags, file: self._release(file),
            "statfs": self._statfs,
        }
        return {name: _answering(function) for name, function in plain.items()}

    def ready(self, on_ready: Callable[[], None]) -> None:
        """Call ``on_ready``: the kernel uses the mount."""
        self.served = True
        try:
            on_ready()
        except OSError as error:  # raised again once the loop, which has no way to do so, has ended
            self.failure = error
            signal.raise_signal(signal.SIGTERM)

    def _caller(self) -> Owner | None:
        """Return the owner of the request's process, where this process may chown files; else None."""
        if not self._chowns:
            return None
        context = fuse.FuseGetContext(None)
        return Owner(context["uid"], context["gid"])

    def _chown(self, path: str, uid: int, gid: int) -> None:
        new = self._owners.stored(SetAttr(uid=_id(uid), gid=_id(gid)))
        if (new.uid, new.gid) != (None, None):
            self._volume.chown(path[1:], _or_keep(new.uid), _or_keep(new.gid))

    def _opened(self, handle: Handle) -> tuple[_OpenFile, bool]:
        file = self._spare.pop() if self._spare else _OpenFile()
        file.handle = handle
        return file.answer

    def _release(self, file: _OpenFile) -> None:
        handle = file.handle
        self._spare.append(file)
        self._volume.release(handle)

    def _readdir(self, path: str, _offset: int) -> list[Any]:
        dots = [(name, _UNKNOWN_INODE, stat.S_IFDIR) for name in (".", "..")]
        found = [(e.name, _unsigned(e.inode), _unsigned(e.mode)) for e in self._volume.readdir(path[1:])]
        return [fuse.Direntry(name, ino=inode, type=mode) for name, inode, mode in (*dots, *found)]

    def _utimens(self, path: str, atime: int, atime_ns: int, mtime: int, mtime_ns: int) -> None:
        self._volume.utimens(path[1:], atime * 10**9 + atime_ns, mtime * 10**9 + mtime_ns)

    def _statfs(self) -> Any:
        s = self._volume.statfs()
        known = {
            "f_bsize": s.block_size,
            "f_frsize": s.fragment_size,
            "f_blocks": s.blocks,
            "f_bfree": s.free,
            "f_bavail": s.available,
            "f_files": s.files,
            "f_ffree": s.files_free,
            "f_favail": s.files_free,
            "f_namemax": s.name_max,
        }
        return fuse.StatVfs(**{name: _unsigned(value) for name, value in known.items()})


def _answering(function: Callable[..., Any]) -> Callable[..., Any]:
    def answer(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except OSError as error:
            return -(error.errno or errno.EIO)

    return answer


def _stat(a: Attributes) -> Any:
    """Return the fields of struct stat, as the C module reads it: whole seconds, and no negative number
    (EINVAL).
    """
    times = (time // 10**9 for time in (a.atime, a.mtime, a.ctime))
    numbers = (a.inode, a.mode, a.links, a.uid, a.gid, a.size, a.blocks, a.block_size, *times, 0, a.rdev)
    return fuse.Stat(**dict(zip(_STAT, map(_unsigned, numbers), strict=True)))


def _unsigned(value: int) -> int:
    """Return the nearest number that the C module takes; a device may send any."""
    return max(0, min(value, (1 << 63) - 1))


def _id(number: int) -> int | None:
    """Return a uid or gid that came through a C int, unsigned; None for -1, which keeps the old one."""
    return None if number == -1 else number & 0xFFFFFFFF


def _or_keep(number: int | None) -> int:
    return -1 if number is None else number
