# SPDX-License-Identifier: Apache-2.0
"""Pure: caches inodes and names on the client, with lease-bounded validity.

Granted state is valid until it is recalled, the lease ends or the server has lost the session. A reply is
cached only if this client changed neither the file nor any name while it was under way: a name that is added
or removed changes the attributes of a file that the cache may not know.
"""

from __future__ import annotations

import errno
import itertools
import stat
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Literal, cast

from millpond.base.errors import LocalError
from millpond.fs.client.cache.inode import CachedInode
from millpond.fs.proto.file_ops import FoundIs
from millpond.fs.vfs.inode_api import ROOT, KnownFile, Node
from millpond.fs.vfs.path_api import Attributes, os_error

_MOST_IDLE = 8192
_MOST_RECALLS = 8192
_MOST_FORGOTTEN = 4096  # nodes in one FORGET, or grants returned
_DEEPEST = 4096
_LONGEST = 255  # bytes of a name: the server refuses longer ones
_UNKNOWN = Node(0)
_LINKS = Attributes.__match_args__.index("links")  # the place of their number among the attributes


class InodeCache:
    """All inodes that a client knows. One thread may call at once.

    ``lease_end`` is in seconds of the lease clock. ``to_forget`` are nodes that the server is to forget;
    ``forget_is_urgent``: one of them may be a removed file that still takes flash space. ``to_return`` are
    inode numbers and grants of files without a node on the server, to be returned. ``pages_held`` counts
    pages of listings that are still to be used. ``wants_bare``: programs have asked for extended attributes,
    so that listings are to say which files have none.
    """

    def __init__(self) -> None:
        self.root = CachedInode(ROOT, 0, None, b"", lookups=1, seen=True)
        self.lease_end = 0.0
        self.verifier, self._storage = 0, b""
        self.to_forget: list[int] = []
        self.to_return: list[tuple[int, int]] = []
        self.pages_held = 0
        self.wants_bare = False
        self.forget_is_urgent = False
        self._forgets_in_flight: set[int] = set()
        self._files = {ROOT: self.root}
        self._by_inode: dict[int, CachedInode] = {}
        self._linked: set[Node] = set()
        self._idle: OrderedDict[Node, None] = OrderedDict()
        self._by_location: dict[tuple[Node, bytes], Node] = {}
        self._numbers = cast("Iterator[Node]", itertools.count(ROOT + 1))
        self._recalled: dict[int, int] = {}
        self._floor = 0
        self._changes = self._names_changed_at = self._invalidated_at = 0

    def file(self, node: Node) -> CachedInode:
        """Return the inode of a node. Needs no lock. Raises OSError: ESTALE for a forgotten one."""
        file = self.get(node)
        if file is None:
            raise os_error(errno.ESTALE) from LocalError("the file was forgotten here")
        return file

    @property
    def count(self) -> int:
        """Number of files that are known."""
        return len(self._files)

    def get(self, node: Node) -> CachedInode | None:
        """Return the inode of a node, None for a forgotten one. Needs no lock."""
        return self._files.get(node)

    def by_inode(self, inode: int) -> CachedInode | None:
        """Return the file with an inode number of the device, None if it is not cached."""
        return self.root if inode == self.root.inode else self._by_inode.get(inode)

    def least_needed(self) -> list[KnownFile]:
        """Return the files that the kernel knows and that are no directories: first those that it was only
        told of with a listing, last those that it has data of, each in the order in which they were found.
        """
        found = list[CachedInode]()
        for file in self._files.values():
            is_directory = file.attributes is not None and stat.S_ISDIR(file.attributes.mode)
            if file.lookups and not (is_directory or file.children or file.local_opens):
                found.append(file)
        found.sort(key=lambda file: (file.has_data, file.seen))
        return [(file.node, file.parent, file.name) for file in found if file.parent is not None]

    def _return(self, inode: int, granted: int) -> None:
        """Return a grant. A page that is still to be used may name it: it counts as recalled."""
        self.to_return.append((inode, granted))
        if len(self._recalled) > _MOST_RECALLS:
            self._raise_floor(max(self._recalled.values()))
        self._recalled[inode] = max(granted, self._recalled.get(inode, 0))

    def ttl(self, file: CachedInode, now: float) -> float:
        """Return for how many seconds the cached state of a file is valid."""
        left = self.lease_end - now if file.granted else 0.0
        return left if left > 0.0 else 0.0

    def lookup(self, directory: CachedInode, name: bytes, now: float) -> CachedInode | Literal[False] | None:
        """Return the inode of a name, None if the name is known not to exist, False if the cache
        cannot tell.
        """
        if not self.ttl(directory, now):
            return False
        if name not in directory.names:
            return None if directory.complete and len(name) <= _LONGEST else False
        node = directory.names[name]
        return None if node is None else self.get(node) or False

    def last_known(self, directory: CachedInode, name: bytes) -> CachedInode | None:
        """Return the inode that was last found under a name, valid or not, or None."""
        node = directory.names.get(name, self._by_location.get((directory.node, name)))
        return None if node is None else self.get(node)

    def parent(self, file: CachedInode) -> CachedInode | None:
        """Return the directory in which a file was last found, or None."""
        return None if file.parent is None else self._files.get(file.parent)

    @property
    def changes(self) -> int:
        """How many changes by this client have begun or ended."""
        return self._changes

    def change(self, file: CachedInode | None = None) -> int:
        """Count the beginning or the end of a change, of this file's data and attributes alone or else of
        names; replies to earlier requests are not cached any more.
        """
        self._changes += 1
        if file:
            file.changed_at = self._changes
        else:
            self._names_changed_at = self._changes
        return self._changes

    def is_current(self, file: CachedInode, since: int) -> bool:
        """Return whether neither this file nor any name was changed since a request."""
        return since >= self._names_changed_at and since >= file.changed_at

    def insert(
        self, reply: FoundIs, parent: CachedInode, name: bytes, *, since: int, verifier: int
    ) -> CachedInode:
        """Cache a file that the server has found; return its inode.

        ``since`` is ``changes`` at the time of the request, ``verifier`` the session verifier then.
        """
        file = self.found(reply.attributes.inode, parent, name)
        # the server may still forget the node, and with it all its grants
        is_being_forgotten = reply.node in self._forgets_in_flight
        file.remote, file.verifier = reply.node, 0 if is_being_forgotten else verifier
        if reply.node in self.to_forget:
            self.to_forget.remove(reply.node)
        granted = 0 if is_being_forgotten else reply.granted
        if self.learn(file, reply.attributes, granted, since=since) and self.is_current(file, since):
            file.readable = reply.readable
        self.learn_name(parent, name, file.node, reply.name_granted, since=since)
        self.idle_unless_used(file)
        return file

    def insert_listed(
        self,
        fields: tuple[int, ...],
        parent: CachedInode,
        name: bytes,
        granted: int,
        *,
        bare: bool,
        since: int,
    ) -> CachedInode:
        """Cache a file that was listed without a node, by grants of it and of its directory that count;
        ``fields`` are its attributes in their order. ``use`` or ``idle_unless_used`` is to be called next.
        """
        file = self.found(fields[0], parent, name)
        if granted > file.granted:
            file.granted = granted
        if self.is_current(file, since) and not file.gathered:
            file.known = Attributes(*fields, bare=True) if bare else fields
            if fields[_LINKS] > 1:
                self._linked.add(file.node)
        parent.names[name] = file.node
        return file

    def found(self, inode: int, parent: CachedInode, name: bytes) -> CachedInode:
        """Return the file with this inode number, found under a name; a new one if it is not cached. The
        inode number of a removed file is another file's once the server has lost the session.
        """
        file = self._by_inode.get(inode)
        if file is None or (file.parent is None and file.verifier not in (0, self.verifier)):
            node = next(self._numbers)
            file = CachedInode(node, inode, parent.node, name)
            self._files[node] = self._by_inode[inode] = file
            self._by_location[parent.node, name] = node
            parent.children += 1
        else:
            self.set_location(file, parent, name)
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

    def take_returns(self) -> tuple[tuple[int, int], ...]:
        """Remove and return the grants to be returned with the next request."""
        grants = tuple(self.to_return[:_MOST_FORGOTTEN])
        del self.to_return[:_MOST_FORGOTTEN]
        return grants

    def forgets_done(self, nodes: Iterable[int], *, others_ask: bool) -> None:
        """Note that the server has forgotten these nodes. With ``others_ask``, replies under way may predate
        that and are not cached.
        """
        self._forgets_in_flight.difference_update(nodes)
        if others_ask or self.pages_held:
            self.change()

    def set_location(self, file: CachedInode, parent: CachedInode | None, name: bytes) -> None:
        """Record the parent and name of a file; None as the parent for a file without a name."""
        if file.parent is not None:
            if self._by_location.get((file.parent, file.name)) == file.node:
                del self._by_location[file.parent, file.name]
            if before := self._files.get(file.parent):
                before.children -= 1
                self.idle_unless_used(before)
        file.parent, file.name = (None if parent is None else parent.node), name
        if parent is not None:
            parent.children += 1
            self._by_location[parent.node, name] = file.node

    def idle_unless_used(self, file: CachedInode) -> None:
        """Make a file evictable that the kernel does not know and that is no cached file's parent."""
        if not file.lookups and not file.children:
            self._idle[file.node] = None
            self._idle.move_to_end(file.node)

    def learn(self, file: CachedInode, attributes: Attributes | None, granted: int, *, since: int) -> bool:
        """Apply a reply's grant and attributes to a file; return whether the grant is valid."""
        counts = self._is_valid_grant(file, granted, since)
        if counts:
            self._apply(file, attributes, granted, since)
        return counts

    def _apply(self, file: CachedInode, attributes: Attributes | None, granted: int, since: int) -> None:
        file.granted = max(file.granted, granted)
        if attributes is not None and self.is_current(file, since) and not file.gathered:
            file.attributes = attributes
            if attributes.links > 1 and not stat.S_ISDIR(attributes.mode):
                self._linked.add(file.node)

    def learn_name(
        self, directory: CachedInode, name: bytes, node: Node | None, granted: int, *, since: int
    ) -> None:
        """Cache the node of a name under a grant of its directory; None for a name that does not exist."""
        if self.may_cache(directory, granted, since=since):
            directory.granted = max(directory.granted, granted)
            directory.names[name] = node
        elif node is not None:
            directory.complete = False

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
        return self._is_valid_grant(file, granted, since) and self.is_current(file, since)

    def _is_valid_grant(self, file: CachedInode, granted: int, since: int) -> bool:
        """Return whether a grant was neither recalled nor of an earlier lease or session; a new session
        numbers its grants anew.
        """
        return since >= self._invalidated_at and self.is_held(file.inode, granted, self.verifier)

    def is_held(self, inode: int, granted: int, verifier: int) -> bool:
        """Return whether a grant of the session ``verifier`` has not been recalled; 0 is none."""
        is_recalled = granted <= self._floor or granted <= self._recalled.get(inode, 0)
        return verifier == self.verifier and not is_recalled

    def is_new(self, since: int) -> bool:
        """Return whether no name was changed, and the session not lost, since a request."""
        return since >= max(self._names_changed_at, self._invalidated_at)

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
            self.idle_unless_used(file)
            if file.parent is None:
                self.evict(file)  # a removed file takes flash space until the server forgets it
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

    def evict(self, file: CachedInode) -> bool:
        """Forget a file and soon have the server forget it; return False if the kernel knows it, or it is the
        parent of cached files.
        """
        if file.node in self._idle and not file.children:
            del self._idle[file.node]
            self._remove(file)
            self.forget_is_urgent = bool(self.to_forget)
        return self._files.get(file.node) is not file

    def _remove(self, file: CachedInode) -> None:
        parent = self._files.get(file.parent) if file.parent is not None else None
        if parent and parent.names.get(file.name) == file.node:
            del parent.names[file.name]
            parent.complete = False
        self.set_location(file, None, b"")
        del self._files[file.node]
        self._names_changed_at = max(self._names_changed_at, file.changed_at)  # of replies that find it anew
        self._linked.discard(file.node)
        if self._by_inode.get(file.inode) is file:
            del self._by_inode[file.inode]
        if file.verifier == self.verifier:
            self.to_forget.append(file.remote)
        elif file.granted and not file.remote:
            self._return(file.inode, file.granted)

    def recall(self, inodes: Iterable[int], upto: int) -> list[CachedInode]:
        """Invalidate these inodes if they were granted up to ``upto``; return the files that were."""
        known = []
        if len(self._recalled) > _MOST_RECALLS:
            self._raise_floor(max(self._recalled.values()))
        for inode in inodes:
            self._recalled[inode] = upto
            if (file := self.by_inode(inode)) and file.granted <= upto:
                file.drop()
                known.append(file)
        return known

    def invalidate_all(self, verifier: int, storage: bytes = b"") -> list[CachedInode]:
        """Invalidate everything: the lease has ended, or the session ``verifier`` is new; what was not synced
        counts as lost if the write verifier ``storage`` is new, too. Returns all files.
        """
        if verifier != self.verifier:
            is_lost = not storage or storage != self._storage
            self.verifier, self._storage = verifier, storage
            self.to_forget.clear()
            self.to_return.clear()
            self._forgets_in_flight.clear()
            self._recalled.clear()
            self._floor = 0
            self._invalidated_at = self.change()
            for file in self._files.values() if is_lost else ():
                file.durability.storage_changed()
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
                raise os_error(errno.ESTALE) from LocalError("the file has no name any more")
            names.append(file.name)
            file = self._files[file.parent]
        return tuple(b"/".join(reversed(names)).split(b"/")) if names else ()
