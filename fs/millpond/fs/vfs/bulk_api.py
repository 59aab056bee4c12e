# SPDX-License-Identifier: Apache-2.0
"""Pure: the interface for many files at once: directories with attributes, and small files whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from millpond.fs.vfs.inode_api import Buffer, Node
from millpond.fs.vfs.path_api import Attributes

SMALL_BYTES: Final = 1 << 16
"""Bytes of the longest file that is read or stored whole."""
MAX_STORED: Final = 128
"""Most files that one call of ``store`` takes: each needs two descriptors until all have their names."""
MAX_STORED_BYTES: Final = 1 << 19
"""Most bytes of their contents together."""


@dataclass(frozen=True, slots=True)
class SmallFile:
    """A file to store: its name, contents, permission bits, and times in nanoseconds since 1970."""

    name: bytes
    data: Buffer
    mode: int
    atime: int
    mtime: int


@dataclass(frozen=True, slots=True)
class FileRead:
    """A file as it was read: its contents, and its attributes after that."""

    name: bytes
    attributes: Attributes
    data: bytes


class BulkFs(Protocol):
    """Operations on many files of one tree. Each method raises OSError."""

    def list(self, start: Node, path: Sequence[bytes]) -> Iterator[tuple[bytes, Attributes]]:
        """Iterate over the names, with attributes, in the directory that ``path`` leads to from ``start``. A
        name that is added or removed meanwhile may be missing or not. Those that are ``bare`` say so.
        """

    def read(self, directory: Node, names: Sequence[bytes]) -> Iterator[FileRead]:
        """Read regular files of at most SMALL_BYTES. Any other is left out, and so is one that cannot be
        read.
        """

    def store(self, directory: Node, files: Sequence[SmallFile]) -> Sequence[int]:
        """Store files, each whole or not at all and in place of what has its name; what is stored is on the
        flash. Returns an errno for each file, 0 for success: EOPNOTSUPP where the file system makes no file
        without a name.
        """
