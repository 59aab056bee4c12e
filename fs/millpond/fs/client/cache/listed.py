# SPDX-License-Identifier: Apache-2.0
"""Pure: remembers files that arrived with a listing and that only the kernel knows of, in little memory.

A directory may have millions of names, of which the kernel never uses most but as names with attributes. Each
gets a node number and is one small record, until something else is done with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import ItemsView

from millpond.fs.proto.bulk_copy import attributes_of
from millpond.fs.vfs.inode_api import Node
from millpond.fs.vfs.path_api import Attributes

_MOST_UNUSED = 16_384
_FIRST_ALIKE, _MOST_ALIKE = 16, 512
ListedFile = tuple[Node, bytes, int, int, int, bytes]
"""Node of the directory, name, inode, grant, lookups by the kernel, the entry's first RECORD bytes."""


class ListedFiles:
    """Files with a valid grant. Those without a lookup are kept for a while. One thread may call at once."""

    def __init__(self) -> None:
        self._unused: deque[Node] = deque()
        self._files: dict[Node, ListedFile] = {}
        self._by_inode: dict[int, Node] = {}
        self._bare: dict[Node, bool] = {}

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, node: Node) -> bool:
        return node in self._files

    def node_of(self, inode: int) -> Node | None:
        """Return the node of an inode, None if it is not listed."""
        return self._by_inode.get(inode)

    def get(self, node: Node) -> ListedFile | None:
        """Return the record of a node, None if it is not listed."""
        return self._files.get(node)

    def put(self, node: Node, file: ListedFile) -> None:
        """Add a file, or replace its record."""
        self._files[node] = file
        self._by_inode[file[2]] = node

    def pop(self, node: Node) -> ListedFile:
        """Remove a file. Raises KeyError."""
        file = self._files.pop(node)
        del self._by_inode[file[2]]
        self._bare.pop(node, None)
        return file

    def is_bare(self, node: Node) -> bool | None:
        """Return whether a listed file has no extended attributes; None if that is not known."""
        return self._bare.get(node)

    def note_bare(self, file: ListedFile, *, is_bare: bool) -> None:
        """Note whether a file has no extended attributes, unless its record is another one by now: it may
        have been recalled, and listed again.
        """
        node = self._by_inode.get(file[2])
        if node and self._files[node] is file:
            self._bare[node] = is_bare

    def like(self, first: Node) -> list[ListedFile]:
        """Return a file, and others of its directory that were listed soon after it, of which it is not known
        whether they have extended attributes: a few at first, more if programs ask for them again.
        """
        most, place = _MOST_ALIKE if self._bare else _FIRST_ALIKE, self._files[first][0]
        files = (self._files.get(Node(node)) for node in range(first, first + most) if node not in self._bare)
        return [file for file in files if file and file[0] == place]

    def items(self) -> ItemsView[Node, ListedFile]:
        """Return all files, those first that were listed longest ago."""
        return self._files.items()

    def nodes(self) -> list[Node]:
        """Return the nodes of all files."""
        return list(self._files)

    def granted_upto(self, upto: int) -> list[Node]:
        """Return the nodes of the files that were granted up to this number."""
        return [node for node, file in self._files.items() if file[3] <= upto]

    def keep_unused(self, node: Node, file: ListedFile) -> Node | None:
        """Take a lookup from a file. Returns another node to be forgotten if it has no lookup, since too many
        have none.
        """
        place, name, inode, granted, lookups, record = file
        self._files[node] = place, name, inode, granted, lookups - 1, record
        if lookups > 1:
            return None
        self._unused.append(node)
        return self._unused.popleft() if len(self._unused) > _MOST_UNUSED else None

    def is_at(self, node: Node, directory: Node, name: bytes) -> bool:
        """Return whether a node was listed under this name."""
        file = self._files.get(node)
        return file is not None and file[:2] == (directory, name)


def listed_attributes(file: ListedFile) -> Attributes:
    """Return the attributes of a listed file."""
    return Attributes(*attributes_of(file[5]))
