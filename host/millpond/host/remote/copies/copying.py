# SPDX-License-Identifier: Apache-2.0
"""Edge (volumes): copies files from one volume to another, whole or not at all, and resumes broken copies.

A file is written under a temporary name that contains the version of its source, put on the flash, and only
then renamed: a name stands for the old file or the new one, and the next copy uses the bytes that a broken
copy wrote. A file that cannot be copied does not stop the copy of others.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from operator import itemgetter
from types import TracebackType
from typing import Self

from millpond.fs.vfs.bulk_api import SMALL_BYTES
from millpond.fs.vfs.path_adapter import BulkPathAdapter, PathAdapter
from millpond.fs.vfs.path_api import MAX_TRANSFER, Attributes, Handle, os_error
from millpond.host.remote.copies import unfinished
from millpond.host.remote.copies.extended_attributes import carry
from millpond.host.remote.copies.listings import Listings, bounded, listed
from millpond.host.remote.copies.rules import CopyEnded, CopyRules
from millpond.host.remote.copies.small_copies import (
    Copied,
    CopyFailed,
    Item,
    SmallCopied,
    SmallCopies,
    naming,
)
from millpond.host.remote.copies.surplus import Surplus

_AT_ONCE = 16
"""Copies of one file, at the same time, to one place."""
_HOLE = bytes(MAX_TRANSFER)


class Copier:
    """Copies from the volume ``here``, which ``origin`` names, to the volume ``there``, by ``rules``.
    ``done`` counts; ``failures`` are those of single files. A context: at its end no request is under way.
    """

    def __init__(
        self,
        here: BulkPathAdapter,
        there: BulkPathAdapter,
        done: Copied,
        *,
        origin: str = "",
        rules: CopyRules | None = None,
    ) -> None:
        self._here, self._there, self._done = here, there, done
        self._origin, self._rules = origin, rules or CopyRules()
        self._mask = self._rules.mask
        self._surplus = Surplus(there)
        self._progress: Callable[[int], None] = lambda _count: None
        self._listings = Listings(there)
        self._existing: dict[str, Attributes] = {}
        self._listed: str | None = None
        self.failures: list[CopyFailed] = []
        self._lost: list[str] = []
        self._made: list[Item] = []
        self._names: dict[tuple[int, int], str] = {}
        self._other_names: list[tuple[Item, str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._listings.close()

    def plan(self, source: str, target: str, *, recursive: bool, name: str = "") -> list[Item]:
        """Return the items of a copy of ``source`` to ``target``: a directory before its contents, and of
        these the directories last. If ``target`` is a directory, the copy goes into it as ``name``, or under
        the source's name. Raises OSError: EISDIR for a directory if not ``recursive``, EINVAL for a target
        that holds the source, of which files were to be deleted.
        """
        with naming(self._here, source):
            found = self._here.getattr(source)
            if stat.S_ISDIR(found.mode) and not recursive:
                raise os_error(errno.EISDIR)
            if stat.S_ISREG(found.mode):
                with self._here.extended(source) as (extended, node), contextlib.suppress(OSError):
                    found = replace(found, bare=not extended.names(node))
        name_here = source.rpartition("/")[2]
        with naming(self._there, target):
            if is_directory(self._there, target):
                target = _joined(target, name or name_here)
            if self._rules.deletes and self._here.shown(source).startswith(f"{self._there.shown(target)}/"):
                told = "the source lies in it, and --delete would delete the source"
                raise CopyFailed(errno.EINVAL, told, self._there.shown(target))
        items = self._walk(Item(source, target, found))
        return list(bounded(items, self._here.shown(source), self._rules.found))

    def _go_on(self) -> None:
        """Raise CopyEnded once the copy is to end."""
        if self._rules.is_ended():
            raise CopyEnded

    def _walk(self, top: Item) -> Iterator[Item]:
        left = [top]
        while left:
            self._go_on()
            item = left.pop()
            yield item
            if not stat.S_ISDIR(item.attributes.mode):
                continue
            self._listings.add(item.target)
            directories = []
            for below in self._listed_below(item, top):
                if stat.S_ISDIR(below.attributes.mode):
                    directories.append(below)
                else:
                    yield below
            left += reversed(directories)

    def _listed_below(self, item: Item, top: Item) -> list[Item]:
        """Return the items of a directory. One below ``top`` that cannot be read is a failure of its own."""
        try:
            return self._below(item, top)
        except CopyFailed as error:
            if item is top or not error.is_of_one:
                raise
            self.failures.append(error)
            return []

    def _below(self, item: Item, top: Item) -> list[Item]:
        with naming(self._here, item.source):
            found = sorted(listed(self._here, item.source), key=itemgetter(0))
        inside = item.source[len(top.source) :].lstrip("/")
        wanted = [
            (name, known)
            for name, known in found
            if not self._rules.excluded.match(_joined(inside, name), stat.S_ISDIR(known.mode))
        ]
        if self._rules.deletes:
            self._surplus.expect(item.target, inside, (name for name, _ in wanted))
        return [Item(_joined(item.source, name), _joined(item.target, name), known) for name, known in wanted]

    def copy(self, items: Iterable[Item], progress: Callable[[int], None]) -> Iterator[Item]:
        """Copy the items of a plan, of a directory only itself, and call ``progress`` with bytes as they are
        copied. Yields those that are neither regular files, directories nor symbolic links. Raises OSError
        for the first that fails, after all others if it says nothing of them.
        """
        self._progress = progress
        with SmallCopies(self._here, self._there, self._mask) as small:
            for item in items:
                self._go_on()
                mode = item.attributes.mode
                with self._noted(self._there.shown(item.target)):
                    if stat.S_ISREG(mode):
                        self._add_file(item, small)
                    elif stat.S_ISDIR(mode):
                        self._directory(item, self._listings.next())
                    elif stat.S_ISLNK(mode):
                        self._symlink(item)
                    else:
                        yield item
                self._settle(small.finished())
            self._settle(small.all())
        self._complete()
        if self.failures:
            raise self.failures[0]
        self._delete()

    def _delete(self) -> None:
        """Delete what the source does not have, once all that it has was copied."""
        for path, attributes in self._surplus.found(self._rules.excluded):
            self._go_on()
            with self._noted(self._there.shown(path)), naming(self._there, path):
                self._done.deleted += self._surplus.remove(path, attributes)
        if self.failures:
            raise self.failures[0]

    def _complete(self) -> None:
        """Give files their other names, then the directories that were made their own modes and times."""
        for item, first in self._other_names:
            with self._noted(self._there.shown(item.target)):
                self._link(item, first)
        for item in reversed(self._made):
            with self._noted(self._there.shown(item.target)), naming(self._there, item.target):
                if not item.attributes.bare:
                    self._carry(item, item.target)
                self._set_mode_and_times(item, item.target)

    @contextlib.contextmanager
    def _noted(self, target: str) -> Iterator[None]:
        """Keep the failure of a single file for later."""
        try:
            yield
        except CopyFailed as error:
            if not error.is_of_one:
                raise
            if not self._is_lost(target):  # else it is said of the directory
                self.failures.append(error)
            self._lost.append(target)

    def _is_lost(self, target: str) -> bool:
        """Return whether a directory above ``target`` could not be made."""
        return any(target.startswith(f"{lost}/") for lost in self._lost)

    def _settle(self, results: Iterable[SmallCopied]) -> None:
        """Count small files that were copied. Those that have to be copied one by one are."""
        for result in results:
            self._done.files += len(result.copied)
            for item in result.copied:
                self._done.bytes += item.attributes.size
                self._progress(item.attributes.size)
            for item in result.left:
                with self._noted(self._there.shown(item.target)):
                    self._file(item)
            for failure in result.failures:
                with self._noted(str(failure.filename)):
                    raise failure

    def _directory(self, item: Item, existing: dict[str, Attributes] | None) -> None:
        """Make a directory unless it is there, and remember its contents."""
        self._existing, self._listed = existing or {}, item.target
        if existing is not None:
            self._surplus.there(item.target, existing)
            return
        with naming(self._there, item.target):
            try:
                self._made.append(item)
                self._there.mkdir(item.target, item.attributes.mode & self._mask | stat.S_IRWXU)
            except FileExistsError:
                self._made.pop()
                if not is_directory(self._there, item.target):  # else another process has just made it
                    raise

    def _known(self, item: Item) -> Attributes | None:
        """Return the attributes of the target, None if there is none."""
        folder, _, name = item.target.rpartition("/")
        if folder == self._listed:
            return self._existing.get(name)
        with naming(self._there, item.target):
            try:
                return self._there.getattr(item.target)
            except (FileNotFoundError, NotADirectoryError):
                return None

    def _add_file(self, item: Item, small: SmallCopies) -> None:
        wanted, known = item.attributes, self._known(item)
        if known and self._is_there(item, known):
            self._keep(item, known)
            self._done.unchanged += 1
            self._progress(0 if self._rules.checksum else wanted.size)
        elif known and stat.S_ISDIR(known.mode):
            raise CopyFailed(errno.EISDIR, os.strerror(errno.EISDIR), self._there.shown(item.target))
        elif wanted.links > 1 and (first := self._first_name(item)) != item.target:
            self._other_names.append((item, first))
        elif wanted.size <= SMALL_BYTES and wanted.bare:
            small.add(item)
        else:
            self._file(item)

    def _is_there(self, item: Item, known: Attributes) -> bool:
        """Return whether a file has its contents already: by size and time, or by all its bytes."""
        if not self._rules.checksum:
            return _looks_the_same(item.attributes, known)
        if not stat.S_ISREG(known.mode) or known.size != item.attributes.size:
            return False
        with naming(self._here, item.source):
            source = self._here.open(item.source, os.O_RDONLY)
        try:
            with naming(self._there, item.target), _opened(self._there, item.target) as target:
                same = self._same_bytes(item, source, target, known.size)
            if same < known.size:
                self._progress(-same)  # it is copied from its beginning
            return same == known.size
        finally:
            self._here.release(source)

    def _keep(self, item: Item, known: Attributes) -> None:
        """Give a file with the contents of its source the source's time, mode and extended attributes."""
        target, mode, now = item.target, item.attributes.mode & self._mask, stat.S_IMODE(known.mode)
        with naming(self._there, target):
            if not (item.attributes.bare and known.bare):
                if not now & stat.S_IWUSR:
                    now |= stat.S_IWUSR
                    self._there.chmod(target, now)
                self._carry(item, target)
            if known.mtime != item.attributes.mtime:
                self._there.utimens(target, item.attributes.atime, item.attributes.mtime)
            if now != mode:
                self._there.chmod(target, mode)

    def _first_name(self, item: Item) -> str:
        """Return the target of the first of an inode's names."""
        same = item.attributes.inode, item.attributes.ctime
        return self._names.setdefault(same, item.target)

    def _link(self, item: Item, first: str) -> None:
        """Give the copy of a file, at ``first``, a second name, as the source has."""
        with contextlib.ExitStack() as stack:
            name = self._unfinished(item, stack)
            try:
                if self._there.shown(first) in self._lost or self._is_lost(self._there.shown(first)):
                    raise os_error(errno.ENOENT)
                _remove(self._there, name)
                self._there.link(first, name)
                self._there.rename(name, item.target)
                _remove(self._there, name)  # it stays where both are names of one file already
            except OSError:  # such as too many names: then it is a file of its own
                self._file(item)
                return
        self._done.files += 1
        self._progress(item.attributes.size)

    def _symlink(self, item: Item) -> None:
        with contextlib.ExitStack() as stack:
            self._make_symlink(item, self._unfinished(item, stack))

    def _make_symlink(self, item: Item, name: str) -> None:
        known = self._known(item)
        with naming(self._here, item.source):
            wanted = self._here.readlink(item.source)
        with naming(self._there, item.target):
            if known and stat.S_ISLNK(known.mode) and self._there.readlink(item.target) == wanted:
                return
            _remove(self._there, name)
            self._there.symlink(wanted, name)
            self._there.rename(name, item.target)

    def _file(self, item: Item) -> None:
        with naming(self._here, item.source):
            source = self._here.open(item.source, os.O_RDONLY)
        try:
            with contextlib.ExitStack() as stack:
                name = self._unfinished(item, stack)
                self._write_as(name, item, source)
                self._clear(item)
        finally:
            self._here.release(source)

    def _write_as(self, name: str, item: Item, source: Handle) -> None:
        try:
            with naming(self._there, item.target):
                self._write_to(name, item, source)
                self._finish(item, name)
        except (CopyFailed, CopyEnded) as error:
            is_useless = error.is_of_one if isinstance(error, CopyFailed) else not self._rules.keeps
            if is_useless:  # no later copy goes on from there
                with contextlib.suppress(OSError):
                    self._there.unlink(name)
            raise

    def _clear(self, item: Item) -> None:
        """Remove what killed copies have left of this target."""
        folder, slash, name = item.target.rpartition("/")
        with contextlib.suppress(OSError):
            names = self._existing
            if folder != self._listed:
                names = dict(listed(self._there, folder))
            for left in unfinished.left_of(name, names):
                with unfinished.held(self._there.shown(f"{folder}{slash}{left}")) as is_left:
                    if is_left:
                        _remove(self._there, f"{folder}{slash}{left}")

    def _write_to(self, name: str, item: Item, source: Handle) -> None:
        target = self._there.open(name, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self._contents(item, source, target)
            self._there.fsync(target)
        finally:
            self._there.release(target)

    def _finish(self, item: Item, name: str) -> None:
        self._carry(item, name)  # while it may be written
        self._set_mode_and_times(item, name)
        self._there.rename(name, item.target)
        self._done.files += 1

    def _set_mode_and_times(self, item: Item, name: str) -> None:
        self._there.chmod(name, item.attributes.mode & self._mask)
        self._there.utimens(name, item.attributes.atime, item.attributes.mtime)

    def _carry(self, item: Item, name: str) -> None:
        self._done.stripped += not carry(self._here, item.source, self._there, name)

    def _contents(self, item: Item, source: Handle, target: Handle) -> None:
        offset = self._resumed(item, source, target)
        self._done.bytes += offset
        self._done.resumed += offset
        has_holes = item.attributes.blocks * 512 < item.attributes.size
        while data := self._read(item, source, offset, MAX_TRANSFER):
            self._go_on()
            if offset + len(data) > item.attributes.size:  # a device may go on for ever
                raise self._changed(item)
            if not (has_holes and data == _HOLE[: len(data)]):
                self._write(target, data, offset)
            offset += len(data)
            self._done.bytes += len(data)
            self._progress(len(data))
        if has_holes:
            self._there.ftruncate(target, offset)
        with naming(self._here, item.source):
            now = self._here.fgetattr(source)
        if (now.size, now.mtime, offset) != (item.attributes.size, item.attributes.mtime, now.size):
            raise self._changed(item)

    def _changed(self, item: Item) -> CopyFailed:
        return CopyFailed(errno.ESTALE, "it changed while it was copied", self._here.shown(item.source))

    def _write(self, target: Handle, data: bytes, offset: int) -> None:
        done = 0
        while done < len(data):
            done += self._there.write(target, data[done:], offset + done)

    def _read(self, item: Item, source: Handle, start: int, size: int) -> bytes:
        with naming(self._here, item.source):
            return self._here.read(source, size, start)

    def _resumed(self, item: Item, source: Handle, target: Handle) -> int:
        """Return how many bytes of an earlier copy can stay. All are compared: a power cut may have left
        holes.
        """
        done = self._there.fgetattr(target).size
        same = self._same_bytes(item, source, target, done)
        if same < done:
            self._there.ftruncate(target, same)
        return same

    def _same_bytes(self, item: Item, source: Handle, target: Handle, done: int) -> int:
        """Return how many of the ``done`` first bytes of a target are its source's. They are progress."""
        same = 0
        while same < min(done, item.attributes.size):
            self._go_on()
            end = min(same + MAX_TRANSFER, done)
            with naming(self._here, item.source):
                wanted = _read(self._here, source, same, end)
            if _read(self._there, target, same, end) != wanted:
                break
            self._progress(end - same)
            same = end
        return same

    def _unfinished(self, item: Item, stack: contextlib.ExitStack) -> str:
        """Return a temporary name of a target, for this version of its source, which no other copy has until
        the end of ``stack``.
        """
        folder, slash, name = item.target.rpartition("/")
        about = f"{self._origin}\0{item.source}\0{item.attributes.size}\0{item.attributes.mtime}"
        for number in range(_AT_ONCE):
            found = f"{folder}{slash}{unfinished.temporary(name, about, number)}"
            if stack.enter_context(unfinished.held(self._there.shown(found))):
                return found
        raise CopyFailed(errno.EBUSY, os.strerror(errno.EBUSY), self._there.shown(item.target))


def _looks_the_same(wanted: Attributes, known: Attributes) -> bool:
    """Return whether a regular file has its contents already (rsync's quick check)."""
    return stat.S_ISREG(known.mode) and (known.size, known.mtime) == (wanted.size, wanted.mtime)


@contextlib.contextmanager
def _opened(volume: PathAdapter, path: str) -> Iterator[Handle]:
    handle = volume.open(path, os.O_RDONLY)
    try:
        yield handle
    finally:
        volume.release(handle)


def _read(volume: PathAdapter, handle: Handle, start: int, end: int) -> bytes:
    parts = []
    while start < end and (data := volume.read(handle, end - start, start)):
        parts.append(data)
        start += len(data)
    return b"".join(parts)


def is_directory(volume: PathAdapter, path: str) -> bool:
    """Return whether ``path`` is a directory. Raises OSError."""
    try:
        return stat.S_ISDIR(volume.getattr(path).mode)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return False
        raise


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _remove(volume: PathAdapter, path: str) -> None:
    try:
        volume.unlink(path)
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
