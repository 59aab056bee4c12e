# SPDX-License-Identifier: Apache-2.0
"""Edge: unpacked wheels in folders, one for each set of them, each whole and durable or not there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from millpond.base.errors import ConfigError, LocalError
from millpond.base.text import printable
from millpond.linux.confinement.sandbox import Bind, Sandbox, python_binds, system_binds
from millpond.linux.confinement.sandboxed_process import end, start
from millpond.linux.files import later_than_all, open_folders, sync_folder
from millpond.linux.syscalls import sync_file_system
from millpond.train.job import wheels
from millpond.train.job.file_cache import free_bytes
from millpond.train.job.files import JobFile

_UNFINISHED = ".new-"
_CHUNK = 1 << 18
_TAIL = 42
_COMPILE_SECONDS = 120.0
_COMPILES = """
import compileall, os, py_compile, sys
os.umask(0o022)
compileall.compile_dir(sys.argv[1], quiet=2, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
"""
_INSIDE = Path("/wheels")
_NO_TREE = (FileExistsError, IsADirectoryError, NotADirectoryError)
_DAMAGE = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, NotImplementedError, *_NO_TREE)


class Overlays:
    """Keeps unpacked wheels in ``folder``, at most ``most`` bytes of them: then the least recently used that
    no job holds go first. Without ``most`` none goes. Safe to use from several threads of one process.
    """

    def __init__(self, folder: Path, most: int | None = None) -> None:
        self._folder, self._most = folder, most
        self._lock = threading.Lock()
        self._holds: Counter[Path] = Counter()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(path, ignore_errors=True)

    @contextlib.contextmanager
    def held(self, wheels: Mapping[str, JobFile]) -> Iterator[Path]:
        """Keep the overlay of ``wheels``, if it is there. Yields its folder."""
        names = sorted((name.rpartition("/")[2], file.sha256) for name, file in wheels.items())
        overlay = self._folder / hashlib.sha256(json.dumps(names).encode()).hexdigest()
        with self._lock:
            self._holds[overlay] += 1
            with contextlib.suppress(FileNotFoundError):
                now = later_than_all(self._folder)
                os.utime(overlay, ns=(now, now))
        try:
            yield overlay
        finally:
            with self._lock:
                self._holds[overlay] -= 1

    def install(
        self,
        overlay: Path,
        wheels: Mapping[str, JobFile],
        contents: Callable[[JobFile], Path],
        largest: int | None = None,
    ) -> None:
        """Unpack ``wheels``, whose ``contents`` lie here, into the overlay that is held, unless it is there.
        Raises ConfigError for wheels that are wrong or have more than ``largest`` bytes, and LocalError, for
        example at a full disk.
        """
        with self._lock:
            if overlay.exists():
                return
            try:
                place = Path(tempfile.mkdtemp(dir=self._folder, prefix=_UNFINISHED))
                with contextlib.ExitStack() as unless_whole:
                    unless_whole.callback(shutil.rmtree, place, ignore_errors=True)
                    self._unpack({name: contents(file) for name, file in wheels.items()}, place, largest)
                    open_folders(place)
                    _compile(place)
                    _make_durable(place)
                    now = later_than_all(self._folder)
                    os.utime(place, ns=(now, now))
                    place.rename(overlay)
                    unless_whole.pop_all()
                sync_folder(self._folder)
            except OSError as error:
                raise LocalError(f"the job's wheels cannot be unpacked: {error.strerror}") from None

    def _unpack(self, paths: Mapping[str, Path], place: Path, largest: int | None) -> None:
        with contextlib.ExitStack() as stack:
            archives = {name: stack.enter_context(_opened(path, name)) for name, path in paths.items()}
            listed = {
                name: wheels.members(archive.infolist(), f"wheels: {name}")
                for name, archive in archives.items()
            }
            size = sum(entry.file_size for entries in listed.values() for entry in entries.values())
            if largest is not None and size > largest:
                raise ConfigError(f"wheels: {size} bytes unpacked; policy.largest_files allows {largest}")
            self._make_room(size + sum(map(_compiled_size, listed.values())))
            for name, entries in listed.items():
                with _damage_named(name):
                    for target, entry in entries.items():
                        _write(archives[name], entry, place / target)

    def _make_room(self, size: int) -> None:
        present = [path for path in self._folder.iterdir() if not path.name.startswith(_UNFINISHED)]
        sizes = {path: _size(path) for path in present}
        idle = sorted(
            (path for path in present if not self._holds[path]), key=lambda path: path.stat().st_mtime_ns
        )
        most = size + sum(sizes.values()) if self._most is None else self._most
        while sum(sizes.values()) + size > most or size > free_bytes(self._folder):
            if self._most is None or not idle:
                raise LocalError(f"there is no room for {size} bytes of unpacked wheels")
            path = idle.pop(0)
            gone = path.rename(path.with_name(f"{_UNFINISHED}{path.name}"))  # never half of one by its name
            shutil.rmtree(gone)
            del sizes[path]


@contextlib.contextmanager
def _damage_named(name: str) -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        raise ConfigError(f"wheels: {name}: damaged: {printable(str(error))}") from None


@contextlib.contextmanager
def _opened(path: Path, name: str) -> Iterator[zipfile.ZipFile]:
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - _TAIL, 0))
        wheels.check_end(file.read(_TAIL), f"wheels: {name}")
        with _damage_named(name):
            archive = zipfile.ZipFile(file)
        with archive:
            yield archive


def _write(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with archive.open(entry) as packed, target.open("xb") as out:
        shutil.copyfileobj(packed, out, _CHUNK)
        os.fchmod(out.fileno(), 0o444)


def _compiled_size(entries: Mapping[str, zipfile.ZipInfo]) -> int:
    """Return what the modules take once more when they are compiled, about."""
    return sum(entry.file_size for name, entry in entries.items() if name.endswith(".py"))


def _compile(folder: Path) -> None:
    """Compile the modules ahead, in a process that can write to nothing else: these are a stranger's. Workers
    compile what it leaves out.
    """
    sandbox = Sandbox(
        binds=(*system_binds(), *python_binds(), Bind(folder, _INSIDE, read_only=False)),
        own_network=True,
        own_pids=True,
        capabilities=False,
    )
    command = [sys.executable, "-I", "-c", _COMPILES, str(_INSIDE)]
    process = start(sandbox, command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_COMPILE_SECONDS)
    finally:
        end(process)


def _make_durable(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync_file_system(descriptor)
    finally:
        os.close(descriptor)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
