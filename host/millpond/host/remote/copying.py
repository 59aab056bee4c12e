# SPDX-License-Identifier: Apache-2.0
"""Edge (volumes): copies files from one volume to another, whole or not at all, and resumes broken copies.

A file is written under a temporary name that contains the version of its source, put on the flash, and only
then renamed: a name stands for the old file or the new one, and the next copy uses the bytes that a broken
copy wrote.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from millpond.fs.vfs.path_api import MAX_TRANSFER, Attributes, Handle, PathFs, os_error


@dataclass(frozen=True, slots=True)
class Item:
    """A file, directory or symbolic link to copy: its source, its target, and its attributes."""

    source: str
    target: str
    attributes: Attributes


@dataclass(slots=True)
class Copied:
    """The result of a copy: regular files, their bytes, and how many of these an earlier copy had left."""

    files: int = 0
    bytes: int = 0
    resumed: int = 0


def plan(
    here: PathFs, source: str, there: PathFs, target: str, *, recursive: bool, name: str = ""
) -> list[Item]:
    """Return the items of a copy of ``source`` to ``target``, directories before their contents. If
    ``target`` is a directory, the copy goes into it as ``name``, or under the source's name. Raises OSError,
    EISDIR for a directory if not ``recursive``.
    """
    found = here.getattr(source)
    if stat.S_ISDIR(found.mode) and not recursive:
        raise os_error(errno.EISDIR, source)
    if is_directory(there, target):
        target = _joined(target, name or source.rpartition("/")[2])
    return list(_walk(here, Item(source, target, found)))


def _walk(volume: PathFs, top: Item) -> Iterator[Item]:
    left = [top]
    while left:
        item = left.pop()
        yield item
        names = volume.readdir(item.source) if stat.S_ISDIR(item.attributes.mode) else ()
        for entry in sorted(names, key=lambda entry: entry.name, reverse=True):
            source = _joined(item.source, entry.name)
            left.append(Item(source, _joined(item.target, entry.name), volume.getattr(source)))


class Copier:
    """Copies from the volume ``here``, which ``origin`` names, to the volume ``there``, with the permissions
    that are in ``mask``. Calls ``progress`` with bytes as they are copied; ``done`` counts.
    """

    def __init__(
        self,
        here: PathFs,
        there: PathFs,
        progress: Callable[[int], None],
        done: Copied,
        *,
        origin: str = "",
        mask: int = 0o777,
    ) -> None:
        self._here, self._there, self._progress, self._done = here, there, progress, done
        self._origin, self._mask = origin, mask

    def copy(self, item: Item) -> bool:
        """Copy one item, of a directory only itself. Returns False for other files than regular files,
        directories and symbolic links. Raises OSError.
        """
        mode = item.attributes.mode
        if stat.S_ISREG(mode):
            self._file(item)
        elif stat.S_ISDIR(mode):
            if not is_directory(self._there, item.target):
                self._there.mkdir(item.target, mode & self._mask | stat.S_IRWXU)
        elif stat.S_ISLNK(mode):
            self._symlink(item)
        else:
            return False
        return True

    def _symlink(self, item: Item) -> None:
        name = self._unfinished(item)
        _remove(self._there, name)
        self._there.symlink(self._here.readlink(item.source), name)
        self._there.rename(name, item.target)

    def _file(self, item: Item) -> None:
        name = self._unfinished(item)
        source = self._here.open(item.source, os.O_RDONLY)
        try:
            target = self._there.open(name, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                self._contents(item, source, target)
                self._there.fsync(target)
            finally:
                self._there.release(target)
        finally:
            self._here.release(source)
        self._finish(item, name)

    def _finish(self, item: Item, name: str) -> None:
        self._there.chmod(name, item.attributes.mode & self._mask)
        self._there.utimens(name, item.attributes.atime, item.attributes.mtime)
        self._there.rename(name, item.target)
        self._done.files += 1

    def _contents(self, item: Item, source: Handle, target: Handle) -> None:
        offset = self._resumed(source, target, item.attributes.size)
        self._done.bytes += offset
        self._done.resumed += offset
        self._progress(offset)
        while data := self._here.read(source, MAX_TRANSFER, offset):
            self._write(target, data, offset)
            offset += len(data)
            self._done.bytes += len(data)
            self._progress(len(data))
        now = self._here.fgetattr(source)
        if (now.size, now.mtime, offset) != (item.attributes.size, item.attributes.mtime, now.size):
            raise os_error(errno.ESTALE, item.source)  # the file changed while it was copied

    def _write(self, target: Handle, data: bytes, offset: int) -> None:
        done = 0
        while done < len(data):
            done += self._there.write(target, data[done:], offset + done)

    def _resumed(self, source: Handle, target: Handle, size: int) -> int:
        """Return how many bytes of an earlier copy can stay. All are compared: a power cut may have left
        holes.
        """
        done, same = self._there.fgetattr(target).size, 0
        while same < min(done, size):
            end = min(same + MAX_TRANSFER, done)
            if _read(self._there, target, same, end) != _read(self._here, source, same, end):
                break
            same = end
        if same < done:
            self._there.ftruncate(target, same)
        return same

    def _unfinished(self, item: Item) -> str:
        """Return the temporary name of a target, for this version of its source."""
        folder, slash, name = item.target.rpartition("/")
        about = f"{self._origin}\0{item.source}\0{item.attributes.size}\0{item.attributes.mtime}"
        version = hashlib.sha256(about.encode(errors="surrogateescape")).hexdigest()[:12]
        return f"{folder}{slash}.{name[:60]}.{version}.part"


def _read(volume: PathFs, handle: Handle, start: int, end: int) -> bytes:
    parts = []
    while start < end and (data := volume.read(handle, end - start, start)):
        parts.append(data)
        start += len(data)
    return b"".join(parts)


def is_directory(volume: PathFs, path: str) -> bool:
    """Return whether ``path`` is a directory. Raises OSError."""
    try:
        return stat.S_ISDIR(volume.getattr(path).mode)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return False
        raise


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _remove(volume: PathFs, path: str) -> None:
    try:
        volume.unlink(path)
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
