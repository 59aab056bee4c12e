# SPDX-License-Identifier: Apache-2.0
"""Edge: contents of files by their digest, in one folder, each whole and durable or not there."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from millpond.base.errors import LocalError
from millpond.linux.files import later_than_all, open_folders, replace_durably
from millpond.linux.syscalls import sync_file_system
from millpond.train.job.files import JobFile

log = logging.getLogger(__name__)

KEPT_FREE = 64 << 20
"""Bytes of the disk that no file takes: others need some, too."""
READ_AGAIN_SECONDS = 3600.0
_UNFINISHED = ".new-"
_COPIED = 1 << 20


class _Identity(NamedTuple):
    inode: int
    size: int
    written: int


class DamagedFile(LocalError):
    """Contents that are not those of their digest."""


class FileCache:
    """Keeps contents in ``folder``, at most ``most`` bytes of them: then the least recently used that nobody
    holds go first. Without ``most`` none goes by itself. Safe to use from several threads of one process.
    """

    def __init__(self, folder: Path, most: int | None = None) -> None:
        self._folder, self._most = folder, most
        self._lock = threading.Lock()
        self._holds: Counter[JobFile] = Counter()
        self._read: dict[str, tuple[_Identity, float]] = {}  # by digest: what was read whole, and when
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in folder.glob(f"{_UNFINISHED}*"):
            path.unlink()

    def path(self, file: JobFile) -> Path:
        """Return where the contents of ``file`` lie, or would."""
        return self._folder / file.sha256

    def has(self, file: JobFile) -> bool:
        """Return whether the contents of ``file`` are there. They are read whole, unless that was done within
        READ_AGAIN_SECONDS and nobody has written to them since: flash loses bits while nothing else shows
        it. What is damaged is removed.
        """
        path, now = self.path(file), time.monotonic()
        try:
            identity = _identity(path.stat())
            known, at = self._read.get(file.sha256, (None, 0.0))
            if identity.size != file.size:
                return False
            if known == identity and now - at < READ_AGAIN_SECONDS:
                return True
            with path.open("rb") as opened:
                whole = hashlib.file_digest(opened, "sha256").hexdigest() == file.sha256
        except FileNotFoundError:
            return False
        except OSError:  # a block that the flash cannot read, most likely
            whole = False
        if whole:
            self._read[file.sha256] = identity, now
        else:
            log.warning("%s is damaged, and removed", path)
            path.unlink(missing_ok=True)
        return whole

    def check(self, files: Mapping[str, JobFile]) -> None:
        """Raise LocalError, which names it, for one of ``files`` whose contents are not there."""
        for name, file in files.items():
            if not self.has(file):
                raise LocalError(f"the stored contents of '{name}' are damaged or gone: submit the job again")

    @contextlib.contextmanager
    def held(self, files: Collection[JobFile]) -> Iterator[None]:
        """Keep what is there of ``files``, and the room for the others. Raises LocalError without room."""
        wanted = set(files)
        with self._lock:
            self._holds.update(wanted)
            try:
                self._make_room()
            except BaseException:
                self._release(wanted)
                raise
        try:
            now = later_than_all(self._folder)
            for file in wanted:
                with contextlib.suppress(FileNotFoundError):
                    self._touch(file, now)
            yield
        finally:
            with self._lock:
                self._release(wanted)

    def _touch(self, file: JobFile, now: int) -> None:
        """Make a file the most recently used, which is no reason to read it again."""
        path = self.path(file)
        before = _identity(path.stat())
        os.utime(path, ns=(now, now))
        known, at = self._read.get(file.sha256, (None, 0.0))
        if known == before:
            self._read[file.sha256] = _identity(path.stat()), at

    def _release(self, files: Iterable[JobFile]) -> None:
        self._holds.subtract(files)
        self._holds = +self._holds

    def _make_room(self) -> None:
        """Remove contents that nobody holds until there is room for what is held and not there yet. Raises
        LocalError.
        """
        present = self._present()
        coming = sum(file.size for file in self._holds if file.sha256 not in present)
        if not coming:
            return
        used = sum(found.st_size for found in present.values())
        free = free_bytes(self._folder)
        held = {file.sha256 for file in self._holds}
        idle = sorted((present[name].st_mtime_ns, name) for name in present.keys() - held)
        most = used + coming if self._most is None else self._most
        while used + coming > most or coming > free:
            if self._most is None or not idle:
                room = max(min(free, most - used), 0)
                text = f"{self._folder}: there is room for {room} more bytes of files; {coming} are needed"
                raise LocalError(text)
            _, name = idle.pop(0)
            (self._folder / name).unlink()
            used, free = used - present[name].st_size, free + present[name].st_size

    def _present(self) -> dict[str, os.stat_result]:
        with os.scandir(self._folder) as entries:
            return {each.name: each.stat() for each in entries if not each.name.startswith(_UNFINISHED)}

    def add(self, file: JobFile, parts: Iterable[bytes | memoryview]) -> None:
        """Store contents, all of which are read whatever happens. Raises DamagedFile if they are not those of
        ``file``, and LocalError, for example at a full disk.
        """
        parts = iter(parts)
        try:
            with contextlib.ExitStack() as unless_whole:
                found, path = self._unfinished(parts, unless_whole)
                if found != file:
                    raise DamagedFile("it came with another SHA-256 than announced: it has changed meanwhile")
                now = later_than_all(self._folder)
                replace_durably(path, self.path(file))
                self._note_read(file, now)
        except OSError as error:
            raise LocalError(f"a file cannot be stored: {error.strerror}") from None
        finally:
            for _ in parts:
                pass

    def add_small(self, files: Sequence[JobFile], data: bytes) -> None:
        """Store contents that lie one behind the other in ``data``, all or none: the disk is waited for once.
        Raises DamagedFile if they are not those of ``files``, and LocalError as ``add`` does.
        """
        try:
            with contextlib.ExitStack() as unless_whole:
                folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
                unless_whole.callback(os.close, folder)
                fresh, start = dict[JobFile, Path](), 0
                for file in files:
                    part, start = data[start : start + file.size], start + file.size
                    found, fresh[file] = self._unfinished([part], unless_whole)
                    if found != file:
                        raise DamagedFile("a file came with another SHA-256 than announced")
                sync_file_system(folder)
                now = later_than_all(self._folder)
                for file, path in fresh.items():
                    path.replace(self.path(file))
                    self._note_read(file, now)
                os.fsync(folder)
        except OSError as error:
            raise LocalError(f"files cannot be stored: {error.strerror}") from None

    def _unfinished(
        self, parts: Iterable[bytes | memoryview], unless_whole: contextlib.ExitStack
    ) -> tuple[JobFile, Path]:
        """Write contents that have no name yet; return what they are, and where. ``unless_whole`` removes
        them, if they are there still. Raises OSError.
        """
        descriptor, name = tempfile.mkstemp(dir=self._folder, prefix=_UNFINISHED)
        unless_whole.callback(Path(name).unlink, missing_ok=True)
        with os.fdopen(descriptor, "wb") as out:
            os.fchmod(descriptor, 0o444)  # a worker has another uid
            digest = hashlib.sha256()
            for part in parts:
                digest.update(part)
                out.write(part)
            return JobFile(digest.hexdigest(), out.tell()), Path(name)

    def _note_read(self, file: JobFile, now: int) -> None:
        """Note that these contents, which are there, need not be read again for a while."""
        os.utime(self.path(file), ns=(now, now))
        self._read[file.sha256] = _identity(self.path(file).stat()), time.monotonic()

    def copy(self, path: Path) -> JobFile:
        """Store the contents of the file at ``path``, and return what is known of them. Raises LocalError."""
        try:
            with path.open("rb") as opened:
                file = JobFile(hashlib.file_digest(opened, "sha256").hexdigest(), opened.tell())
                opened.seek(0)
                with self.held([file]):
                    if not self.has(file):
                        self.add(file, iter(lambda: opened.read(_COPIED), b""))
        except OSError as error:
            raise LocalError(f"{path}: {error.strerror}") from None
        return file

    def link(self, files: Mapping[str, JobFile], folder: Path) -> None:
        """Make ``folder``, with ``files`` under their names. Raises LocalError."""
        try:
            folder.mkdir()
            for name, file in files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                os.link(self.path(file), folder / name)
            open_folders(folder)
        except OSError as error:
            raise LocalError(f"a job's files cannot be laid out: {error.strerror}") from None

    def keep(self, digests: Collection[str]) -> None:
        """Remove all contents of other digests."""
        with self._lock:
            for name in self._present().keys() - set(digests):
                (self._folder / name).unlink()


def free_bytes(folder: Path) -> int:
    """Return the bytes of the disk of ``folder`` that files may take."""
    found = os.statvfs(folder)
    return max(found.f_bavail * found.f_frsize - KEPT_FREE, 0)


def _identity(found: os.stat_result) -> _Identity:
    return _Identity(found.st_ino, found.st_size, found.st_mtime_ns)
