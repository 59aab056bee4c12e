# SPDX-License-Identifier: Apache-2.0
"""Edge: the state of one client of a volume: its nodes, its open files, its delegations."""

from __future__ import annotations

import contextlib
import errno
import threading
from functools import partial

from millpond.fs.coherence.coherent_fs import CoherentFs
from millpond.fs.coherence.delegation_table import Holder
from millpond.fs.coherence.manager import DelegationManager
from millpond.fs.server.file_locks import ClientLocks
from millpond.fs.server.shared_descriptors import SharedDescriptors
from millpond.fs.vfs.inode_api import ROOT, Node
from millpond.fs.vfs.path_api import Handle, os_error

_MAX_FILES = 4096  # that one client may have open: all clients share the descriptors


class ClientState:
    """State of one client of a tree, whose delegations are the manager's. It shares the tree's descriptors
    with other clients. Threads may call at once.
    """

    def __init__(
        self, shared: SharedDescriptors, delegations: DelegationManager, name: bytes | None = None
    ) -> None:
        tree = shared.tree
        self._backing, self._delegations, self._shared = tree, delegations, shared
        self.holder: Holder = delegations.join(name)
        self.locks = ClientLocks(tree, lambda: delegations.await_locks(self.holder))
        self._coherent = CoherentFs(
            tree,
            partial(delegations.write_intent, self.holder),
            partial(delegations.recall_writer, self.holder),
        )
        self._nodes: dict[Node, None] = {}
        self._handles: dict[Handle, Node] = {}
        self._cached_opens: dict[Handle, int] = {}
        self._gathering: dict[Handle, int] = {}
        self._in_use: dict[Node, int] = {}
        self._lock = threading.Lock()
        self.closed = False

    @property
    def open_files(self) -> int:
        """Number of files that the client has open."""
        return len(self._handles)

    def close(self) -> None:
        """Close what the client left open, and drop its nodes and delegations."""
        with self._lock:  # requests under way add nothing after this
            self.closed = True
            handles, self._handles = self._handles, {}
            nodes, self._nodes = self._nodes, {}
        self._delegations.leave(self.holder)
        self.locks.drop()
        for handle in handles:
            with contextlib.suppress(OSError):  # no client is left to receive the error
                self._coherent.release(handle)
        for node in nodes:
            self._backing.forget(node, 1)

    def _node(self, number: int) -> Node:
        node = Node(number)
        if node not in self._nodes and node != ROOT:
            raise os_error(errno.ESTALE)
        return node

    def _writable_node(self, number: int) -> Node:
        """Return a node that may be changed, not a root that holds a public and a private part. Raises
        OSError: EROFS.
        """
        node = self._node(number)
        if node == ROOT and self._backing.is_divided:
            raise os_error(errno.EROFS)
        return node

    def _handle(self, number: int) -> Handle:
        self._node_of(Handle(number))
        return Handle(number)

    def _node_of(self, handle: Handle) -> Node:
        try:
            return self._handles[handle]
        except KeyError:
            raise os_error(errno.EBADF) from None

    def _grant_read(self, node: Node) -> int:
        if node != ROOT and not self._backing.is_public(node):
            return 0
        return self._delegations.grant_read(self.holder, self._backing.inode(node))

    def _reference(self, node: Node) -> None:
        """Hold one reference to the node for the client, however often it is found."""
        with self._lock:
            known = node in self._nodes or node == ROOT
            if not known and not self.closed:
                self._nodes[node] = None
        if known or self.closed:
            self._backing.forget(node, 1)
        self._shared.make_room(node)

    @property
    def nodes(self) -> int:
        """Number of nodes that the client has."""
        return len(self._nodes)

    def forget_oldest(self, but: Node) -> bool:
        """Drop the node that was found longest ago and is neither open nor ``but``; a client that still uses
        it gets ESTALE, and looks it up again. Returns False if there is none.
        """
        with self._lock:
            unused = (node for node in self._nodes if node != but and node not in self._in_use)
            oldest = next(unused, None)
            if oldest is None:
                return False
            del self._nodes[oldest]
        self._backing.forget(oldest, 1)
        return True

    def _add_open(self, handle: Handle, node: Node, cached: bool) -> bool:
        """Note an open file of the client. Returns whether the client must not cache what it reads."""
        with self._lock:
            if not self.closed:
                return self._note_open(handle, node, cached)
        self._coherent.release(handle)
        raise os_error(errno.ESTALE)

    def _note_open(self, handle: Handle, node: Node, cached: bool) -> bool:
        self._handles[handle] = node
        self._in_use[node] = self._in_use.get(node, 0) + 1
        if not (cached and self._backing.is_public(node)):
            return True
        inode = self._backing.inode(node)
        if self._delegations.opened(self.holder, inode):
            self._cached_opens[handle] = inode
            return False
        return True

    def _require_room(self) -> None:
        if len(self._handles) >= min(_MAX_FILES, self._shared.most_open):
            raise os_error(errno.EMFILE)

    def _release(self, number: int) -> None:
        """Close an open file of the client. Raises OSError."""
        with self._lock:  # another slot may close the same handle
            handle = self._handle(number)
            node = self._handles.pop(handle)
            self._in_use[node] -= 1
            if not self._in_use[node]:
                del self._in_use[node]
        self._end_gathering(handle)
        inode = self._cached_opens.pop(handle, None)
        if inode is not None:  # not by the node, which another slot may have forgotten
            self._delegations.closed(self.holder, inode)
        self._coherent.release(handle)

    def _end_gathering(self, handle: Handle) -> None:
        """Note that the client gathers no more writes by this open file."""
        if (inode := self._gathering.pop(handle, None)) is not None:
            self._delegations.end_write(self.holder, inode)

    def _forget(self, node: Node) -> None:
        """Drop the client's reference to this node, unless it has open handles."""
        with self._lock:
            known = node in self._nodes and node not in self._in_use
            if known:
                del self._nodes[node]
        if known:
            self._delegations.forget(self.holder, self._backing.inode(node))
            self._backing.forget(node, 1)

    def _close_and_forget(self, node: Node, handle: Handle) -> None:
        """Close a new file that the client has not heard of."""
        with contextlib.suppress(OSError):  # the client has just closed it
            self._release(handle)
            self._forget(node)
