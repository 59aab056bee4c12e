# SPDX-License-Identifier: Apache-2.0
"""Pure: caches inodes and names on the client, with lease-bounded validity.

Granted state is valid until it is recalled, the lease ends or the server has lost the session. A reply is
cached only if nothing was changed by this client while it was under way.
"""

from __future__ import annotations

import errno
import itertools
import stat
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from millpond.fs.client.cache.write_verifier import WriteVerifier
from millpond.fs.proto.file_ops import FoundIs
from millpond.fs.vfs.inode_api import ROOT, Node
from millpond.fs.vfs.path_api import Attributes, DirectoryEntry, os_error

_MOST_IDLE = 8192
_MOST_RECALLS = 8192
_MOST_FORGOTTEN = 4096  # nodes in one FORGET
_DEEPEST = 4096
_UNKNOWN = Node(0)


@dataclass(slots=True)
class CachedInode:
    """One file of the cache, by its number ``node`` for the kernel and its ``inode`` number on the device.

    ``remote`` is its node on the server under the session ``verifier`` (0: to be looked up again); it was
    last found in ``parent`` as ``name``, which may be a path. ``lookups`` counts the kernel's references;
    ``seen``: the kernel has used the node since. ``granted`` is the newest grant, 0 for none; ``drops``
    counts invalidations. ``local_opens`` are opens that the server does not know of; ``reported_open``: a
    recall reply has reported them. ``recalling`` counts invalidations of the kernel's cache under way;
    ``ungranted_read``: data was returned to the kernel during one. ``linked``: its name was flushed for a
    preallocated file and not synced since.

    Of a directory: ``small_reads`` counts reads of small files in it, ``creates`` the creates tried in it;
    until ``refused_until``, for ``refused_for`` seconds, no delegation is requested; ``fresh``:
    this client has just made it; ``name_doubts`` counts events after which its set of names is not certain.
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
    attributes: Attributes | None = None
    names: dict[bytes, Node | None] = field(default_factory=dict)
    listing: tuple[DirectoryEntry, ...] | None = None
    target: bytes | None = None
    has_data: bool = False
    readable: bool = False
    small_reads: int = 0
    local_opens: int = 0
    reported_open: bool = False
    recalling: int = 0
    ungranted_read: bool = False
    drops: int = 0
    name_doubts: int = 0
    creates: int = 0
    refused_until: float = 0.0
    refused_for: float = 0.0
    fresh: bool = False
    linked: bool = False
    durability: WriteVerifier = field(default_factory=WriteVerifier)

    def drop(self) -> None:
        """Invalidate all cached state of the file."""
        self.drops += 1
        self.granted, self.attributes, self.listing, self.readable = 0, None, None, False
        self.names.clear()


class InodeCache:
    """All inodes that a client knows. One thread may call at once.

    ``lease_end`` is in seconds of the lease clock. ``to_forget`` are nodes that the server is to forget;
    ``forget_is_urgent``: one of them may be a removed file that still takes flash space.
    """

    def __init__(self) -> None:
        self.root = CachedInode(ROOT, 0, None, b"", lookups=1, seen=True)
        self.lease_end = 0.0
        self.verifier = 0
        self.to_forget: list[int] = []
        self.forget_is_urgent = False
        self._forgets_in_flight: set[int] = set()
        self._files = {ROOT: self.root}
        self._by_inode: dict[int, CachedInode] = {}
        self._linked: set[Node] = set()
        self._idle: OrderedDict[Node, None] = OrderedDict()
        self._by_location: dict[tuple[Node, bytes], Node] = {}
        self._numbers = itertools.count(ROOT + 1)
        self._recalled: dict[int, int] = {}
        self._floor = 0
        self._changes = self._invalidated_at = 0

    def file(self, node: Node) -> CachedInode:
        """Return the inode of a node. Raises OSError: ESTALE for a forgotten one."""
        try:
            return self._files[node]
        except KeyError:
            raise os_error(errno.ESTALE) from None

    def has(self, inode: int) -> bool:
        """Return whether an inode number of the device is cached."""
        return inode in self._by_inode

    def get(self, node: Node) -> CachedInode | None:
        """Return the inode of a node, None for a forgotten one."""
        return self._files.get(node)

    def ttl(self, file: CachedInode, now: float) -> float:
        """Return for how many seconds the cached state of a file is valid."""
        left = self.lease_end - now if file.granted else 0.0
        return left if left > 0.0 else 0.0

    def lookup(self, directory: CachedInode, name: bytes, now: float) -> CachedInode | Literal[False] | None:
        """Return the inode of a name, None if the name is known not to exist, False if the cache
        cannot tell.
        """
        if not self.ttl(directory, now) or name not in directory.names:
            return False
        node = directory.names[name]
        return None if node is None else self._files.get(node, False)

    def last_known(self, directory: CachedInode, name: bytes) -> CachedInode | None:
        """Return the inode that was last found under a name, valid or not, or None."""
        node = directory.names.get(name, self._by_location.get((directory.node, name)))
        return None if node is None else self._files.get(node)

    def parent(self, file: CachedInode) -> CachedInode | None:
        """Return the directory in which a file was last found, or None."""
        return None if file.parent is None else self._files.get(file.parent)

    @property
    def changes(self) -> int:
        """How many changes by this client have begun or ended."""
        return self._changes

    def change(self) -> int:
        """Count the beginning or the end of a change; replies to earlier requests are not cached any more."""
        self._changes += 1
        return self._changes

    def insert(
        self, reply: FoundIs, parent: CachedInode, name: bytes, *, since: int, verifier: int
    ) -> CachedInode:
        """Cache a file that the server has found; return its inode.

        ``since`` is ``changes`` at the time of the request, ``verifier`` the session verifier then.
        """
        file = self._by_inode.get(reply.attributes.inode)
        if file is None:
            node = Node(next(self._numbers))
            file = self._files[node] = CachedInode(node, reply.attributes.inode, None, name)
            self._by_inode[file.inode] = file
        self.set_location(file, parent, name)
        # the server may still forget the node, and with it all its grants
        is_being_forgotten = reply.node in self._forgets_in_flight
        file.remote, file.verifier = reply.node, 0 if is_being_forgotten else verifier
        if reply.node in self.to_forget:
            self.to_forget.remove(reply.node)
        if self.learn(file, reply.attributes, 0 if is_being_forgotten else reply.granted, since=since):
            file.readable = reply.readable
        self.learn_name(parent, name, file.node, reply.name_granted, since=since)
        self._idle_unless_used(file)
        return file

    def reject(self, reply: FoundIs, verifier: int) -> None:
        """Have the server forget a node that it has found and that is not cached."""
        file = self._by_inode.get(reply.attributes.inode)
        is_known = file is not None and file.remote == reply.node
        if verifier == self.verifier and not is_known and reply.node not in self.to_forget:
            self.to_forget.append(reply.node)

    def take_forgets(self) -> tuple[int, ...]:
        """Remove and return the nodes that the server is to forget with the next request."""
        nodes = tuple(self.to_forget[:_MOST_FORGOTTEN])
        del self.to_forget[:_MOST_FORGOTTEN]
        self.forget_is_urgent = bool(self.to_forget)
        self._forgets_in_flight.update(nodes)
        return nodes

    def forgets_done(self, nodes: Iterable[int], *, others_ask: bool) -> None:
        """Note that the server has forgotten these nodes. With ``others_ask``, replies under way may predate
        that and are not cached.
        """
        self._forgets_in_flight.difference_update(nodes)
        if others_ask:
            self.change()

    def set_location(self, file: CachedInode, parent: CachedInode | None, name: bytes) -> None:
        """Record the parent and name of a file; None as the parent for a file without a name."""
        if file.parent is not None:
            if self._by_location.get((file.parent, file.name)) == file.node:
                del self._by_location[file.parent, file.name]
            if before := self._files.get(file.parent):
                before.children -= 1
                self._idle_unless_used(before)
        file.parent, file.name = (None if parent is None else parent.node), name
        if parent is not None:
            parent.children += 1
            self._by_location[parent.node, name] = file.node

    def _idle_unless_used(self, file: CachedInode) -> None:
        """Make a file evictable that the kernel does not know and that is no cached file's parent."""
        if not file.lookups and not file.children:
            self._idle[file.node] = None
            self._idle.move_to_end(file.node)

    def learn(self, file: CachedInode, attributes: Attributes | None, granted: int, *, since: int) -> bool:
        """Apply a reply's grant and attributes to a file; return whether the grant is valid."""
        counts = self._is_valid_grant(file, granted, since)
        if counts:
            file.granted = max(file.granted, granted)
            if attributes is not None and since == self._changes:
                file.attributes = attributes
                if attributes.links > 1 and not stat.S_ISDIR(attributes.mode):
                    self._linked.add(file.node)
        return counts

    def learn_name(
        self, directory: CachedInode, name: bytes, node: Node | None, granted: int, *, since: int
    ) -> None:
        """Cache the node of a name under a grant of its directory; None for a name that does not exist."""
        if self._is_valid_grant(directory, granted, since) and since == self._changes:
            directory.granted = max(directory.granted, granted)
            directory.names[name] = node

    def remove_name(self, directory: CachedInode, name: bytes, file: CachedInode | None) -> None:
        """Remove a name of ``file``; the name may already mean another file.

        If the cache cannot tell which inode the name referred to, the attributes of every hard-linked inode
        are dropped.
        """
        if directory.names.get(name, _UNKNOWN) != (file.node if file else None):
            for node in self._linked & self._files.keys():  # a late reply may have added an evicted one
                self._files[node].attributes = None
            self._linked.clear()
        if file:
            file.attributes = None
        if self.last_known(directory, name) is file:
            directory.names.pop(name, None)
            if file and (file.parent, file.name) == (directory.node, name):
                self.set_location(file, None, b"")
        # the removed file may be among them, and takes flash space until it is forgotten
        self.forget_is_urgent = bool(self.to_forget)

    def may_cache(self, file: CachedInode, granted: int, *, since: int) -> bool:
        """Return whether a reply under this grant may be cached."""
        return self._is_valid_grant(file, granted, since) and since == self._changes

    def _is_valid_grant(self, file: CachedInode, granted: int, since: int) -> bool:
        """Return whether a grant was neither recalled nor of an earlier lease or session; a new session
        numbers its grants anew.
        """
        return since >= self._invalidated_at and granted > max(self._floor, self._recalled.get(file.inode, 0))

    def use(self, file: CachedInode) -> None:
        """Count a lookup by the kernel."""
        file.lookups += 1
        self._idle.pop(file.node, None)

    def forget(self, node: Node, times: int) -> None:
        """Drop ``times`` lookups of a node; its cached state may still be of use."""
        file = self._files.get(node)
        if file is None or file is self.root:
            return
        file.lookups = max(0, file.lookups - times)
        if not file.lookups:
            file.seen, file.has_data = False, False
            self._idle_unless_used(file)
            if file.parent is None and self._idle.pop(node, 0) is None and not file.children:
                self._remove(file)  # a removed file takes flash space until the server forgets it
                self.forget_is_urgent = bool(self.to_forget)
            self.forget_old()

    def forget_old(self) -> None:
        """Evict the least recently used idle inodes beyond the limit."""
        self.forget_idle(_MOST_IDLE)

    def forget_idle(self, most: int = 0) -> None:
        """Evict idle inodes, the least recently used first, until at most ``most`` are left."""
        while len(self._idle) > most:
            file = self._files[self._idle.popitem(last=False)[0]]
            if not file.children:  # else it becomes idle again with its last child
                self._remove(file)

    def _remove(self, file: CachedInode) -> None:
        parent = self._files.get(file.parent) if file.parent is not None else None
        if parent and parent.names.get(file.name) == file.node:
            del parent.names[file.name]
        self.set_location(file, None, b"")
        del self._files[file.node]
        self._linked.discard(file.node)
        if self._by_inode.get(file.inode) is file:
            del self._by_inode[file.inode]
        if file.verifier == self.verifier:
            self.to_forget.append(file.remote)

    def recall(self, inodes: Iterable[int], upto: int) -> list[CachedInode]:
        """Invalidate these inodes if they were granted up to ``upto``; return the files that were."""
        known = []
        if len(self._recalled) > _MOST_RECALLS:
            self._raise_floor(max(self._recalled.values()))
        for inode in inodes:
            self._recalled[inode] = upto
            if (file := self._by_inode.get(inode)) and file.granted <= upto:
                file.drop()
                known.append(file)
        return known

    def invalidate_all(self, verifier: int) -> list[CachedInode]:
        """Invalidate everything: the lease has ended, or the session ``verifier`` is new. Returns
        all files.
        """
        if verifier != self.verifier:
            self.verifier = verifier
            self.to_forget.clear()
            self._forgets_in_flight.clear()
            self._recalled.clear()
            self._floor = 0
            self._invalidated_at = self.change()
            for file in self._files.values():
                file.durability.server_restarted()
        self.lease_end = 0.0
        for file in self._files.values():
            file.drop()
        return list(self._files.values())

    def begin_lease(self, upto: int) -> None:
        """Begin a lease: invalidate grants up to ``upto``, which belong to an earlier one, also those still
        under way.
        """
        self._raise_floor(upto)
        for file in self._files.values():
            if file.granted <= upto:
                file.drop()

    def _raise_floor(self, upto: int) -> None:
        """Treat grants up to this one as invalid when they arrive."""
        self._floor = max(self._floor, upto)
        self._recalled.clear()

    def path(self, file: CachedInode) -> tuple[bytes, ...]:
        """Return the names from the root. Raises OSError: ESTALE for a file without any."""
        names: list[bytes] = []
        while file is not self.root:
            if file.parent is None or file.parent not in self._files or len(names) == _DEEPEST:
                raise os_error(errno.ESTALE)
            names.append(file.name)
            file = self._files[file.parent]
        return tuple(b"/".join(reversed(names)).split(b"/")) if names else ()
