# SPDX-License-Identifier: Apache-2.0
"""Edge (processes): workloads on one large file, by a program in C whose own cost is small."""

from __future__ import annotations

import filecmp
import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bench.volume.route import Mount, RouteFailed
from bench.volume.workload import Done

MIB = 1 << 20
PAGE = 4096
_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What the program says: seconds, CPU seconds, and a sum over pages read."""

    seconds: float
    cpu: float
    sum: int


def blocks(program: Path, does: str, file: Path | int, block: int, count: int, how: str, seed: int) -> Answer:
    """Run it on a file, or on one that is open to be read. Raises RouteFailed."""
    opened, name = (file, "-") if isinstance(file, int) else (subprocess.DEVNULL, str(file))
    argv = [str(program), does, name, *map(str, (block, count)), how, str(seed)]
    try:
        done = subprocess.run(argv, stdin=opened, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise RouteFailed(f"{does}: not within {_SECONDS:.0f} s") from None
    if done.returncode:
        raise RouteFailed(f"{does}: {done.stderr.strip()}")
    return Answer(**json.loads(done.stdout))


def make_file(program: Path, file: Path, mib: int) -> None:
    """Of random contents; its pages are in memory then."""
    blocks(program, "write", file, MIB, mib, "sync", 1)
    blocks(program, "read", file, MIB, mib, "sequential", 1)


@dataclass(frozen=True, slots=True)
class Read:
    """``count`` blocks of ``block`` bytes of the file ``name``; ``again``: after it was read once."""

    program: Path
    name: str
    block: int
    count: int
    how: Literal["sequential", "random"]
    again: bool = False

    @property
    def counts(self) -> str:
        """See Workload."""
        return "operation" if self.how == "random" else "MiB"

    def prepare(self, mount: Mount, repeat: int) -> None:
        """See Workload."""
        if self.again:
            self._run(mount.folder / self.name, repeat)

    def work(self, mount: Mount, repeat: int) -> Done:
        """See Workload. The sum is that of the same blocks where they lie."""
        found = self._measured(mount, repeat)
        if found.sum != self._run(mount.backing / self.name, repeat).sum:
            raise RouteFailed(f"{self.name}: other contents than were written")
        size = self.block * self.count
        amount = self.count if self.counts == "operation" else size / MIB
        return Done(amount, found.seconds, found.cpu, fetched=0 if self.again else size)

    def check(self, mount: Mount, repeat: int) -> None:
        """See Workload. Also what lies between the words that were summed."""
        if not filecmp.cmp(mount.folder / self.name, mount.backing / self.name, shallow=False):
            raise RouteFailed(f"{self.name}: other contents than were written")

    def _measured(self, mount: Mount, repeat: int) -> Answer:
        return self._run(mount.folder / self.name, repeat)

    def _run(self, file: Path | int, repeat: int) -> Answer:
        return blocks(self.program, "read", file, self.block, self.count, self.how, repeat + 1)


@dataclass(frozen=True, slots=True)
class ReadOpened(Read):
    """The file is open already, and was read: only bytes are asked for, no names."""

    _opened: list[int] = field(default_factory=list)

    def prepare(self, mount: Mount, repeat: int) -> None:
        """See Workload."""
        self._opened.append(os.open(mount.folder / self.name, os.O_RDONLY))
        self._run(self._opened[-1], repeat)

    def check(self, mount: Mount, repeat: int) -> None:
        """See Workload."""
        os.close(self._opened.pop())
        Read.check(self, mount, repeat)  # super() does not find its class where there are slots

    def _measured(self, mount: Mount, repeat: int) -> Answer:
        return self._run(self._opened[-1], repeat)


@dataclass(frozen=True, slots=True)
class Write:
    """A new file of ``count`` MiB, ``block`` bytes a write, with fsync or without. ``pattern`` is a folder
    for what it should be. ``used``: the mount has written as much before.
    """

    program: Path
    pattern: Path
    count: int
    how: Literal["sync", "nosync"]
    counts: str = "MiB"
    block: int = MIB
    used: bool = False

    def prepare(self, mount: Mount, repeat: int) -> None:
        """See Workload. A route that failed may have left something."""
        for folder in (mount.backing, self.pattern):
            (folder / self._name(repeat)).unlink(missing_ok=True)
        if self.used:
            self._write(mount.folder / self._name(repeat), repeat)
            (mount.folder / self._name(repeat)).unlink()

    def work(self, mount: Mount, repeat: int) -> Done:
        """See Workload."""
        found = self._write(mount.folder / self._name(repeat), repeat)
        return Done(self.count, found.seconds, found.cpu, sent=self.count * MIB)

    def check(self, mount: Mount, repeat: int) -> None:
        """See Workload."""
        written, expected = mount.backing / self._name(repeat), self.pattern / self._name(repeat)
        self._write(expected, repeat)
        same = filecmp.cmp(written, expected, shallow=False)
        written.unlink()
        expected.unlink()
        if not same:
            raise RouteFailed("other contents than were written")

    def _name(self, repeat: int) -> str:
        return f"written{repeat}"

    def _write(self, file: Path, repeat: int) -> Answer:
        count = self.count * MIB // self.block
        return blocks(self.program, "write", file, self.block, count, self.how, repeat + 1)
