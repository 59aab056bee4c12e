"""Pure: the directories that a client has exclusively: all their names, and those that it has made without a
word to the server yet.

A name that is taken away before it was told leaves nothing: its file is prepared once more. What the server
may have been told of is not taken away here, nor told by others meanwhile.
"""

from __future__ import annotations

import itertools
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from millpond.fs.client.cache.inodes import CachedInode
from millpond.fs.proto.async_create import MOST, NameUpdate
from millpond.fs.vfs.inode_api import Node
from millpond.fs.vfs.path_api import Attributes

FIRST = 2
"""Files that are prepared with the grant; then twice as many each time."""


@dataclass(frozen=True, slots=True)
class PreallocatedFile:
    """A file that the server has prepared: its node and open handle there, the grant of its attributes."""

    node: int
    handle: int
    inode: int
    granted: int


@dataclass(eq=False, slots=True)
class ExclusiveDirectory:
    """One directory, ``remote`` in the server's ``memory``, by a grant of it, and as it was dropped and
    ``unsure`` then. ``clock`` is how much the device's clock is ahead of the client's, in nanoseconds. The
    directory's times are ``estimated`` since its names were changed here, at that time; 0 if they are the
    device's.
    """

    file: CachedInode
    remote: int
    granted: int
    memory: int
    names: set[bytes]
    attributes: Attributes
    clock: int
    used: float
    spares: list[PreallocatedFile] = field(default_factory=list)
    untold: dict[bytes, PendingFile] = field(default_factory=dict)
    wanted: int = 2 * FIRST
    estimated: float = 0.0
    drops: int = field(init=False)
    unsure: int = field(init=False)

    def __post_init__(self) -> None:
        self.drops, self.unsure = self.file.drops, self.file.unsure

    @property
    def is_valid(self) -> bool:
        """Whether it was not recalled since, and all its names are known."""
        return self.drops == self.file.drops and self.unsure == self.file.unsure

    def prepared(self, spares: Iterable[PreallocatedFile], attributes: Attributes, clock: int) -> None:
        """There are more files."""
        self.spares += spares
        self.attributes, self.clock = attributes, clock

    def next_count(self) -> int:
        """How many files are to be prepared next."""
        count, self.wanted = self.wanted, min(2 * self.wanted, MOST)
        return count

    def attributes_of(self, spare: PreallocatedFile, mode: int, time: int, links: int = 1) -> Attributes:
        """Of a file that is made of it with these permissions."""
        return replace(
            self.attributes,
            inode=spare.inode,
            mode=stat.S_IFREG | mode,
            links=links,
            atime=time,
            mtime=time,
            ctime=time,
        )


@dataclass(eq=False, slots=True)
class PendingFile:
    """A file with a name that was made here; ``closed`` if its handle is of use only for another file."""

    serial: int
    directory: ExclusiveDirectory
    name: bytes
    file: CachedInode
    spare: PreallocatedFile
    mode: int
    time: int
    closed: bool = False

    def naming(self) -> NameUpdate:
        """What the server is told."""
        into, node = self.directory, self.spare.node
        return NameUpdate(self.serial, into.remote, into.granted, node, self.name, self.mode, self.time)


class PendingNames:
    """Those of all directories of one client. One thread may call at once."""

    def __init__(self) -> None:
        self.held: dict[Node, ExclusiveDirectory] = {}
        self.untold: dict[int, PendingFile] = {}
        self.files: dict[Node, PendingFile] = {}
        self.touched: dict[Node, ExclusiveDirectory] = {}
        self._touching: list[ExclusiveDirectory] = []
        self._loose: dict[Node, PendingFile] = {}
        self._serials = itertools.count(1)
        self._begun = 0

    def of(self, directory: CachedInode) -> ExclusiveDirectory | None:
        """A directory that is held, and was not recalled."""
        held = self.held.get(directory.node)
        return held if held is not None and held.is_valid else None

    def concern(self, file: CachedInode) -> bool:
        """Whether its attributes depend on what was not told."""
        held = self.held.get(file.node)
        touched = file.node in self.touched or held in self._touching
        of_names = held is not None and (bool(held.untold) or touched)
        return of_names or file.node in self.files

    @property
    def are_any(self) -> bool:
        """Whether the server does not know of all."""
        return bool(self.untold or self.touched or self._touching)

    @property
    def first(self) -> int:
        """The number of the oldest that was not told; 0 if there is none."""
        return next(iter(self.untold), 0)

    @property
    def last(self) -> int:
        """The same of the newest."""
        return next(reversed(self.untold), 0)

    def make(
        self,
        held: ExclusiveDirectory,
        spare: PreallocatedFile,
        file: CachedInode,
        name: bytes,
        mode: int,
        time: int,
    ) -> PendingFile:
        """This name now stands for a file that was made of the ``spare`` one."""
        made = PendingFile(next(self._serials), held, name, file, spare, mode, time)
        held.names.add(name)
        held.untold[name] = self.untold[made.serial] = self.files[file.node] = made
        return made

    def unmake(self, directory: CachedInode, name: bytes) -> PendingFile | None:
        """Take away a name that nobody was told, of a file that nobody has open; None if that is not so."""
        held = self.of(directory)
        made = None if held is None else held.untold.get(name)
        if held is None or made is None or made.serial <= self._begun:
            return None
        if made.file.opens or not made.closed:  # it lives on, and must be on the device what it is here
            return None
        self._settled(made)
        held.names.discard(name)
        self._loose[made.file.node] = made
        self.touched[directory.node] = held
        return made

    def _settled(self, made: PendingFile) -> None:
        del self.untold[made.serial], self.files[made.file.node], made.directory.untold[made.name]

    def take_touched(self) -> list[ExclusiveDirectory]:
        """Directories of which the server is to be told that they were changed, before telling ends."""
        touched = list(self.touched.values())[:MOST]
        for held in touched:
            del self.touched[held.file.node]
        self._touching = touched
        return touched

    def begin_telling(self, upto: int | None = None) -> list[PendingFile]:
        """The next that are to be told, in their order; nobody else may tell any until it ends. However that
        ends, the server may have them from now on.
        """
        batch = [
            made for made in itertools.islice(self.untold.values(), MOST) if not upto or made.serial <= upto
        ]
        self._begun = max(self._begun, batch[-1].serial if batch else 0)
        return batch

    def end_telling(self, told: Iterable[PendingFile]) -> None:
        """These are known to the server now; what else was being told, may be."""
        self._touching = []
        for made in told:
            self._settled(made)

    def lose(self, made: PendingFile) -> None:
        """The server will not have this name."""
        self._settled(made)
        made.directory.names.discard(made.name)

    def close(self, file: CachedInode, handle: int) -> bool:
        """This handle of the server's was closed here; whether it must not be closed there yet."""
        made = self.files.get(file.node) or self._loose.get(file.node)
        if made is None or made.spare.handle != handle:
            return False
        made.closed = True
        return True

    def spoil(self, file: CachedInode) -> PendingFile | None:
        """A file that has lost its name is changed: no other can be made of it. None if none could."""
        return self._loose.pop(file.node, None)

    def reuse(self, file: CachedInode) -> PendingFile | None:
        """A file that has lost its name is known to nobody any more; None if no other can be made of it."""
        made = self._loose.pop(file.node, None)
        if made is not None and made.closed and self.held.get(made.directory.file.node) is made.directory:
            made.directory.spares.append(made.spare)
        return made
