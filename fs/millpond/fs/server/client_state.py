"""Edge: what one client of a volume knows and has open there."""

from __future__ import annotations

import contextlib
import errno
import threading

from millpond.fs.coherence.coherent_fs import ClientDelegationBreaker, CoherentFs
from millpond.fs.coherence.delegation_table import Holder
from millpond.fs.coherence.manager import DelegationManager
from millpond.fs.server.preallocation import PreallocatedFiles
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.vfs.inode_api import ROOT, FoundEntry, Node
from millpond.fs.vfs.path_api import Handle, os_error

ROOT_INODE = 0  # as its own number may be that of a file of another file system
_MOST_FILES = 4096  # that one client may have open: descriptors are for all of them


class ClientState:
    """Of one client on ``tree``, whose locks ``master`` has. Threads may call at once."""

    def __init__(self, tree: BackingFs, master: DelegationManager, name: bytes | None = None) -> None:
        self._plain, self._master = tree, master
        self.holder: Holder = master.join(name)
        self._tree = CoherentFs(tree, ClientDelegationBreaker(master, self.holder))
        self._preparing = PreallocatedFiles(
            tree, self._tree, master, self.holder, self._prepared, self._close_and_forget
        )
        self._nodes: dict[Node, None] = {}
        self._handles: dict[Handle, Node] = {}
        self._keeping: dict[Handle, int] = {}
        self._in_use: dict[Node, int] = {}
        self._lock = threading.Lock()
        self.closed = False

    @property
    def open_files(self) -> int:
        """How many files the client has open."""
        return len(self._handles) - self._preparing.count

    def close(self) -> None:
        """Close what the client left open, and forget what it knew."""
        with self._lock:  # what is still under way leaves nothing behind
            self.closed = True
            handles, self._handles = self._handles, {}
            nodes, self._nodes = self._nodes, {}
        self._master.leave(self.holder)
        self._preparing.close()
        for handle in handles:
            with contextlib.suppress(OSError):  # nobody is left to hear of it
                self._tree.release(handle)
        for node in nodes:
            self._plain.forget(node, 1)

    def _node(self, number: int) -> Node:
        node = Node(number)
        if node not in self._nodes and node != ROOT:
            raise os_error(errno.ESTALE)
        return node

    def _changing(self, number: int) -> Node:
        """A node that is to be changed: not what holds a public part and others. Raises OSError: EROFS."""
        node = self._node(number)
        if node == ROOT and self._plain.is_divided:
            raise os_error(errno.EROFS)
        return node

    def _own(self, number: int) -> Handle:
        self._behind(Handle(number))
        return Handle(number)

    def _behind(self, handle: Handle) -> Node:
        try:
            return self._handles[handle]
        except KeyError:
            raise os_error(errno.EBADF) from None

    def _share(self, node: Node) -> int:
        if node == ROOT:  # nobody changes it
            return self._master.share(self.holder, ROOT_INODE)
        return self._master.share(self.holder, self._plain.inode(node)) if self._plain.is_public(node) else 0

    def _keep(self, node: Node) -> None:
        """It counts once, however often it is found."""
        with self._lock:
            known = node in self._nodes or node == ROOT
            if not known and not self.closed:
                self._nodes[node] = None
        if known or self.closed:
            self._plain.forget(node, 1)
        while self._plain.is_full:
            self._forget_oldest(node)

    def _forget_oldest(self, but: Node) -> None:
        """What was found longest ago; a client that still uses it hears ESTALE, and finds it again by name.
        Raises OSError: ENFILE if all the room is taken by others.
        """
        with self._lock:
            oldest = next((node for node in self._nodes if node != but and not self._is_used(node)), None)
            if oldest is None:
                raise os_error(errno.ENFILE)
            del self._nodes[oldest]
        self._plain.forget(oldest, 1)

    def _is_used(self, node: Node) -> bool:
        return node in self._in_use or self._preparing.needs(node)

    def _opened(self, handle: Handle, node: Node, keeps: bool) -> bool:
        """The client has opened the file; whether it must not keep what it reads."""
        with self._lock:
            if not self.closed:
                return self._kept_open(handle, node, keeps)
        self._tree.release(handle)
        raise os_error(errno.ESTALE)

    def _kept_open(self, handle: Handle, node: Node, keeps: bool) -> bool:
        self._handles[handle] = node
        self._in_use[node] = self._in_use.get(node, 0) + 1
        if not (keeps and self._plain.is_public(node)):
            return True
        inode = self._plain.inode(node)
        if self._master.opened(self.holder, inode):
            self._keeping[handle] = inode
            return False
        return True

    def _require_room(self, more: int = 1) -> None:
        if len(self._handles) + more > _MOST_FILES:
            raise os_error(errno.EMFILE)

    def _prepared(self, found: FoundEntry, handle: Handle) -> int:
        """The client knows it, and has it open, though nobody could find it."""
        try:
            self._opened(handle, found.node, keeps=True)
        except OSError:
            self._plain.forget(found.node, 1)
            raise
        self._keep(found.node)
        return self._share(found.node)

    def _release(self, number: int) -> None:
        """The client has closed it. Raises OSError."""
        with self._lock:  # another lane may say the same
            handle = self._own(number)
            node = self._handles.pop(handle)
            self._in_use[node] -= 1
            if not self._in_use[node]:
                del self._in_use[node]
        self._preparing.forget(node, handle)
        if (inode := self._keeping.pop(handle, None)) is not None:  # another lane may have forgotten the node
            self._master.closed(self.holder, inode)
        self._tree.release(handle)

    def _forget(self, node: Node) -> None:
        """The client has, however often it found it; unless it is needed here."""
        with self._lock:
            known = node in self._nodes and not self._is_used(node)
            if known:
                del self._nodes[node]
        if known:
            self._master.forget(self.holder, self._plain.inode(node))
            self._plain.forget(node, 1)

    def _close_and_forget(self, node: Node, handle: Handle) -> None:
        """One that the client does not hear of, or goes by no more."""
        with contextlib.suppress(OSError):  # it has just done it
            self._release(handle)
            self._forget(node)
