# SPDX-License-Identifier: Apache-2.0
"""Pure: tables of a client's exclusive directories, their names, and the creates that are not flushed yet.

A name that is removed before it was flushed leaves nothing: its preallocated file is used again. A name that
the server may already have is never removed locally.
"""

from __future__ import annotations

import errno
import itertools
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from millpond.fs.client.cache.inode import CachedInode
from millpond.fs.proto.async_create import MAX_BATCH, Contents, NameUpdate, ReplayedName
from millpond.fs.vfs.inode_api import Node
from millpond.fs.vfs.path_api import MAX_TRANSFER, Attributes, Handle, os_error

FIRST = 2
"""The number of files preallocated with the grant; then twice as many each time."""
_MOST_FAILURES = 3


@dataclass(frozen=True, slots=True)
class PreallocatedFile:
    """A nameless file that the server has created: its node and open handle there, its inode number, the
    grant of its attributes, and the bytes of its contents that there is room for.
    """

    node: int
    handle: int
    inode: int
    granted: int
    room: int = 0


@dataclass(eq=False, slots=True)
class ExclusiveDirectory:
    """An exclusive directory delegation: the directory's node ``remote`` on the server under the session
    ``verifier``, the grant, and all names.

    ``clock_offset`` is by how many nanoseconds the device's clock is ahead of the client's. ``estimated`` is
    when the directory's times were last set locally (seconds of the lease clock), 0 if they are the device's.
    ``gathered`` is the number of files made under it whose data is not sent yet. ``drops`` and
    ``name_doubts`` are the file's counters at the time of the grant.
    """

    file: CachedInode
    remote: int
    granted: int
    verifier: int
    names: set[bytes]
    attributes: Attributes
    clock_offset: int
    used: float
    preallocated: list[PreallocatedFile] = field(default_factory=list)
    pending: dict[bytes, PendingFile] = field(default_factory=dict)
    next_size: int = 2 * FIRST
    estimated: float = 0.0
    gathered: int = 0
    drops: int = field(init=False)
    name_doubts: int = field(init=False)

    def __post_init__(self) -> None:
        self.drops, self.name_doubts = self.file.drops, self.file.name_doubts

    @property
    def is_valid(self) -> bool:
        """Whether the delegation was not recalled and all names of the directory are known."""
        return self.drops == self.file.drops and self.name_doubts == self.file.name_doubts

    @property
    def is_needed(self) -> bool:
        """Whether names or data are to be flushed under it."""
        return bool(self.pending) or self.gathered > 0

    def add_preallocated(
        self, preallocated: Iterable[PreallocatedFile], attributes: Attributes, clock_offset: int
    ) -> None:
        """Add preallocated files, with the attributes that new files get."""
        self.preallocated += preallocated
        self.attributes, self.clock_offset = attributes, clock_offset

    def next_count(self) -> int:
        """Return how many files to preallocate with the next request: twice as many each time."""
        count, self.next_size = self.next_size, min(2 * self.next_size, MAX_BATCH)
        return count

    def attributes_of(self, spare: PreallocatedFile, mode: int, time: int, links: int = 1) -> Attributes:
        """Return the attributes of a file that is created from a preallocated one with these permissions."""
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
    """A file whose name is not flushed yet. ``closed``: its handle on the server is of use only if the
    preallocated file is used again. ``contents`` is all that was written to it, if a descriptor of it was
    closed, or a program looked at it, and there is room for that on the server; ``time``, ``accessed`` and
    ``changed`` are its times then, and ``found`` its attributes as the server has them since, and
    ``InodeCache.changes`` of the request. ``sent``: the server may have the name.
    """

    serial: int
    directory: ExclusiveDirectory
    name: bytes
    file: CachedInode
    spare: PreallocatedFile
    mode: int
    time: int
    closed: bool = False
    contents: bytes = b""
    accessed: int = 0
    changed: int = 0
    found: tuple[Attributes, int] | None = None
    sent: bool = False

    def name_update(self) -> NameUpdate:
        """Return the message that tells the server of this name."""
        into, node = self.directory, self.spare.node
        return NameUpdate(self.serial, into.remote, into.granted, node, self.name, self.mode, self.time)

    def replayed(self) -> ReplayedName:
        """Return the message that tells another server of this file."""
        times = self.time, self.accessed if self.contents else self.time
        return ReplayedName(self.name, self.mode, *times, len(self.contents), self.sent)

    def contents_update(self) -> Contents:
        """Return the message that tells the server what is in this file."""
        return Contents(self.serial, len(self.contents), self.accessed, self.changed)


@dataclass(frozen=True, slots=True)
class Created:
    """A file that was created and opened locally. The kernel's lookup of it is counted."""

    file: CachedInode
    attributes: Attributes
    handle: Handle


@dataclass(frozen=True, slots=True)
class Removed:
    """A file whose last name was removed locally and that no program has open."""

    file: CachedInode
    attributes: Attributes


class FlushFailures:
    """Counts failed flushes in a row while the lease is valid, of a server that may be silent for ``silence``
    seconds.
    """

    def __init__(self, silence: float) -> None:
        self._silence, self._number, self._since = silence, 0, 0.0

    def count(self, now: float, lease_end: float) -> bool:
        """Count a failed flush; return whether to give the names up, so that no client waits forever."""
        self._number = self._number + 1 if lease_end > now else 0
        if self._number == 1:
            self._since = now
        return self.are_hopeless(now)

    def are_hopeless(self, now: float) -> bool:
        """Return whether flushing has failed too often, for at least as long as the server may be silent: a
        refused connection fails at once.
        """
        return self._number > _MOST_FAILURES and now >= self._since + self._silence

    def end(self) -> None:
        """Begin to count anew, after a flush that has not failed."""
        self._number = 0


def name_updates(batch: Sequence[PendingFile], verifier: int) -> tuple[NameUpdate, ...]:
    """Return the messages that tell the server of these names, to be sent now. Raises OSError: ESTALE if the
    server has lost their session, since ``verifier`` is another one.
    """
    if any(made.directory.verifier != verifier for made in batch):
        raise os_error(errno.ESTALE)
    for made in batch:
        made.sent = True
    return tuple(made.name_update() for made in batch)


class PendingNames:
    """The exclusive directories and pending names of one client. One thread may call at once."""

    def __init__(self) -> None:
        self.held: dict[Node, ExclusiveDirectory] = {}
        self.pending: dict[int, PendingFile] = {}
        self.files: dict[Node, PendingFile] = {}
        self.touched: dict[Node, ExclusiveDirectory] = {}
        self._touched_in_flight: list[ExclusiveDirectory] = []
        self._unlinked: dict[Node, PendingFile] = {}
        self._serials = itertools.count(1)
        self._flushed_upto = 0
        self.with_contents = 0
        """How many files with contents are pending."""

    def of(self, directory: CachedInode) -> ExclusiveDirectory | None:
        """Return the valid delegation of a directory, or None."""
        held = self.held.get(directory.node)
        return held if held is not None and held.is_valid else None

    def affect(self, file: CachedInode) -> bool:
        """Return whether a file's attributes depend on names that are not flushed."""
        held = self.held.get(file.node)
        touched = file.node in self.touched or held in self._touched_in_flight
        of_names = held is not None and (bool(held.pending) or touched)
        return of_names or file.node in self.files

    @property
    def are_any(self) -> bool:
        """Whether the server lacks any name or change of a directory."""
        return bool(self.pending or self.touched or self._touched_in_flight)

    @property
    def first(self) -> int:
        """The serial number of the oldest pending name; 0 if there is none."""
        return next(iter(self.pending), 0)

    @property
    def last(self) -> int:
        """The serial number of the newest pending name; 0 if there is none."""
        return next(reversed(self.pending), 0)

    def create(
        self,
        held: ExclusiveDirectory,
        spare: PreallocatedFile,
        file: CachedInode,
        name: bytes,
        mode: int,
        time: int,
    ) -> PendingFile:
        """Add a pending name for a file that is made of the preallocated ``spare``."""
        made = PendingFile(next(self._serials), held, name, file, spare, mode, time)
        held.names.add(name)
        held.pending[name] = self.pending[made.serial] = self.files[file.node] = made
        return made

    def may_change(self, made: PendingFile) -> bool:
        """Return whether the server cannot have this name yet, and its directory is still held."""
        held = made.directory
        return made.serial > self._flushed_upto and held.is_valid and self.held.get(held.file.node) is held

    def fill(self, made: PendingFile, contents: bytes) -> None:
        """Have a file's contents flushed with its name."""
        made.contents = contents
        self.with_contents += 1

    def empty(self, made: PendingFile) -> None:
        """Have a file's name flushed without contents: these will follow."""
        made.contents = b""
        self.with_contents -= 1

    def cancel(self, directory: CachedInode, name: bytes) -> PendingFile | None:
        """Remove a name that the server cannot have yet, of a file that is not open. Returns None if it
        cannot be removed locally.
        """
        held = self.of(directory)
        made = None if held is None else held.pending.get(name)
        if held is None or made is None or made.serial <= self._flushed_upto:
            return None
        if (
            made.file.local_opens or not made.closed
        ):  # the file lives on, so the server needs it as it is here
            return None
        self._remove(made)
        held.names.discard(name)
        self._unlinked[made.file.node] = made
        self.touched[directory.node] = held
        return made

    def _remove(self, made: PendingFile) -> None:
        self.with_contents -= bool(made.contents)
        del self.pending[made.serial], self.files[made.file.node], made.directory.pending[made.name]

    def take_touched(self) -> list[ExclusiveDirectory]:
        """Return directories with locally cancelled names, for the server to update their times, until the
        flush ends.
        """
        touched = list(self.touched.values())[:MAX_BATCH]
        for held in touched:
            del self.touched[held.file.node]
        self._touched_in_flight = touched
        return touched

    def begin_flush(self, upto: int | None = None) -> list[PendingFile]:
        """Return the next batch of pending names, in order, with contents that fit into one request; no other
        flush may run until ``end_flush``.

        The server may have these names from now on, however the flush ends.
        """
        batch: list[PendingFile] = []
        size = 0
        for made in itertools.islice(self.pending.values(), MAX_BATCH):
            size += len(made.contents)
            if (upto and made.serial > upto) or size > MAX_TRANSFER:
                break
            batch.append(made)
        self._flushed_upto = max(self._flushed_upto, batch[-1].serial if batch else 0)
        return batch

    def end_flush(self, flushed: Iterable[PendingFile]) -> None:
        """Remove the names that the server has now; the others stay pending."""
        self._touched_in_flight = []
        for made in flushed:
            self._remove(made)

    def lose(self, made: PendingFile) -> None:
        """Remove a name that the server has refused."""
        self._remove(made)
        made.directory.names.discard(made.name)

    def close(self, file: CachedInode, handle: int) -> bool:
        """Note that a handle of the server's was closed locally; return whether it must stay open on the
        server for now.
        """
        made = self.files.get(file.node) or self._unlinked.get(file.node)
        if made is None or made.spare.handle != handle:
            return False
        made.closed = True
        return True

    def forbid_reuse(self, file: CachedInode) -> PendingFile | None:
        """Return the cancelled create of a file and keep its preallocated file from being used again; None if
        there is none.
        """
        return self._unlinked.pop(file.node, None)

    def reuse(self, file: CachedInode) -> PendingFile | None:
        """Return the cancelled create of a file that the kernel has forgotten, and put its preallocated file
        back if possible; None if there is none.
        """
        made = self._unlinked.pop(file.node, None)
        if made is not None and made.closed and self.held.get(made.directory.file.node) is made.directory:
            made.directory.preallocated.append(made.spare)
        return made
