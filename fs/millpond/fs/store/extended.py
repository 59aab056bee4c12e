# SPDX-License-Identifier: Apache-2.0
"""Edge (a file system): extended attributes of files of the backing directory."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Self

from millpond.fs.store.create import proc_path
from millpond.fs.store.quota import BLOCK_SIZE
from millpond.fs.vfs.inode_api import Node
from millpond.fs.vfs.path_api import os_error
from millpond.fs.vfs.xattr_names import is_user_name, user_name


def _user_names(found: Iterable[str]) -> tuple[bytes, ...]:
    return tuple(name for name in map(os.fsencode, found) if is_user_name(name))


def has_no_attributes(path: str) -> bool:
    """Return whether the file at a path certainly has no extended attributes, or is in a file system without
    any.
    """
    try:
        found = os.listxattr(path, follow_symlinks=False)
        return not found or not _user_names(found)
    except OSError as error:
        return error.errno == errno.EOPNOTSUPP


class BackingExtended:
    """ExtendedFs of files by their O_PATH descriptors, which ``pinned`` keeps open; one that ``is_public``
    does not hold of, such as a root above the public part, shows no extended attributes and takes none.
    ``require`` takes so many bytes of a quota; a file is changed within ``intent``.
    """

    def __init__(
        self,
        pinned: Callable[[Node], AbstractContextManager[int]],
        is_public: Callable[[Node], bool],
        require: Callable[[int], None],
        intent: Callable[[Node], AbstractContextManager[object]] = lambda _node: contextlib.nullcontext(),
    ) -> None:
        self._pinned, self._is_public, self._require, self._intent = pinned, is_public, require, intent

    def within(self, intent: Callable[[Node], AbstractContextManager[object]]) -> Self:
        """Return the same, but that a file is changed within ``intent``."""
        return type(self)(self._pinned, self._is_public, self._require, intent)

    def _require_public(self, node: Node) -> None:
        if not self._is_public(node):
            raise os_error(errno.EROFS)

    def get(self, node: Node, name: bytes) -> bytes:
        """Return the value of an extended attribute."""
        user_name(name)
        if not self._is_public(node):
            raise os_error(errno.ENODATA)
        with self._pinned(node) as file:
            return os.getxattr(proc_path(file), name)

    def set(self, node: Node, name: bytes, value: bytes, flags: int) -> None:
        """Set an extended attribute. Raises OSError: ENOSPC if its blocks are more than the quota has."""
        user_name(name)
        self._require_public(node)
        self._require(BLOCK_SIZE + len(value))
        with self._intent(node), self._pinned(node) as file:
            os.setxattr(proc_path(file), name, value, flags)

    def names(self, node: Node) -> tuple[bytes, ...]:
        """Return the names of a file's extended attributes, those in ``user.*`` alone."""
        if not self._is_public(node):
            return ()
        with self._pinned(node) as file:
            return _user_names(os.listxattr(proc_path(file)))

    def remove(self, node: Node, name: bytes) -> None:
        """Remove an extended attribute. A full quota does not hinder it."""
        user_name(name)
        self._require_public(node)
        with self._intent(node), self._pinned(node) as file:
            os.removexattr(proc_path(file), name)
