# SPDX-License-Identifier: Apache-2.0
"""Edge (descriptors): descriptors that several threads use, with use counts.

The number of a closed descriptor is another file's by the next open(2). One that is dropped in the middle of
an operation stays open until the last operation that uses it has ended.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field

from millpond.fs.store.identity import Key
from millpond.fs.vfs.inode_api import Node


@dataclass(slots=True)
class HeldDescriptor:
    """A descriptor, and how many operations use it; ``dropped`` is set when it is to be closed."""

    descriptor: int
    users: int = field(default=0, init=False)
    dropped: bool = field(default=False, init=False)


@dataclass(slots=True)
class InodeRef(HeldDescriptor):
    """Descriptor (O_PATH) of a file that was looked up ``lookups`` times and not yet forgotten."""

    key: Key
    lookups: int = 0
    public: bool = False


@dataclass(slots=True)
class OpenRef(HeldDescriptor):
    """Descriptor of an open file or directory, and its node."""

    node: Node


class DescriptorUse:
    """A context in which a descriptor stays open. Made with ``lock``, the table's, which it takes at the
    end.
    """

    __slots__ = ("_held", "_lock")

    def __init__(self, lock: threading.Lock, held: HeldDescriptor) -> None:
        self._lock, self._held = lock, held
        held.users += 1

    def __enter__(self) -> int:
        return self._held.descriptor

    def __exit__(self, *_: object) -> None:
        held = self._held
        with self._lock:
            held.users -= 1
            last = held.dropped and not held.users
        if last:
            os.close(held.descriptor)


def drop(held: HeldDescriptor) -> bool:
    """Note, with the table's lock, that a descriptor was removed from the table. Returns whether the caller
    is to close it, since no operation uses it.
    """
    held.dropped = True
    return not held.users
