# SPDX-License-Identifier: Apache-2.0
"""Edge (files): workloads on many small files."""

from __future__ import annotations

import os
import random
import resource
import shutil
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bench.volume.route import Mount, RouteFailed
from bench.volume.workload import Done
from millpond.linux.files import sync_folder

_SECONDS = 300.0
_GIT = ("git", "-c", "user.name=bench", "-c", "user.email=bench@localhost", "-c", "safe.directory=*")
"""What the mount shows belongs to a user of the device."""
_MODULES = 200


@dataclass(frozen=True, slots=True)
class CreateFiles:
    """``count`` times: create a file, ask for its attributes, remove it."""

    count: int
    counts: str = "operation"

    def prepare(self, mount: Mount, repeat: int) -> None:
        """See Workload. A route that failed may have left something."""
        for left in mount.backing.glob(f"new{repeat}-*"):
            left.unlink()

    def work(self, mount: Mount, repeat: int) -> Done:
        """See Workload. Three operations for each file."""
        paths = [os.fspath(mount.folder / f"new{repeat}-{number}") for number in range(self.count)]
        cpu, began = time.process_time(), time.perf_counter()
        for path in paths:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
            os.stat(path)  # noqa: PTH116 - less of our own
            os.unlink(path)  # noqa: PTH108
        return Done(3 * self.count, time.perf_counter() - began, time.process_time() - cpu)

    def check(self, mount: Mount, repeat: int) -> None:
        """See Workload. One more file is to be seen where it lies, and none of the others."""
        witness = f"new{repeat}-witness"
        with (mount.folder / witness).open("wb") as file:
            os.fsync(file.fileno())  # a file that is closed, or removed, may be told later
        found = {path.name for path in mount.backing.glob(f"new{repeat}-*")}
        (mount.folder / witness).unlink()
        sync_folder(mount.folder)
        if found != {witness} or (mount.backing / witness).exists():
            raise RouteFailed(f"created {witness}, found {sorted(found)}")


@dataclass(frozen=True, slots=True)
class ReadSamples:
    """All files below ``name``, ``size`` bytes each, in an order that follows from the repeat."""

    name: str
    count: int
    size: int
    counts: str = "operation"

    def make(self, backing: Path) -> None:
        """Them, in ten folders, as a training set of ten classes lies."""
        source = random.Random(1)
        for label in range(10):
            (backing / self.name / str(label)).mkdir(parents=True)
        for path in self._paths(backing):
            path.write_bytes(source.randbytes(self.size))

    def prepare(self, mount: Mount, repeat: int) -> None:
        """See Workload."""

    def work(self, mount: Mount, repeat: int) -> Done:
        """See Workload. An operation is one file, opened and read."""
        paths = self.shuffled(mount.folder, repeat)
        cpu, began = time.process_time(), time.perf_counter()
        contents = read_files(paths)
        seconds, used = time.perf_counter() - began, time.process_time() - cpu
        if contents != read_files(self.shuffled(mount.backing, repeat)):
            raise RouteFailed("other contents than were written")
        return Done(self.count, seconds, used, fetched=self.count * self.size)

    def check(self, mount: Mount, repeat: int) -> None:
        """See Workload."""

    def _paths(self, folder: Path) -> list[Path]:
        return [folder / self.name / str(number % 10) / f"{number:05}" for number in range(self.count)]

    def shuffled(self, folder: Path, repeat: int) -> list[str]:
        """Return the paths of all files below ``folder`` in the order of a repeat."""
        paths = [os.fspath(path) for path in self._paths(folder)]
        random.Random(repeat).shuffle(paths)
        return paths


def read_files(paths: Iterable[str]) -> list[bytes]:
    """Open each file, read all of it and close it."""
    contents = []
    for path in paths:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - less of our own
            contents.append(file.read())
    return contents


@dataclass(frozen=True, slots=True)
class CloneGit:
    """A clone of the repository ``source`` and its status; an operation is both."""

    source: Path
    counts: str = "operation"

    def make(self) -> None:
        """It, with some history."""
        text = random.Random(1)
        self.source.mkdir()
        _git(self.source, "init", "--quiet", "--initial-branch=main")
        for number in range(_MODULES):
            folder = self.source / f"package{number % 8}"
            folder.mkdir(exist_ok=True)
            (folder / f"module{number}.py").write_text(f"{text.randbytes(1 + number * 20).hex()}\n")
            if number % 40 == 39:
                _git(self.source, "add", ".")
                _git(self.source, "commit", "--quiet", "--message", f"{number + 1} modules")

    def prepare(self, mount: Mount, repeat: int) -> None:
        """See Workload. A route that failed may have left something."""
        shutil.rmtree(mount.backing / f"clone{repeat}", ignore_errors=True)

    def work(self, mount: Mount, repeat: int) -> Done:
        """See Workload. It goes through git's own protocol, so that nothing is linked."""
        clone = mount.folder / f"clone{repeat}"
        cpu, began = cpu_of_children(), time.perf_counter()
        _git(mount.folder, "clone", "--quiet", f"file://{self.source}", str(clone))
        changes = _git(clone, "status", "--porcelain")
        seconds, used = time.perf_counter() - began, cpu_of_children() - cpu
        if changes:
            raise RouteFailed(f"git status of a fresh clone: {changes.splitlines()[0]}")
        return Done(1, seconds, used)

    def check(self, mount: Mount, repeat: int) -> None:
        """See Workload."""
        clone = mount.backing / f"clone{repeat}"
        heads = {_git(folder, "rev-parse", "HEAD") for folder in (self.source, clone)}
        files = [path.relative_to(self.source) for path in self.source.glob("package*/*")]
        same = all((self.source / path).read_bytes() == (clone / path).read_bytes() for path in files)
        shutil.rmtree(clone)
        if len(heads) > 1 or not same or not files:
            raise RouteFailed("the clone is not what was cloned")


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run([*_GIT, *words], cwd=folder, capture_output=True, text=True, timeout=_SECONDS)
    if done.returncode:
        raise RouteFailed(f"git {words[0]}: {' '.join(done.stderr.split())}")
    return done.stdout


def cpu_of_children() -> float:
    """Return the seconds of processor time of the programs that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
