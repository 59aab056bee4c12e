# SPDX-License-Identifier: Apache-2.0
"""Pure: a file as the client caches it."""

from __future__ import annotations

from dataclasses import dataclass, field

from millpond.fs.client.cache.write_verifier import WriteVerifier
from millpond.fs.vfs.inode_api import Node
from millpond.fs.vfs.path_api import Attributes


@dataclass(slots=True)
class CachedInode:
    """One file of the cache, by its number ``node`` for the kernel and its ``inode`` number on the device.

    ``remote`` is its node on the server under the session ``verifier`` (0: to be looked up again); it was
    last found in ``parent`` as ``name``, which may be a path. ``lookups`` counts the kernel's references;
    ``seen``: the kernel has used the node since. ``granted`` is the newest grant, 0 for none; ``drops``
    counts invalidations, ``block_changes`` those of its cached blocks; ``changed_at`` is its last change by
    this client. ``local_opens`` are opens that the server does not know of; ``reported_open``: a recall reply
    has reported them. ``recalling`` counts invalidations of the kernel's cache under way; ``ungranted_read``:
    data was returned to the kernel during one. ``gathered``: the server lacks data, so that its attributes
    are not the file's. ``linked``: it was made without a name, and not synced since it has one. ``known`` are
    its attributes: those of a listing are a tuple in their order, as most files are never looked at again.

    Of a directory: ``small_reads`` counts reads of small files in it; ``in_listing``: the kernel may still be
    taking over names from a listing; ``complete``: it has no others than ``names``.
    """

    node: Node
    inode: int
    parent: Node | None
    name: bytes
    remote: int = 0
    verifier: int = 0
    lookups: int = 0
    children: int = 0
    seen: bool = False
    granted: int = 0
    known: Attributes | tuple[int, ...] | None = None
    names: dict[bytes, Node | None] = field(default_factory=dict)
    complete: bool = False
    target: bytes | None = None
    has_data: bool = False
    readable: bool = False
    small_reads: int = 0
    local_opens: int = 0
    reported_open: bool = False
    recalling: int = 0
    ungranted_read: bool = False
    drops: int = 0
    block_changes: int = 0
    changed_at: int = 0
    in_listing: bool = False
    gathered: bool = False
    linked: bool = False
    durability: WriteVerifier = field(default_factory=WriteVerifier)

    @property
    def attributes(self) -> Attributes | None:
        """The cached attributes, None for none. Storing them, without the lock, could undo a recall."""
        known = self.known
        return Attributes(*known) if isinstance(known, tuple) else known

    @attributes.setter
    def attributes(self, attributes: Attributes | None) -> None:
        self.known = attributes

    def fields(self) -> tuple[int, ...] | None:
        """Return the values of the cached attributes in their order, None for none."""
        known = self.known
        return known.fields() if isinstance(known, Attributes) else known

    def drop(self) -> None:
        """Invalidate all cached state of the file."""
        self.drops += 1
        self.granted, self.known, self.readable = 0, None, False
        self.drop_names()

    def drop_names(self) -> None:
        """Invalidate the names in this directory."""
        self.complete = False
        if self.names:
            self.names = {}
