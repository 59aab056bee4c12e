# SPDX-License-Identifier: Apache-2.0
"""Edge (a file system): many files of a backing directory at once: listed with attributes, read and stored
whole.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.store.create import proc_path
from millpond.fs.store.extended import has_no_attributes
from millpond.fs.vfs.bulk_api import SMALL_BYTES, FileRead, SmallFile
from millpond.fs.vfs.inode_api import FoundEntry, Node, SetAttr
from millpond.fs.vfs.path_api import Attributes, Handle, os_error
from millpond.linux import syscalls

Naming = Callable[[Sequence[bytes]], AbstractContextManager[object]]
_Written = tuple[Node, Handle]


class BackingBulk:
    """BulkFs over ``tree``, of which no other client caches anything."""

    def __init__(self, tree: BackingFs) -> None:
        self._tree = tree

    def list(self, start: Node, path: Sequence[bytes]) -> Iterator[tuple[bytes, Attributes]]:
        """Iterate over the names in a directory, with attributes."""
        found = self._tree.walk(start, path)
        try:
            handle = self._tree.opendir(found.node)
        finally:
            self._tree.forget(found.node, 1)
        try:
            directory = self._tree.descriptor(handle)
            with os.scandir(directory) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                        known = self._tree.identity.attributes(entry.stat(follow_symlinks=False))
                        bare = has_no_attributes(f"{proc_path(directory)}/{entry.name}")
                        yield os.fsencode(entry.name), replace(known, bare=bare)
        finally:
            self._tree.release(handle)

    def read(self, directory: Node, names: Sequence[bytes]) -> Iterator[FileRead]:
        """Read small regular files."""
        for name in names:
            if found := read_small(self._tree, directory, name):
                yield found

    def store(self, directory: Node, files: Sequence[SmallFile]) -> Sequence[int]:
        """Store files whole. Returns an errno for each."""
        return store_files(self._tree, directory, files, lambda _names: contextlib.nullcontext())


def read_small(tree: BackingFs, directory: Node, name: bytes, most: int = SMALL_BYTES) -> FileRead | None:
    """Return a regular file of at most ``most`` bytes, None for any other and one that cannot be read."""
    try:
        found = tree.lookup(directory, name)
    except OSError:
        return None
    try:
        return _read_found(tree, name, found, most)
    except OSError:
        return None
    finally:
        tree.forget(found.node, 1)


def _read_found(tree: BackingFs, name: bytes, found: FoundEntry, most: int) -> FileRead | None:
    if not stat.S_ISREG(found.attributes.mode) or found.attributes.size > most:
        return None
    handle = tree.open(found.node, os.O_RDONLY)
    try:
        data = tree.read(handle, most + 1, 0)
        after = tree.getattr(found.node).attributes
    finally:
        tree.release(handle)
    return FileRead(name, after, data) if len(data) == after.size else None


def store_files(tree: BackingFs, directory: Node, files: Sequence[SmallFile], naming: Naming) -> list[int]:
    """Write files without names, put them on the flash, and then give them their names, in place of what has
    them, all within ``naming``. Returns an errno for each file, 0 for success. Raises OSError, and what
    ``naming`` raises; no file has its name then.
    """
    errors, written = [0] * len(files), dict[int, _Written]()
    try:
        for number, file in enumerate(files):
            try:
                written[number] = _write(tree, directory, file)
            except OSError as error:
                errors[number] = error.errno or errno.EIO
        for number, (_, handle) in written.items():
            errors[number] = _error_of(tree.fsync, handle, False)
        ready = [number for number in written if not errors[number]]
        with naming([files[number].name for number in ready]):
            for number in ready:
                errors[number] = _error_of(_name, tree, written[number][0], directory, files[number].name)
    finally:
        for node, handle in written.values():
            tree.release(handle)
            tree.forget(node, 1)
    return errors


def _error_of(call: Callable[..., None], *arguments: object) -> int:
    try:
        call(*arguments)
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _write(tree: BackingFs, directory: Node, file: SmallFile) -> _Written:
    """Write a file without a name and begin to put it on the flash. Raises OSError."""
    tree.inode_of(directory, file.name)  # of a name that no file here can have this alone fails
    if tree.is_full:
        raise os_error(errno.ENFILE)
    found, handle = tree.create_unnamed(directory)
    try:
        data = memoryview(file.data)
        while data:
            data = data[tree.write(handle, data, len(file.data) - len(data)) :]
        tree.setattr(found.node, SetAttr(mode=file.mode, atime=file.atime, mtime=file.mtime))
        syscalls.start_writeback(tree.descriptor(handle))
    except BaseException:
        tree.release(handle)
        tree.forget(found.node, 1)
        raise
    return found.node, handle


def _name(tree: BackingFs, node: Node, directory: Node, name: bytes) -> None:
    """Give a file its name. Raises OSError."""
    try:
        tree.forget(tree.link(node, directory, name).node, 1)
        return
    except FileExistsError:
        spare = b".%s.part" % os.urandom(8).hex().encode()
    tree.forget(tree.link(node, directory, spare).node, 1)
    try:
        tree.rename(directory, spare, directory, name)
    except OSError:
        with contextlib.suppress(OSError):
            tree.unlink(directory, spare)
        raise
