"""Pure: what a client of a volume knows of its files, and for how long it may go by that.

What was granted counts until it is recalled, the lease is over or the server has forgotten the client; and
what a reply tells counts only if nothing was changed here while it was under way.
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
_MOST_FORGOTTEN = 4096  # at once
_DEEPEST = 4096
_UNKNOWN = Node(0)


@dataclass(slots=True)
class CachedInode:
    """One file. ``remote`` is its node in the server's ``memory``; it was last found as ``name``, which may
    be several with ``/`` between them, in ``parent``. ``lookups`` are those of who uses the client; ``seen``:
    it has since been used by its number. ``opens`` without the server's knowledge, unless ``named_open`` when
    it was recalled. Of a directory: ``small_reads`` of files in it, ``made`` by the server there, and until
    when, and for how long, it is not asked for exclusively; ``fresh``: it was made here, and nothing in it;
    ``unsure``: how often nobody knows which names were changed. ``linked``: its name was given to a file that
    was there before, and was not synced since.
    """

    node: Node
    inode: int
    parent: Node | None
    name: bytes
    remote: int = 0
    memory: int = 0
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
    opens: int = 0
    named_open: bool = False
    recalling: int = 0
    uncovered: bool = False
    drops: int = 0
    unsure: int = 0
    made: int = 0
    refused_until: float = 0.0
    refused_for: float = 0.0
    fresh: bool = False
    linked: bool = False
    durability: WriteVerifier = field(default_factory=WriteVerifier)

    def drop(self) -> None:
        """Go by nothing that was known of it."""
        self.drops += 1
        self.granted, self.attributes, self.listing, self.readable = 0, None, None, False
        self.names.clear()


class InodeCache:
    """All files that a client knows. One thread may call at once."""

    def __init__(self) -> None:
        self.root = CachedInode(ROOT, 0, None, b"", lookups=1, seen=True)
        self.lease_end = 0.0
        self.memory = 0
        self.forgotten: list[int] = []
        self.is_urgent = False
        self._forgetting: set[int] = set()
        self._files = {ROOT: self.root}
        self._by_inode: dict[int, CachedInode] = {}
        self._linked: set[Node] = set()
        self._idle: OrderedDict[Node, None] = OrderedDict()
        self._places: dict[tuple[Node, bytes], Node] = {}
        self._numbers = itertools.count(ROOT + 1)
        self._recalled: dict[int, int] = {}
        self._floor = 0
        self._changes = self._voided = 0

    def file(self, node: Node) -> CachedInode:
        """Raises OSError: ESTALE for one that was forgotten."""
        try:
            return self._files[node]
        except KeyError:
            raise os_error(errno.ESTALE) from None

    def has(self, inode: int) -> bool:
        """Whether a file with this number of the device's is known."""
        return inode in self._by_inode

    def known(self, node: Node) -> CachedInode | None:
        """None for one that was forgotten."""
        return self._files.get(node)

    def seconds(self, file: CachedInode, now: float) -> float:
        """For how long what is known of the file may be gone by."""
        left = self.lease_end - now if file.granted else 0.0
        return left if left > 0.0 else 0.0

    def name(self, directory: CachedInode, name: bytes, now: float) -> CachedInode | Literal[False] | None:
        """What the name stands for, None for nothing, False if that is not known."""
        if not self.seconds(directory, now) or name not in directory.names:
            return False
        node = directory.names[name]
        return None if node is None else self._files.get(node, False)

    def named(self, directory: CachedInode, name: bytes) -> CachedInode | None:
        """What was last found as that, as far as it is known."""
        node = directory.names.get(name, self._places.get((directory.node, name)))
        return None if node is None else self._files.get(node)

    def parent(self, file: CachedInode) -> CachedInode | None:
        """The directory that it was last found in, as far as it is known."""
        return None if file.parent is None else self._files.get(file.parent)

    @property
    def changes(self) -> int:
        """How often something was changed here, or began to be."""
        return self._changes

    def change(self) -> int:
        """A change begins or ends; what is learned from now on may be kept if ``changes`` stays the same."""
        self._changes += 1
        return self._changes

    def found(
        self, reply: FoundIs, parent: CachedInode, name: bytes, *, since: int, memory: int
    ) -> CachedInode:
        """A file that the server has found."""
        file = self._by_inode.get(reply.attributes.inode)
        if file is None:
            node = Node(next(self._numbers))
            file = self._files[node] = CachedInode(node, reply.attributes.inode, None, name)
            self._by_inode[file.inode] = file
        self.place(file, parent, name)
        unsure = reply.node in self._forgetting  # the server may forget it after this, and all its grants
        file.remote, file.memory = reply.node, 0 if unsure else memory
        if reply.node in self.forgotten:
            self.forgotten.remove(reply.node)
        if self.learn(file, reply.attributes, 0 if unsure else reply.granted, since=since):
            file.readable = reply.readable
        self.learn_name(parent, name, file.node, reply.name_granted, since=since)
        self._idle_unless_used(file)
        return file

    def refuse(self, reply: FoundIs, memory: int) -> None:
        """A file that the server has found, of no interest: it may forget it, unless it is known."""
        file = self._by_inode.get(reply.attributes.inode)
        is_known = file is not None and file.remote == reply.node
        if memory == self.memory and not is_known and reply.node not in self.forgotten:
            self.forgotten.append(reply.node)

    def forget_remotely(self) -> tuple[int, ...]:
        """What the server is told to forget, now or later."""
        nodes = tuple(self.forgotten[:_MOST_FORGOTTEN])
        del self.forgotten[:_MOST_FORGOTTEN]
        self.is_urgent = bool(self.forgotten)
        self._forgetting.update(nodes)
        return nodes

    def has_forgotten(self, nodes: Iterable[int], *, others_ask: bool) -> None:
        """The server has; what replies to ``others`` say that are under way may be of before."""
        self._forgetting.difference_update(nodes)
        if others_ask:
            self.change()

    def place(self, file: CachedInode, parent: CachedInode | None, name: bytes) -> None:
        """It is to be found there from now on; nowhere, without a parent."""
        if file.parent is not None:
            if self._places.get((file.parent, file.name)) == file.node:
                del self._places[file.parent, file.name]
            if before := self._files.get(file.parent):
                before.children -= 1
                self._idle_unless_used(before)
        file.parent, file.name = (None if parent is None else parent.node), name
        if parent is not None:
            parent.children += 1
            self._places[parent.node, name] = file.node

    def _idle_unless_used(self, file: CachedInode) -> None:
        """Nobody knows it, and no file that is known is to be found in it."""
        if not file.lookups and not file.children:
            self._idle[file.node] = None
            self._idle.move_to_end(file.node)

    def learn(self, file: CachedInode, attributes: Attributes | None, granted: int, *, since: int) -> bool:
        """By this grant; whether it counts."""
        counts = self._counts(file, granted, since)
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
        """What a name stands for, None for nothing."""
        if self._counts(directory, granted, since) and since == self._changes:
            directory.granted = max(directory.granted, granted)
            directory.names[name] = node

    def unname(self, directory: CachedInode, name: bytes, file: CachedInode | None) -> None:
        """The name stands no longer for this file, but may stand for another by now. If it is not sure that
        it did (who uses the client may go by what was forgotten here), it was of any file that has several.
        """
        if directory.names.get(name, _UNKNOWN) != (file.node if file else None):
            for node in self._linked & self._files.keys():  # a late reply may be of one that was forgotten
                self._files[node].attributes = None
            self._linked.clear()
        if file:
            file.attributes = None
        if self.named(directory, name) is file:
            directory.names.pop(name, None)
            if file and (file.parent, file.name) == (directory.node, name):
                self.place(file, None, b"")
        self.is_urgent = bool(self.forgotten)  # it may be among them, and takes space on the flash till then

    def counts(self, file: CachedInode, granted: int, *, since: int) -> bool:
        """Whether what came by this grant may be kept."""
        return self._counts(file, granted, since) and since == self._changes

    def _counts(self, file: CachedInode, granted: int, since: int) -> bool:
        """Another memory of the server numbers its grants anew."""
        return since >= self._voided and granted > max(self._floor, self._recalled.get(file.inode, 0))

    def use(self, file: CachedInode) -> None:
        """Who uses the client has found it once more."""
        file.lookups += 1
        self._idle.pop(file.node, None)

    def forget(self, node: Node, times: int) -> None:
        """It was found so often and is of no more interest; what is known of it may still be of use."""
        file = self._files.get(node)
        if file is None or file is self.root:
            return
        file.lookups = max(0, file.lookups - times)
        if not file.lookups:
            file.seen, file.has_data = False, False
            self._idle_unless_used(file)
            if file.parent is None and self._idle.pop(node, 0) is None and not file.children:
                self._remove(file)  # its name is gone: the server keeps it on the flash till it hears so
                self.is_urgent = bool(self.forgotten)
            self.forget_old()

    def forget_old(self) -> None:
        """What nobody has used, or found, for long."""
        self.forget_idle(_MOST_IDLE)

    def forget_idle(self, most: int = 0) -> None:
        """All that nobody uses, but for so many."""
        while len(self._idle) > most:
            file = self._files[self._idle.popitem(last=False)[0]]
            if not file.children:  # else the last one of them brings it back here
                self._remove(file)

    def _remove(self, file: CachedInode) -> None:
        parent = self._files.get(file.parent) if file.parent is not None else None
        if parent and parent.names.get(file.name) == file.node:
            del parent.names[file.name]
        self.place(file, None, b"")
        del self._files[file.node]
        self._linked.discard(file.node)
        if self._by_inode.get(file.inode) is file:
            del self._by_inode[file.inode]
        if file.memory == self.memory:
            self.forgotten.append(file.remote)

    def recall(self, inodes: Iterable[int], upto: int) -> list[CachedInode]:
        """Go no longer by what was granted up to then; the files that are known."""
        known = []
        if len(self._recalled) > _MOST_RECALLS:
            self._refuse(max(self._recalled.values()))
        for inode in inodes:
            self._recalled[inode] = upto
            if (file := self._by_inode.get(inode)) and file.granted <= upto:
                file.drop()
                known.append(file)
        return known

    def void(self, memory: int) -> list[CachedInode]:
        """The server has forgotten this client, or the lease is over: nothing counts any more."""
        if memory != self.memory:
            self.memory = memory
            self.forgotten.clear()
            self._forgetting.clear()
            self._recalled.clear()
            self._floor = 0
            self._voided = self.change()
            for file in self._files.values():
                file.durability.forgotten()
        self.lease_end = 0.0
        for file in self._files.values():
            file.drop()
        return list(self._files.values())

    def begin_lease(self, upto: int) -> None:
        """Grants up to this one were of an earlier lease: neither those that have come since it ended count,
        nor those under way.
        """
        self._refuse(upto)
        for file in self._files.values():
            if file.granted <= upto:
                file.drop()

    def _refuse(self, upto: int) -> None:
        """Grants up to this one do not count when they arrive."""
        self._floor = max(self._floor, upto)
        self._recalled.clear()

    def path(self, file: CachedInode) -> tuple[bytes, ...]:
        """The names from the root. Raises OSError: ESTALE for a file without any."""
        names: list[bytes] = []
        while file is not self.root:
            if file.parent is None or file.parent not in self._files or len(names) == _DEEPEST:
                raise os_error(errno.ESTALE)
            names.append(file.name)
            file = self._files[file.parent]
        return tuple(b"/".join(reversed(names)).split(b"/")) if names else ()
