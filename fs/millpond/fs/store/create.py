# SPDX-License-Identifier: Apache-2.0
"""Edge: makes new files with exactly the mode and owner asked for."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import sys
from collections.abc import Callable, Iterator
from typing import AnyStr

from millpond.fs.vfs.inode_api import Now
from millpond.fs.vfs.path_api import Owner, os_error, within
from millpond.linux import syscalls

SAFE_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # a FIFO must not block a server
Announce = Callable[[os.stat_result], contextlib.AbstractContextManager[None]]
_PLACE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_GET_FLAGS = 0x80086601  # FS_IOC_GETFLAGS: an int, though its number says 8 bytes
_CASEFOLD = 0x40000000
_ECRYPTFS = 0xF15F
_SET_ID = stat.S_ISUID | stat.S_ISGID


class Creator:
    """Makes files in a directory that is given by a descriptor. ``chown_new`` gives them to their ``owner``:
    for real root only. Without it they belong to this process. With ``plain`` it makes no devices and sets no
    set-id bits, where the file system below heeds these.
    """

    def __init__(self, *, chown_new: bool, plain: bool = False) -> None:
        self._chown_new, self._plain = chown_new, plain

    @property
    def owner(self) -> Owner | None:
        """The owner of new files; None if they are given to other users."""
        return None if self._chown_new else Owner(os.geteuid(), os.getegid())

    def permissions(self, mode: int) -> int:
        """Return the permission bits that a file may have. Raises OSError: EINVAL if ``mode`` has no such."""
        return within(mode, 0, 0o177777) & 0o7777 & ~(_SET_ID if self._plain else 0)

    def file(
        self,
        parent: int,
        name: AnyStr,
        flags: int,
        mode: int,
        owner: Owner | None,
        announce: Announce | None = None,
    ) -> int:
        """Create a regular file that does not exist yet. It gets its name within ``announce``, called with
        what stat tells of it, where the file system makes files without a name. Returns its descriptor.
        """
        mode = self.permissions(mode)
        if announce and (unnamed := open_unnamed(parent, flags, mode)) >= 0:
            return self._announced(unnamed, parent, name, mode, owner, announce)
        made = os.open(name, flags | os.O_CREAT | os.O_EXCL | SAFE_FLAGS, mode, dir_fd=parent)
        with _undo_on_error(lambda: os.unlink(name, dir_fd=parent)):
            return self._finish(made, parent, mode, owner)

    def _announced(
        self, made: int, parent: int, name: AnyStr, mode: int, owner: Owner | None, announce: Announce
    ) -> int:
        made = self._finish(made, parent, mode, owner)
        try:
            with announce(os.fstat(made)):
                os.link(os.fsencode(proc_path(made)), os.fsencode(name), dst_dir_fd=parent)
        except BaseException:  # what was announced is withdrawn by now: another file may get the inode number
            os.close(made)
            raise
        return made

    def directory(self, parent: int, name: AnyStr, mode: int, owner: Owner | None) -> int:
        """Make a directory. Returns an O_PATH descriptor."""
        mode = self.permissions(mode)
        os.mkdir(name, mode, dir_fd=parent)
        with _undo_on_error(lambda: os.rmdir(name, dir_fd=parent)):
            return self._finish(os.open(name, _PLACE, dir_fd=parent), parent, mode, owner)

    def node(self, parent: int, name: AnyStr, mode: int, rdev: int, owner: Owner | None) -> int:
        """Make a file of any type that mknod(2) can. Returns an O_PATH descriptor."""
        if self._plain:
            if stat.S_IFMT(mode) in (stat.S_IFCHR, stat.S_IFBLK):
                raise os_error(errno.EPERM)
            mode &= ~_SET_ID
        os.mknod(name, mode, rdev, dir_fd=parent)
        with _undo_on_error(lambda: os.unlink(name, dir_fd=parent)):
            return self._finish(os.open(name, _PLACE, dir_fd=parent), parent, stat.S_IMODE(mode), owner)

    def symlink(self, parent: int, name: AnyStr, target: AnyStr, owner: Owner | None) -> int:
        """Make a symbolic link. Returns an O_PATH descriptor."""
        os.symlink(target, name, dir_fd=parent)
        with _undo_on_error(lambda: os.unlink(name, dir_fd=parent)):
            return self._finish(os.open(name, _PLACE, dir_fd=parent), parent, None, owner)

    def _finish(self, made: int, parent: int, mode: int | None, owner: Owner | None) -> int:
        """Give a new file its owner and exactly its mode, whatever the umask of this process."""
        try:
            if owner and self._chown_new:
                os.chown(proc_path(made), checked(owner).uid, _group(parent, owner))
            if mode is not None:
                _apply_mode(made, mode)
        except OSError:
            os.close(made)
            raise
        return made


def open_unnamed(parent: int, flags: int, mode: int) -> int:
    """Create a regular file without a name that is opened with these flags, to write it at least; -1 where
    there is none.
    """
    kept = flags & ~(os.O_EXCL | os.O_TRUNC)
    try:
        return os.open(".", kept | os.O_TMPFILE | os.O_CLOEXEC | os.O_NONBLOCK, mode, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.EISDIR, errno.EOPNOTSUPP):
            return -1
        raise


@contextlib.contextmanager
def _undo_on_error(undo: Callable[[], None]) -> Iterator[None]:
    """Unlink the new file if chown or chmod fails."""
    try:
        yield
    except OSError:
        with contextlib.suppress(OSError):
            undo()
        raise


def _apply_mode(made: int, mode: int) -> None:
    now = os.fstat(made).st_mode
    inherited = now & stat.S_ISGID if stat.S_ISDIR(now) else 0
    if stat.S_IMODE(now) != mode | inherited:
        set_mode(made, mode | inherited)


def proc_path(descriptor: int) -> str:
    """Return a path to an open file, for calls that refuse O_PATH descriptors."""
    return f"/proc/self/fd/{descriptor}"


def set_mode(descriptor: int, mode: int) -> None:
    """Set the permission bits of an open file."""
    os.chmod(proc_path(descriptor), mode)  # noqa: PTH101 - a Path would only be taken apart again


def checked(owner: Owner) -> Owner:
    """Return an owner whose ids a kernel can have. Raises OSError: EINVAL for others."""
    return Owner(within(owner.uid, -1, (1 << 32) - 2), within(owner.gid, -1, (1 << 32) - 2))


def _group(parent: int, owner: Owner) -> int:
    """Return the group for a new file: -1 to keep that of a set-group-ID directory, else its creator's."""
    keep = os.fstat(parent).st_mode & stat.S_ISGID
    return -1 if keep else checked(owner).gid


def names_are_bytes(directory: int) -> bool:
    """Return whether names in a directory are the same only if their bytes are, and any name can be made
    there: not with case folding, nor on eCryptfs, which stores longer ones. Raises OSError if the directory
    cannot be read.
    """
    opened = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
    try:
        return not (_flags(opened) & _CASEFOLD) and syscalls.file_system(opened) != _ECRYPTFS
    finally:
        os.close(opened)


def _flags(opened: int) -> int:
    """Return the inode flags (FS_IOC_GETFLAGS); 0 if the file system has none."""
    try:
        return int.from_bytes(fcntl.ioctl(opened, _GET_FLAGS, bytes(8))[:4], sys.byteorder)
    except OSError as error:
        if error.errno in (errno.ENOTTY, errno.EOPNOTSUPP, errno.EINVAL):
            return 0
        raise


def set_times(descriptor: int, atime: int | Now | None, mtime: int | Now | None) -> None:
    """Set a file's times, by its O_PATH descriptor; None keeps one. Raises OSError."""
    syscalls.set_times(proc_path(descriptor), _time(atime), _time(mtime))


def _time(time: int | Now | None) -> tuple[int, int]:
    if time is None:
        return 0, syscalls.UTIME_OMIT
    if time == "now":
        return 0, syscalls.UTIME_NOW
    return divmod(time, 10**9)
