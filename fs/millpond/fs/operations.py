"""Edge: the operations core: a Volume over a directory, through a descriptor of its root and nothing else."""

from __future__ import annotations

import errno
import itertools
import os
import stat
from dataclasses import dataclass

from millpond.fs.beneath import parent_of
from millpond.fs.making import SAFE_FLAGS, Maker, checked, entries, permissions, set_mode
from millpond.fs.volume import (
    MAX_TRANSFER,
    Attributes,
    Entry,
    Handle,
    Owner,
    Statistics,
    attributes,
    failure,
    within,
)

_KEPT_FLAGS = os.O_ACCMODE | os.O_CREAT | os.O_EXCL | os.O_TRUNC | os.O_SYNC | os.O_DSYNC
_MAX_OFFSET = (1 << 63) - 1
_MAX_SECONDS = 1 << 40  # 34,000 years, within any file system's own clamp


@dataclass(frozen=True, slots=True)
class _OpenFile:
    descriptor: int
    append: bool


class Operations:
    """A Volume over the directory that ``root``, an open descriptor, refers to; the caller keeps owning it.

    ``chown_new`` gives new files to the ``owner`` they are created with: for real root only. Without it they
    belong to this process. ``measured`` is the path whose file system ``statfs`` describes, where the root
    lies on another. Several threads may call at once.
    """

    def __init__(self, root: int, *, chown_new: bool = False, measured: str = "") -> None:
        self._root, self._measured = root, measured
        self._make = Maker(chown_new=chown_new)
        self._files: dict[Handle, _OpenFile] = {}
        self._numbers = itertools.count(1)

    def getattr(self, path: str) -> Attributes:
        """The attributes of a file, of a symbolic link itself."""
        with parent_of(self._root, path) as (parent, name):
            return attributes(os.stat(name, dir_fd=parent, follow_symlinks=False))

    def readdir(self, path: str) -> tuple[Entry, ...]:
        """All names in a directory but ``.`` and ``..``."""
        with parent_of(self._root, path) as (parent, name):
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            directory = os.open(name, flags, dir_fd=parent)
        try:
            return tuple(entries(directory))
        finally:
            os.close(directory)

    def readlink(self, path: str) -> str:
        """Where a symbolic link points, as it was stored."""
        with parent_of(self._root, path) as (parent, name):
            return os.readlink(name, dir_fd=parent)

    def mknod(self, path: str, mode: int, owner: Owner | None = None, rdev: int = 0) -> None:
        """Make a file of any type that mknod(2) can."""
        within(mode, 0, 0o177777)
        with parent_of(self._root, path) as (parent, name):
            os.close(self._make.node(parent, name, mode, rdev, owner))

    def mkdir(self, path: str, mode: int, owner: Owner | None = None) -> None:
        """Make a directory."""
        with parent_of(self._root, path) as (parent, name):
            os.close(self._make.directory(parent, name, permissions(mode), owner))

    def unlink(self, path: str) -> None:
        """Remove a name of a file."""
        with parent_of(self._root, path) as (parent, name):
            os.unlink(name, dir_fd=parent)

    def rmdir(self, path: str) -> None:
        """Remove an empty directory."""
        with parent_of(self._root, path) as (parent, name):
            os.rmdir(name, dir_fd=parent)

    def symlink(self, target: str, path: str, owner: Owner | None = None) -> None:
        """Make a symbolic link at ``path`` that holds ``target`` as it is."""
        if "\0" in target:
            raise failure(errno.EINVAL, path)
        with parent_of(self._root, path) as (parent, name):
            os.close(self._make.symlink(parent, name, target, owner))

    def rename(self, old: str, new: str) -> None:
        """Move a name, replacing what ``new`` was."""
        with parent_of(self._root, old) as (source, name), parent_of(self._root, new) as (target, new_name):
            os.rename(name, new_name, src_dir_fd=source, dst_dir_fd=target)

    def link(self, old: str, new: str) -> None:
        """Give a file a second name."""
        with parent_of(self._root, old) as (source, name), parent_of(self._root, new) as (target, new_name):
            os.link(name, new_name, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)

    def chmod(self, path: str, mode: int) -> None:
        """Set the permission bits; EOPNOTSUPP for a symbolic link."""
        bits = permissions(mode)
        with parent_of(self._root, path) as (parent, name):
            file = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            if stat.S_ISLNK(os.fstat(file).st_mode):
                raise failure(errno.EOPNOTSUPP, path)
            set_mode(file, bits)
        finally:
            os.close(file)

    def chown(self, path: str, uid: int, gid: int) -> None:
        """Set the owner; -1 keeps one."""
        checked(Owner(uid, gid))
        with parent_of(self._root, path) as (parent, name):
            os.chown(name, uid, gid, dir_fd=parent, follow_symlinks=False)

    def truncate(self, path: str, size: int) -> None:
        """Cut or extend a file to ``size`` bytes."""
        handle = self.open(path, os.O_WRONLY)
        try:
            self.ftruncate(handle, size)
        finally:
            self.release(handle)

    def utimens(self, path: str, atime: int, mtime: int) -> None:
        """Set the times, in nanoseconds."""
        for value in (atime, mtime):
            within(value, -_MAX_SECONDS * 10**9, _MAX_SECONDS * 10**9)
        with parent_of(self._root, path) as (parent, name):
            os.utime(name, ns=(atime, mtime), dir_fd=parent, follow_symlinks=False)

    def open(self, path: str, flags: int, mode: int = 0, owner: Owner | None = None) -> Handle:
        """Open a regular file; create it as ``flags`` say. EISDIR, ELOOP or EPERM for anything else."""
        kept = within(flags, 0, (1 << 31) - 1) & _KEPT_FLAGS
        with parent_of(self._root, path) as (parent, name):
            descriptor = self._open(parent, name, kept, permissions(mode), owner)
        try:
            _require_regular(descriptor, path)
        except OSError:
            os.close(descriptor)
            raise
        handle = Handle(next(self._numbers))
        self._files[handle] = _OpenFile(descriptor, bool(flags & os.O_APPEND))
        return handle

    def _open(self, parent: int, name: str, flags: int, mode: int, owner: Owner | None) -> int:
        if flags & os.O_CREAT:
            try:
                return self._make.file(parent, name, flags, mode, owner)
            except FileExistsError:
                if flags & os.O_EXCL:
                    raise
        return os.open(name, flags & ~(os.O_CREAT | os.O_EXCL) | SAFE_FLAGS, dir_fd=parent)

    def read(self, handle: Handle, size: int, offset: int) -> bytes:
        """Up to ``size`` bytes, fewer at the end of the file."""
        file = self._file(handle)
        within(size, 0, _MAX_OFFSET)
        return os.pread(file.descriptor, min(size, MAX_TRANSFER), within(offset, 0, _MAX_OFFSET))

    def write(self, handle: Handle, data: bytes, offset: int) -> int:
        """Write at ``offset``, or at the file's end if it was opened with O_APPEND."""
        file = self._file(handle)
        within(offset, 0, _MAX_OFFSET)
        flags = os.RWF_APPEND if file.append else 0
        return os.pwritev(file.descriptor, [memoryview(data)[:MAX_TRANSFER]], offset, flags)

    def flush(self, handle: Handle) -> None:
        """Nothing is held back here: only a wrong handle fails."""
        self._file(handle)

    def fsync(self, handle: Handle, data_only: bool = False) -> None:
        """Return when the file is on the flash."""
        descriptor = self._file(handle).descriptor
        if data_only:
            os.fdatasync(descriptor)
        else:
            os.fsync(descriptor)

    def release(self, handle: Handle) -> None:
        """Close the file behind the handle."""
        file = self._files.pop(handle, None)
        if file is None:
            raise failure(errno.EBADF)
        os.close(file.descriptor)

    def statfs(self) -> Statistics:
        """How full the file system underneath is."""
        with parent_of(self._root, self._measured) as (parent, name):
            directory = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            s = os.fstatvfs(directory)
        finally:
            os.close(directory)
        return Statistics(
            s.f_bsize, s.f_frsize, s.f_blocks, s.f_bfree, s.f_bavail, s.f_files, s.f_ffree, s.f_namemax
        )

    def ftruncate(self, handle: Handle, size: int) -> None:
        """Cut or extend an open file to ``size`` bytes."""
        os.ftruncate(self._file(handle).descriptor, within(size, 0, _MAX_OFFSET))

    def fgetattr(self, handle: Handle) -> Attributes:
        """The attributes of an open file."""
        return attributes(os.fstat(self._file(handle).descriptor))

    def _file(self, handle: Handle) -> _OpenFile:
        try:
            return self._files[handle]
        except KeyError:
            raise failure(errno.EBADF) from None


def _require_regular(descriptor: int, path: str) -> None:
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISDIR(mode):
        raise failure(errno.EISDIR, path)
    if not stat.S_ISREG(mode):
        raise failure(errno.EPERM, path)
