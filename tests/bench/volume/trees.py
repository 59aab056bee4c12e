# SPDX-License-Identifier: Apache-2.0
"""Edge (processes): workloads on trees of files, by the programs that people use for them."""

from __future__ import annotations

import io
import os
import random
import shutil
import subprocess
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.volume.names import cpu_of_children
from bench.volume.route import Mount, RouteFailed
from bench.volume.workload import Done

_SECONDS = 300.0
_ARRIVES_WITHIN, _PAUSE = 10.0, 0.05
_IN_A_FOLDER = 1000


def _run(argv: Sequence[str], folder: Path) -> tuple[str, float, float]:
    """Run a program. Returns what it printed, its seconds, and its processor time. Raises RouteFailed."""
    cpu, began = cpu_of_children(), time.perf_counter()
    done = subprocess.run(
        argv, cwd=folder, capture_output=True, text=True, timeout=_SECONDS, env=os.environ | {"LC_ALL": "C"}
    )
    seconds, used = time.perf_counter() - began, cpu_of_children() - cpu
    if done.returncode:
        raise RouteFailed(f"{argv[0]}: {' '.join(done.stderr.split())[:300]}")
    return done.stdout, seconds, used


@dataclass(frozen=True, slots=True)
class ListTree:
    """``ls -lR`` of the folder ``name`` with ``count`` files; an operation is one of them."""

    name: str
    count: int
    counts: str = "operation"

    def make(self, backing: Path) -> None:
        """Make the files, each of another length, a thousand in a folder."""
        for number in range(self.count):
            folder = backing / self.name / f"{number // _IN_A_FOLDER:03}"
            if number % _IN_A_FOLDER == 0:
                folder.mkdir(parents=True)
            (folder / f"sample{number:06}.bin").write_bytes(bytes(number % 97))

    def prepare(self, mount: Mount, repeat: int) -> None:
        """See Workload."""

    def work(self, mount: Mount, repeat: int) -> Done:
        """See Workload. What is listed are the names and lengths of the files where they lie."""
        listed, seconds, used = _run(["ls", "-lR", self.name], mount.folder)
        where_they_lie, _, _ = _run(["ls", "-lR", self.name], mount.backing)
        names = _names_and_lengths(listed)
        if names != _names_and_lengths(where_they_lie) or len(names) < self.count:
            raise RouteFailed("other names or lengths were listed than there are")
        return Done(self.count, seconds, used, fetched=sum(len(name) for name, _ in names))

    def check(self, mount: Mount, repeat: int) -> None:
        """See Workload."""


def _names_and_lengths(listed: str) -> list[tuple[str, str]]:
    """Return those of the files in the output of ``ls -lR``."""
    lines = (line.split() for line in listed.splitlines() if line.startswith("-"))
    return [(fields[-1], fields[4]) for fields in lines]


@dataclass(frozen=True, slots=True)
class Untar:
    """The files of ``archive``, unpacked by tar; an operation is a file."""

    archive: Path
    count: int
    counts: str = "operation"

    def make(self) -> None:
        """Make the archive: a hundred files in a folder, of 1 to 4 KiB."""
        content = random.Random(1)
        with tarfile.open(self.archive, "w") as archive:
            for number in range(self.count):
                entry = tarfile.TarInfo(f"folder{number // 100:03}/file{number:05}")
                data = content.randbytes(1024 + content.randrange(3072))
                entry.size, entry.mode, entry.mtime = len(data), 0o644, 1_600_000_000 + number
                archive.addfile(entry, io.BytesIO(data))

    def prepare(self, mount: Mount, repeat: int) -> None:
        """See Workload. A route that failed may have left something."""
        shutil.rmtree(self._folder(mount.backing, repeat), ignore_errors=True)

    def work(self, mount: Mount, repeat: int) -> Done:
        """See Workload."""
        folder = self._folder(mount.folder, repeat)
        folder.mkdir()
        argv = ["tar", "--extract", "--no-same-owner", "--file", str(self.archive)]
        _, seconds, used = _run(argv, folder)
        return Done(self.count, seconds, used)

    def check(self, mount: Mount, repeat: int) -> None:
        """See Workload. Names and data may be told later, but soon."""
        folder = self._folder(mount.backing, repeat)
        end = time.monotonic() + _ARRIVES_WITHIN
        while missing := self._missing(folder):
            if time.monotonic() > end:
                raise RouteFailed(f"{missing} is not where the files lie, or is another")
            time.sleep(_PAUSE)
        shutil.rmtree(folder)

    def _missing(self, folder: Path) -> str:
        """Return the first file that is not there as it was in the archive, "" if all are."""
        with tarfile.open(self.archive) as archive:
            for entry in archive:
                source, path = archive.extractfile(entry), folder / entry.name
                if not source or not path.exists() or path.read_bytes() != source.read():
                    return entry.name
                if int(path.stat().st_mtime) != entry.mtime:
                    return entry.name
        return ""

    def _folder(self, folder: Path, repeat: int) -> Path:
        return folder / f"untar{repeat}"
