# SPDX-License-Identifier: Apache-2.0
"""Edge: extended attributes, whose changes recall what other clients cache of the file."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from millpond.fs.vfs.inode_api import ExtendedFs, Node
from millpond.fs.vfs.xattr_names import user_name


class CoherentExtended:
    """ExtendedFs over ``tree`` that changes a file within ``intent``, a write intent on it."""

    def __init__(self, tree: ExtendedFs, intent: Callable[[Node], AbstractContextManager[object]]) -> None:
        self._tree, self._intent = tree, intent
        self.get, self.names, self.birth_time = tree.get, tree.names, tree.birth_time

    def set(self, node: Node, name: bytes, value: bytes, flags: int) -> None:
        """Set an extended attribute."""
        user_name(name)  # nothing is recalled for what is refused in any case
        with self._intent(node):
            self._tree.set(node, name, value, flags)

    def remove(self, node: Node, name: bytes) -> None:
        """Remove an extended attribute."""
        user_name(name)
        with self._intent(node):
            self._tree.remove(node, name)
