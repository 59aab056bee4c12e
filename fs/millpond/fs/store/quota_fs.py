# SPDX-License-Identifier: Apache-2.0
"""Edge (threads): a backing file system that takes no more space than a quota lets it.

The quota's count is right about the changes that are made here. Changes by other processes in the same
directory are seen when its files are counted anew.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.store.create import Announce
from millpond.fs.store.descriptors import InodeRef
from millpond.fs.store.extended import BackingExtended
from millpond.fs.store.identity import Key, key_of
from millpond.fs.store.quota import Quota, Reservation, drifted, growth
from millpond.fs.vfs.inode_api import Buffer, CachedAttributes, FoundEntry, Node, SetAttr, one_name
from millpond.fs.vfs.path_api import Attributes, Handle, Owner, Statistics

COUNT_SECONDS = 60.0
_PLACE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_PAUSE_PER_COUNT = 20.0  # seconds of pause for each second that a count takes
_QUIET_TRIES, _QUIET_SECONDS = 200, 0.005
_TAKES_NOTHING = 0x02 | 0x08  # fallocate(2): punch a hole, collapse a range
_ONLY_MOVES = 0x20  # insert a range
Usage = tuple[int, int]


class QuotaFs(BackingFs):
    """BackingFs of at most ``limit`` bytes. ``count`` returns how many bytes the files take and how many
    there are.
    """

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
        self.extended = BackingExtended(self.pinned, self.is_public, self._charging)
        self._count = count
        self._quota_lock = threading.Lock()
        self._counting = threading.Lock()
        self._extent = (self.quota.used, self.quota.used)
        self._files_open: dict[Key, int] = {}
        self._unnamed: set[Key] = set()

    def statfs(self) -> Statistics:
        """Return how full the quota is, or the file system if that is fuller."""
        below = super().statfs()
        with self._quota_lock:
            return self.quota.clipped(below)

    def _stat(self, descriptor: int) -> Attributes:
        return self.identity.attributes(os.fstat(descriptor))

    def _commit(self, begun: Reservation, blocks: int, files: int = 0) -> None:
        """Commit a change; with the quota lock."""
        self.quota.commit(begun, blocks, files)
        low, high = self._extent
        self._extent = min(low, self.quota.used), max(high, self.quota.used)

    @contextlib.contextmanager
    def _charging(self, descriptor: int, most: Callable[[Attributes], int] | None) -> Iterator[None]:
        """Charge a change of an open file to the quota: the ``most`` bytes that it can take, or None for one
        that takes none and is never refused.
        """
        with self._quota_lock:
            before = self._stat(descriptor)
            if most is None:
                begun = self.quota.watch(before.inode, before.blocks)
            else:
                begun = self.quota.reserve(before.inode, before.blocks, most(before))
        try:
            yield
        finally:
            with self._quota_lock:
                self._commit(begun, self._stat(descriptor).blocks)

    @contextlib.contextmanager
    def _adding_name(self, parent: Node, more: int) -> Iterator[list[int]]:
        """Charge a new name in a directory, which may grow for it, and ``more`` files. The block appends the
        descriptors of new files that are not open elsewhere yet to the list.
        """
        made: list[int] = []
        with self.pinned(parent) as directory:
            with self._charging(directory, lambda at: at.block_size * (1 + more)):
                yield made
            for place in made:
                with self._quota_lock:
                    after = self._stat(place)
                    self._commit(self.quota.watch(after.inode, 0), after.blocks, 1)

    @contextlib.contextmanager
    def _removing(self, parent: Node, name: bytes) -> Iterator[None]:
        """Charge the removal of a name, perhaps the file's last, if there is such a file."""
        with self.pinned(parent) as directory:
            try:
                place = os.open(one_name(name), _PLACE, dir_fd=directory)
            except OSError:
                yield
                return
            try:
                with self._charging(directory, None), self._in_use(place):
                    yield
            finally:
                os.close(place)

    def setattr(self, node: Node, changes: SetAttr, handle: Handle | None = None) -> CachedAttributes:
        """Set attributes."""
        if changes.size is None:
            return super().setattr(node, changes, handle)
        with self.pinned(node) as file:
            most = None if changes.size < self._stat(file).size else _nothing
            with self._charging(file, most):
                return super().setattr(node, changes, handle)

    def mknod(self, parent: Node, name: bytes, mode: int, rdev: int, owner: Owner | None) -> FoundEntry:
        """Make a file that is neither a directory nor a symbolic link."""
        with self._adding_name(parent, 0) as made:
            found = super().mknod(parent, name, mode, rdev, owner)
            made.append(self._ref(found.node).descriptor)
        return found

    def mkdir(self, parent: Node, name: bytes, mode: int, owner: Owner | None) -> FoundEntry:
        """Make a directory."""
        with self._adding_name(parent, 1) as made:
            found = super().mkdir(parent, name, mode, owner)
            made.append(self._ref(found.node).descriptor)
        return found

    def symlink(self, parent: Node, name: bytes, target: bytes, owner: Owner | None) -> FoundEntry:
        """Make a symbolic link."""
        with self._adding_name(parent, 1) as made:
            found = super().symlink(parent, name, target, owner)
            made.append(self._ref(found.node).descriptor)
        return found

    def link(self, node: Node, parent: Node, name: bytes) -> FoundEntry:
        """Give a file another name."""
        with self.pinned(node) as file, self._in_use(file), self._adding_name(parent, 0):
            return super().link(node, parent, name)

    def unlink(self, parent: Node, name: bytes) -> None:
        """Remove a name of a file."""
        with self._removing(parent, name):
            super().unlink(parent, name)

    def rmdir(self, parent: Node, name: bytes) -> None:
        """Remove an empty directory."""
        with self._removing(parent, name):
            super().rmdir(parent, name)

    def rename(self, parent: Node, name: bytes, new_parent: Node, new_name: bytes, flags: int = 0) -> None:
        """Move a name. Never refused: many programs replace a file that way."""
        with (
            self._removing(new_parent, new_name),
            self.pinned(new_parent) as directory,
            self._charging(directory, None),
        ):
            super().rename(parent, name, new_parent, new_name, flags)

    def create(
        self,
        parent: Node,
        name: bytes,
        flags: int,
        mode: int,
        owner: Owner | None,
        announce: Announce | None = None,
    ) -> tuple[FoundEntry, Handle]:
        """Make and open a regular file."""
        with self._adding_name(parent, 0) as made:
            found, handle = super().create(parent, name, flags, mode, owner, announce)
            made.append(self._ref(found.node).descriptor)
        return found, handle

    def open(self, node: Node, flags: int) -> Handle:
        """Open a regular file."""
        if not flags & os.O_TRUNC:
            return super().open(node, flags)
        with self.pinned(node) as file, self._charging(file, None):
            return super().open(node, flags)

    @contextlib.contextmanager
    def _in_use(self, file: int) -> Iterator[None]:
        """Count a file as in use while a name of it is added or removed, whatever other threads do."""
        self._begin_use(file)
        try:
            yield
        finally:
            self._end_use(file)

    def _begin_use(self, descriptor: int) -> None:
        with self._quota_lock:
            status = os.fstat(descriptor)
            known = self._files_open.get(key_of(status), 0)
            if not known:
                self._count_unnamed(status)
            self._files_open[key_of(status)] = known + 1

    def _count_unnamed(self, status: os.stat_result) -> None:
        """Count a file without a name that no handle has open, unless it is counted already; with the quota
        lock.
        """
        if not status.st_nlink and key_of(status) not in self._unnamed:
            self._unnamed.add(key_of(status))
            self._commit(self.quota.watch(self.identity.number(key_of(status)), 0), status.st_blocks, 1)

    def _opened(self, descriptor: int, directory: Node | None = None) -> Handle:
        self._begin_use(descriptor)
        return super()._opened(descriptor, directory)

    def release(self, handle: Handle) -> None:
        """Close the file behind the handle."""
        with self._opened_file(handle) as file:
            self._end_use(file)
            super().release(handle)

    def _end_use(self, descriptor: int) -> None:
        with self._quota_lock:
            status = os.fstat(descriptor)
            key = key_of(status)
            self._files_open[key] -= 1
            if not self._files_open[key]:
                del self._files_open[key]
            self._used(status)

    def _used(self, status: os.stat_result) -> None:
        """Note one use less of a file, or its dropped node; with the quota lock. Without a name the file
        counts as long as anything keeps it on the flash.
        """
        key = key_of(status)
        if status.st_nlink:
            self._unnamed.discard(key)
        elif key in self._files_open or key in self._nodes:
            self._unnamed.add(key)
        else:
            self._unnamed.discard(key)
            self._commit(self.quota.watch(self.identity.number(key_of(status)), status.st_blocks), 0, -1)

    def _ref_added(self, descriptor: int) -> None:
        """Count a file that has no name: its last one may have been removed since the lookup, or it never had
        one.
        """
        if not os.fstat(descriptor).st_nlink:
            with self._quota_lock:
                status = os.fstat(descriptor)
                if key_of(status) not in self._files_open:
                    self._count_unnamed(status)

    def _ref_dropped(self, node: Node, place: InodeRef) -> None:
        with self._quota_lock:
            super()._ref_dropped(node, place)
            if place.key in self._unnamed:  # others may never have been counted: the device removed them
                self._used(os.fstat(place.descriptor))

    def write(self, handle: Handle, data: Buffer, offset: int, *, append: bool = False) -> int:
        """Write at ``offset``, or at the file's end. Raises OSError: ENOSPC, with nothing written."""

        def most(before: Attributes) -> int:
            return growth(before, before.size if append else offset, len(data))

        with self._opened_file(handle) as file, self._charging(file, most):
            return super().write(handle, data, offset, append=append)

    def allocate(self, handle: Handle, mode: int, offset: int, length: int) -> None:
        """Allocate or free a range of an open file, as fallocate(2) does."""

        def most(before: Attributes) -> int:
            return 0 if mode & _ONLY_MOVES else growth(before, offset, length)

        taken = None if mode & _TAKES_NOTHING else most
        with self._opened_file(handle) as file, self._charging(file, taken):
            super().allocate(handle, mode, offset, length)

    def recount(self) -> Usage | None:
        """Count the files. Returns by how many bytes and files the quota was wrong, as far as that is
        certain; None if too much is going on.
        """
        with self._counting:
            if not self._when_quiet(self._start_extent):
                return None
            files = self.quota.files
            named, removed = self._count(), self._removed_keys()
            wrong = [0, 0]

            def end() -> None:
                nameless = self._unnamed_usage(removed)
                wrong[0] = drifted(named[0] + nameless[0], *self._extent)
                wrong[1] = drifted(named[1] + nameless[1], *sorted((files, self.quota.files)))
                self.quota.recount(self.quota.used + wrong[0], self.quota.files + wrong[1])

            return (wrong[0], wrong[1]) if self._when_quiet(end) else None

    def _start_extent(self) -> None:
        self._extent = (self.quota.used, self.quota.used)

    def _removed_keys(self) -> set[Key]:
        """Return the keys of nodes without a name, whichever process removed it: there may be too many to
        look at with the quota lock.
        """
        with self._lock:
            places = list(self._refs.values())
        found = set()
        for place in places:
            with contextlib.suppress(OSError):  # forgotten meanwhile
                if not os.fstat(place.descriptor).st_nlink:
                    found.add(place.key)
        return found

    def _unnamed_usage(self, removed: set[Key]) -> Usage:
        """Return the use of the files without a name that are open or have a node, which a walk of the tree
        does not find; with both locks.
        """
        nodes = [self._nodes[key] for key in removed | self._unnamed if key in self._nodes]
        descriptors = [self._refs[node].descriptor for node in nodes]
        descriptors += [file.descriptor for file in list(self._open.values())]
        found = {}
        for descriptor in descriptors:
            status = os.fstat(descriptor)
            if not status.st_nlink:
                found[key_of(status)] = status.st_blocks * 512
        self._unnamed = set(found)
        return sum(found.values()), len(found)

    def _when_quiet(self, action: Callable[[], None]) -> bool:
        """Run the action while no change is under way, with the locks of the descriptors and of the quota;
        False if there is no such moment.
        """
        for _ in range(_QUIET_TRIES):
            with self._lock, self._quota_lock:
                if self.quota.quiet:
                    action()
                    return True
            time.sleep(_QUIET_SECONDS)
        return False

    def keep_counting(self, seconds: float = COUNT_SECONDS) -> None:
        """Recount every ``seconds``, in a thread, until the process ends; less often if a count takes long.
        The thread has no lower priority: preempted with the interpreter's lock, it would hold up those that
        serve.
        """

        def count() -> None:
            pause = seconds
            while True:
                time.sleep(pause)
                begun = time.monotonic()
                with contextlib.suppress(OSError):  # directories are moved all the time
                    self.recount()
                pause = max(seconds, _PAUSE_PER_COUNT * (time.monotonic() - begun))

        threading.Thread(target=count, name="counting", daemon=True).start()


def _nothing(_before: Attributes) -> int:
    return 0
