"""Edge: the files that were prepared for one client of a volume, until it tells their names."""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from millpond.fs.coherence.coherent_fs import CoherentFs
from millpond.fs.coherence.delegation_table import Holder
from millpond.fs.coherence.manager import DelegationManager
from millpond.fs.proto.async_create import MOST, NameUpdate, Preallocate, Preallocated, Touched
from millpond.fs.proto.dirents import pack_entries
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.vfs.inode_api import FoundEntry, Node
from millpond.fs.vfs.path_api import Attributes, DirectoryEntry, Handle, os_error, within

log = logging.getLogger(__name__)
_MOST_PREPARED = 1024  # of one client
_MOST_NAMES = 10_000  # in a directory that is granted exclusively: they are all told
_LONGEST = 264  # bytes that a name takes in a directory
_ROOM = 64 << 20  # bytes that are left on the flash, or nothing is prepared: others shall have the last of it
_FILES = 1024  # the same, of files
_MOST_TIME = (1 << 40) * 10**9
Keep = Callable[[FoundEntry, Handle], int]
Close = Callable[[Node, Handle], None]


@dataclass(frozen=True, slots=True)
class _File:
    """In the directory with this inode it is to get its name, for which there is room."""

    parent: Node
    directory: int
    handle: Handle


class PreallocatedFiles:
    """For ``holder``. ``keep`` notes that the client knows a file and has it open, and grants its attributes.
    Raises OSError if it cannot. ``close`` undoes that, unless the client has.
    """

    def __init__(
        self,
        tree: BackingFs,
        guarded: CoherentFs,
        master: DelegationManager,
        holder: Holder,
        keep: Keep,
        close: Close,
    ) -> None:
        self._tree, self._guarded, self._keep, self._close_and_forget = tree, guarded, keep, close
        self._master, self._holder = master, holder
        self._files: dict[Node, _File] = {}
        self._parents: Counter[Node] = Counter()
        self._told = 0
        self._telling = threading.Lock()
        self._lock, self._closed = threading.Lock(), False

    @property
    def count(self) -> int:
        """How many files have no name yet."""
        return len(self._files)

    def needs(self, node: Node) -> bool:
        """Whether names are to be told of in this directory: then it must not be forgotten."""
        return node in self._parents

    def answer(self, request: Preallocate, node_of: Callable[[int], Node]) -> tuple[Preallocated, bytes]:
        """What the client asks for. Raises OSError."""
        with self._needed(Node(request.node)):
            node = node_of(request.node)
            if request.granted:
                return self._prepare(node, request.granted, request.count), b""
            return self._grant(node, request.count)

    @contextlib.contextmanager
    def _needed(self, directory: Node) -> Iterator[None]:
        """It is not forgotten for the files that are prepared meanwhile, though none may be noted yet."""
        with self._lock:
            self._parents[directory] += 1
        try:
            yield
        finally:
            with self._lock:
                self._needs_less(directory)

    def _needs_less(self, directory: Node) -> None:
        self._parents[directory] -= 1
        self._parents = +self._parents

    def _grant(self, node: Node, count: int) -> tuple[Preallocated, bytes]:
        """The directory exclusively, with its listing, unless anything speaks against it."""
        within(count, 1, MOST)
        inode = self._tree.inode(node)
        granted = self._master.take(self._holder, inode) if self._may(node) else 0
        if not granted:
            return Preallocated(0), b""
        self._give_back(inode)
        try:
            if (names := self._names(node)) is not None:
                prepared = self._prepare(node, granted, count)
                if prepared.nodes:
                    return prepared, pack_entries(names)
        except OSError as error:
            log.debug("a directory is not granted exclusively: %s", error)
        self._master.untake(self._holder, inode)
        return Preallocated(0), b""

    def _give_back(self, directory: int) -> None:
        """What was prepared by an earlier grant of it, of which the client has not heard, or goes by no more:
        it can get no name now.
        """
        for node, file in list(self._files.items()):
            if file.directory == directory:
                self._close_and_forget(node, file.handle)

    def _may(self, node: Node) -> bool:
        """Whether names can be made there, and there is room to spare."""
        return self._tree.is_public(node) and self._tree.may_name(node) and self._has_room()

    def _has_room(self) -> bool:
        s = self._tree.statfs()
        return s.available * s.fragment_size >= _ROOM and s.files_free >= _FILES and not self._tree.is_full

    def _names(self, node: Node) -> list[DirectoryEntry] | None:
        """All in a directory; None if they are too many."""
        if self._tree.getattr(node).attributes.size > _MOST_NAMES * _LONGEST:
            return None  # to count them would take long
        handle = self._tree.opendir(node)
        try:
            found = [entry for entry in self._tree.readdir(handle, 0) if entry.name not in (".", "..")]
        finally:
            self._tree.release(handle)
        return found if len(found) <= _MOST_NAMES else None

    def _prepare(self, node: Node, granted: int, count: int) -> Preallocated:
        """As many as there is room for. Raises OSError: ESTALE if the directory is not the client's by this
        grant, and what prevents the first.
        """
        within(count, 1, MOST)
        if not self._master.has_taken(self._holder, self._tree.inode(node), granted):
            raise os_error(errno.ESTALE)
        count = min(count, _MOST_PREPARED - len(self._files)) if self._has_room() else 0
        held = self._tree.hold_names(node, count)
        made: list[tuple[FoundEntry, Handle, int]] = []
        try:
            while len(made) < held and not self._tree.is_full:
                made.append(self._one(node))
        except OSError:
            if not made:
                raise
        finally:
            self._tree.let_go_names(held - len(made))
        return _told(granted, made)

    def _one(self, directory: Node) -> tuple[FoundEntry, Handle, int]:
        """A file with room held for its name. Raises OSError."""
        inode = self._tree.inode(directory)
        found, handle = self._guarded.prepare(directory)
        try:
            granted = self._keep(found, handle)
            self._note(found.node, _File(directory, inode, handle))
        except OSError:  # the client does not hear of it
            self._close_and_forget(found.node, handle)
            raise
        return found, handle, granted

    def _note(self, node: Node, file: _File) -> None:
        with self._lock:
            if self._closed:
                raise os_error(errno.ESTALE)
            self._files[node] = file
            self._parents[file.parent] += 1

    def _drop(self, node: Node) -> None:
        """It has its name, or will get none."""
        with self._lock:
            if (file := self._files.pop(node, None)) is None:
                return
            self._needs_less(file.parent)
        self._tree.let_go_names(1)

    def close(self) -> None:
        """The client is gone: nothing will be named any more."""
        with self._lock:
            self._closed, left = True, list(self._files)
        for node in left:
            self._drop(node)

    def forget(self, node: Node, handle: Handle) -> None:
        """The client has closed a file: it will not name what it got prepared open as that."""
        if (file := self._files.get(node)) and file.handle == handle:
            self._drop(node)

    def tell(
        self, names: Sequence[NameUpdate], node_of: Callable[[int], Node], touched: Sequence[Touched] = ()
    ) -> None:
        """Give these names. Raises OSError."""
        if max(len(names), len(touched)) > MOST:
            raise os_error(errno.EMSGSIZE)
        if not (names or touched):
            return
        with self._telling:
            new = [each for each in names if each.serial > self._told]
            places: list[NameUpdate | Touched] = [*new, *touched]
            directories = {node: node_of(node) for node in {each.directory for each in places}}
            inodes = {number: self._tree.inode(node) for number, node in directories.items()}
            grants = {inodes[each.directory]: each.granted for each in places}
            with self._master.telling(self._holder, grants):
                for each in new:
                    self._name(each, directories[each.directory], inodes[each.directory])
                for one in touched:
                    self._tree.touch(directories[one.directory])

    def _name(self, naming: NameUpdate, directory: Node, inode: int) -> None:
        node = Node(naming.node)
        file = self._files.get(node)
        if file is None or file.directory != inode:
            raise os_error(errno.ESTALE)
        time = within(naming.time, 0, _MOST_TIME)
        self._tree.give_name(node, directory, naming.name, within(naming.mode, 0, 0o777), time)
        self._drop(node)
        self._told = naming.serial


def _told(granted: int, made: Sequence[tuple[FoundEntry, Handle, int]]) -> Preallocated:
    attributes: Attributes | None = None
    for found, _, _ in made:
        attributes = replace(found.attributes, inode=0)
    return Preallocated(
        granted,
        attributes,
        tuple(found.node for found, _, _ in made),
        tuple(handle for _, handle, _ in made),
        tuple(found.attributes.inode for found, _, _ in made),
        tuple(number for _, _, number in made),
    )
