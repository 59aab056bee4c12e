"""Edge (threads): a Tree over a directory that takes no more space than a quota lets it.

The quota's books are right about what is done here. What others write to the same directory is seen when its
files are counted anew.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

from millpond.fs.store.backing_fs import BackingFs, InodeRef, Key, key_of
from millpond.fs.store.quota import Quota, Reservation, drifted, growth
from millpond.fs.vfs.inode_api import Buffer, CachedAttributes, FoundEntry, Node, SetAttr, one_name
from millpond.fs.vfs.path_api import Attributes, Handle, Owner, Statistics, attributes

COUNT_SECONDS = 60.0
_PLACE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_LOWEST_PRIORITY = 19
_QUIET_TRIES, _QUIET_SECONDS = 200, 0.005
_TAKES_NOTHING = 0x02 | 0x08  # fallocate(2): punch a hole, collapse a range
_ONLY_MOVES = 0x20  # insert a range
Usage = tuple[int, int]


class QuotaFs(BackingFs):
    """``limit`` bytes at most. ``count`` tells how many bytes the files take and how many there are."""

    def __init__(
        self,
        root: int,
        limit: int,
        count: Callable[[], Usage],
        *,
        chown_new: bool = False,
        public: bytes | None = None,
    ) -> None:
        super().__init__(root, chown_new=chown_new, public=public)
        self.quota = Quota(limit, *count())
        self._count = count
        self._books = threading.Lock()
        self._counting = threading.Lock()
        self._extent = (self.quota.used, self.quota.used)
        self._inodes_open: dict[int, int] = {}
        self._nameless: set[Key] = set()
        self._name_size = 0

    def statfs(self) -> Statistics:
        """How full the quota is, or the file system if that is fuller."""
        below = super().statfs()
        with self._books:
            return self.quota.clipped(below)

    def _stat(self, descriptor: int) -> Attributes:
        return attributes(os.fstat(descriptor))

    def _settle(self, begun: Reservation, blocks: int, files: int = 0) -> None:
        """With the books."""
        self.quota.settle(begun, blocks, files)
        low, high = self._extent
        self._extent = min(low, self.quota.used), max(high, self.quota.used)

    @contextlib.contextmanager
    def _changing(self, descriptor: int, most: Callable[[Attributes], int] | None) -> Iterator[None]:
        """Around a change of an open file, that takes the ``most`` bytes, or none and is never refused."""
        with self._books:
            before = self._stat(descriptor)
            if most is None:
                begun = self.quota.watch(before.inode, before.blocks)
            else:
                begun = self.quota.reserve(before.inode, before.blocks, most(before))
        try:
            yield
        finally:
            with self._books:
                self._settle(begun, self._blocks(descriptor, before))

    def _blocks(self, descriptor: int, before: Attributes) -> int:
        """Those of a file now; of one that a client has closed meanwhile, as before, until it is counted."""
        try:
            now = self._stat(descriptor)
        except OSError:
            return before.blocks
        return now.blocks if now.inode == before.inode else before.blocks

    @contextlib.contextmanager
    def _naming(self, parent: Node, more: int) -> Iterator[list[int]]:
        """Around a new name in a directory, which may grow for it, and ``more`` files. What is put in the
        list are the places of new files, that are not open elsewhere yet.
        """
        made: list[int] = []
        with self._held(parent) as directory:
            with self._changing(directory, lambda at: at.block_size * (1 + more)):
                yield made
            for place in made:
                with self._books:
                    after = self._stat(place)
                    self._settle(self.quota.watch(after.inode, 0), after.blocks, 1)

    @contextlib.contextmanager
    def _removing(self, parent: Node, name: bytes) -> Iterator[None]:
        """Around what takes this name from a file, if there is one: its last, perhaps."""
        with self._held(parent) as directory:
            try:
                place = os.open(one_name(name), _PLACE, dir_fd=directory)
            except OSError:
                yield
                return
            try:
                with self._changing(directory, None), self._counted(place):
                    yield
            finally:
                os.close(place)

    def setattr(self, node: Node, changes: SetAttr, handle: Handle | None = None) -> CachedAttributes:
        """Change attributes."""
        if changes.size is None:
            return super().setattr(node, changes, handle)
        size = changes.size
        with self._changing(self._at(node), None if size < self._stat(self._at(node)).size else _nothing):
            return super().setattr(node, changes, handle)

    def mknod(self, parent: Node, name: bytes, mode: int, rdev: int, owner: Owner | None) -> FoundEntry:
        """Make a file that is neither a directory nor a symbolic link."""
        with self._naming(parent, 0) as made:
            found = super().mknod(parent, name, mode, rdev, owner)
            made.append(self._at(found.node))
        return found

    def mkdir(self, parent: Node, name: bytes, mode: int, owner: Owner | None) -> FoundEntry:
        """Make a directory."""
        with self._naming(parent, 1) as made:
            found = super().mkdir(parent, name, mode, owner)
            made.append(self._at(found.node))
        return found

    def symlink(self, parent: Node, name: bytes, target: bytes, owner: Owner | None) -> FoundEntry:
        """Make a symbolic link."""
        with self._naming(parent, 1) as made:
            found = super().symlink(parent, name, target, owner)
            made.append(self._at(found.node))
        return found

    def link(self, node: Node, parent: Node, name: bytes) -> FoundEntry:
        """Give a file another name."""
        with self._held(node) as file, self._counted(file), self._naming(parent, 0):
            return super().link(node, parent, name)

    def hold_names(self, parent: Node, count: int) -> int:
        """Of the quota a block for each, by which its directory may grow; others see that much less room."""
        self._name_size = self._name_size or super().statfs().fragment_size
        with self._books:
            count = min(count, self.quota.left // self._name_size)
            self.quota.hold(count * self._name_size)
        held = 0
        try:
            held = super().hold_names(parent, count)
        finally:
            with self._books:
                self.quota.let_go((count - held) * self._name_size)
        return held

    def let_go_names(self, count: int) -> None:
        """So many were given, or will not be."""
        super().let_go_names(count)
        with self._books:
            self.quota.let_go(count * self._name_size)

    def give_name(self, node: Node, parent: Node, name: bytes, mode: int, time: int) -> None:
        """To a file that was prepared, and counts since. Never refused: the room for it is held."""
        with (
            self._held(node) as file,
            self._counted(file),
            self._held(parent) as directory,
            self._changing(directory, None),
        ):
            super().give_name(node, parent, name, mode, time)

    def unlink(self, parent: Node, name: bytes) -> None:
        """Remove a name of a file."""
        with self._removing(parent, name):
            super().unlink(parent, name)

    def rmdir(self, parent: Node, name: bytes) -> None:
        """Remove an empty directory."""
        with self._removing(parent, name):
            super().rmdir(parent, name)

    def rename(self, parent: Node, name: bytes, new_parent: Node, new_name: bytes, flags: int = 0) -> None:
        """Move a name. Never refused: it is how many programs replace a file."""
        with self._removing(new_parent, new_name), self._changing(self._at(new_parent), None):
            super().rename(parent, name, new_parent, new_name, flags)

    def create(
        self, parent: Node, name: bytes, flags: int, mode: int, owner: Owner | None
    ) -> tuple[FoundEntry, Handle]:
        """Make and open a regular file."""
        with self._naming(parent, 0) as made:
            found, handle = super().create(parent, name, flags, mode, owner)
            made.append(self._at(found.node))
        return found, handle

    def open(self, node: Node, flags: int) -> Handle:
        """Open a regular file."""
        if not flags & os.O_TRUNC:
            return super().open(node, flags)
        with self._changing(self._at(node), None):
            return super().open(node, flags)

    @contextlib.contextmanager
    def _counted(self, file: int) -> Iterator[None]:
        """Around what gives a file a name, or takes one from it: meanwhile it counts, whatever others do."""
        self._begin_use(file)
        try:
            yield
        finally:
            self._end_use(file)

    def _begin_use(self, descriptor: int) -> None:
        with self._books:
            status = os.fstat(descriptor)
            known = self._inodes_open.get(status.st_ino, 0)
            if not known:
                self._count_nameless(status)
            self._inodes_open[status.st_ino] = known + 1

    def _count_nameless(self, status: os.stat_result) -> None:
        """With the books: of a file that nobody has open. One without a name counts no longer, or not yet,
        unless it is noted.
        """
        if not status.st_nlink and key_of(status) not in self._nameless:
            self._nameless.add(key_of(status))
            self._settle(self.quota.watch(status.st_ino, 0), status.st_blocks, 1)

    def _opened(self, descriptor: int) -> Handle:
        self._begin_use(descriptor)
        return super()._opened(descriptor)

    def release(self, handle: Handle) -> None:
        """Close the file behind the handle."""
        self._end_use(self.descriptor(handle))
        super().release(handle)

    def _end_use(self, descriptor: int) -> None:
        with self._books:
            status = os.fstat(descriptor)
            self._inodes_open[status.st_ino] -= 1
            if not self._inodes_open[status.st_ino]:
                del self._inodes_open[status.st_ino]
            self._used(status)

    def _used(self, status: os.stat_result) -> None:
        """With the books: it is open once less, or has no number any more. Without a name it counts as long
        as there is anything that keeps it on the flash.
        """
        key = key_of(status)
        if status.st_nlink:
            self._nameless.discard(key)
        elif status.st_ino in self._inodes_open or key in self._nodes:
            self._nameless.add(key)
        else:
            self._nameless.discard(key)
            self._settle(self.quota.watch(status.st_ino, status.st_blocks), 0, -1)

    def _placed(self, descriptor: int) -> None:
        """Its last name may have been removed since it was found; or it never had one."""
        if not os.fstat(descriptor).st_nlink:
            with self._books:
                status = os.fstat(descriptor)
                if status.st_ino not in self._inodes_open:
                    self._count_nameless(status)

    def _drop(self, node: Node, place: InodeRef) -> None:
        with self._books:
            super()._drop(node, place)
            if place.key in self._nameless:  # others were never counted, perhaps, if the device removed them
                self._used(os.fstat(place.descriptor))

    def write(self, handle: Handle, data: Buffer, offset: int, *, append: bool = False) -> int:
        """Write at ``offset``, or at the file's end. Raises OSError: ENOSPC, with nothing written."""

        def most(before: Attributes) -> int:
            return growth(before, before.size if append else offset, len(data))

        with self._changing(self.descriptor(handle), most):
            return super().write(handle, data, offset, append=append)

    def allocate(self, handle: Handle, mode: int, offset: int, length: int) -> None:
        """As fallocate(2)."""

        def most(before: Attributes) -> int:
            return 0 if mode & _ONLY_MOVES else growth(before, offset, length)

        with self._changing(self.descriptor(handle), None if mode & _TAKES_NOTHING else most):
            super().allocate(handle, mode, offset, length)

    def recount(self) -> Usage | None:
        """Count what is there; by how many bytes and files the books were wrong, as far as that is certain.
        None if too much is going on.
        """
        with self._counting:
            if not self._when_quiet(self._begin_counting):
                return None
            files = self.quota.files
            named, removed = self._count(), self._removed()
            wrong = [0, 0]

            def end() -> None:
                nameless = self._without_name(removed)
                wrong[0] = drifted(named[0] + nameless[0], *self._extent)
                wrong[1] = drifted(named[1] + nameless[1], *sorted((files, self.quota.files)))
                self.quota.recount(self.quota.used + wrong[0], self.quota.files + wrong[1])

            return (wrong[0], wrong[1]) if self._when_quiet(end) else None

    def _begin_counting(self) -> None:
        self._extent = (self.quota.used, self.quota.used)

    def _removed(self) -> set[Key]:
        """Those with a number that have no name, whoever took it: there may be too many to look at with the
        books.
        """
        with self._lock:
            places = list(self._places.values())
        found = set()
        for place in places:
            with contextlib.suppress(OSError):  # it was forgotten meanwhile
                if not os.fstat(place.descriptor).st_nlink:
                    found.add(place.key)
        return found

    def _without_name(self, removed: set[Key]) -> Usage:
        """The files without a name that are open or have a number, which nobody finds who counts; with the
        books.
        """
        nodes = [self._nodes[key] for key in removed | self._nameless if key in self._nodes]
        descriptors = [self._places[node].descriptor for node in nodes]
        descriptors += [file.descriptor for file in list(self._open.values())]
        found = {}
        for descriptor in descriptors:
            with contextlib.suppress(OSError):  # it was closed meanwhile
                status = os.fstat(descriptor)
                if not status.st_nlink:
                    found[key_of(status)] = status.st_blocks * 512
        self._nameless = set(found)
        return sum(found.values()), len(found)

    def _when_quiet(self, action: Callable[[], None]) -> bool:
        """Do it, with the books, while nothing is being changed; False if that is never so."""
        for _ in range(_QUIET_TRIES):
            with self._books:
                if self.quota.quiet:
                    action()
                    return True
            time.sleep(_QUIET_SECONDS)
        return False

    def keep_counting(self, seconds: float = COUNT_SECONDS) -> None:
        """Count every so often, in a thread that gives way to all others, until the process ends."""

        def count() -> None:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
            while True:
                time.sleep(seconds)
                with contextlib.suppress(OSError):  # directories are moved all the time; the next one tells
                    self.recount()

        threading.Thread(target=count, name="counting", daemon=True).start()


def _nothing(_before: Attributes) -> int:
    return 0
