# SPDX-License-Identifier: Apache-2.0
"""Edge (an emulated fleet): the host's mount of a device, against sshfs and a plain FUSE passthrough over the
same tunnel.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from bench.experiment import Run
from bench.rows import Row
from bench.tunnel.record import Record
from bench.volume.blocks import MIB, PAGE, Read, Write, make_file
from bench.volume.fleet import EMULATION, PROGRAMS, Host, fleet
from bench.volume.measuring import Trial, details, ratio, take_turns
from bench.volume.names import CloneGit, CreateFiles, ReadSamples
from bench.volume.together import ReadTogether
from bench.volume.tools import Tools
from bench.volume.trees import ListTree, Untar
from bench.volume.workload import Workload

_FILE = "file"
_CORES = f"all share {os.cpu_count()} cores, which bounds the sum of what several programs get"


@dataclass(frozen=True, slots=True)
class Lengths:
    """MiB of a file, random reads, files to create, to read, to list and to unpack, MiB and files of each
    of several programs, repeats, repeats of what takes long.
    """

    mib: int
    random: int
    created: int
    samples: int
    listed: int
    unpacked: int
    each_mib: int
    each_files: int
    repeats: int
    long_repeats: int


FULL = Lengths(64, 2000, 300, 10_000, 20_000, 5000, 32, 250, 5, 3)
QUICK = Lengths(4, 100, 20, 100, 100, 50, 2, 10, 1, 1)


@dataclass(frozen=True, slots=True)
class Stage:
    """What the parts are measured with."""

    host: Host
    program: Path
    tools: Tools
    lengths: Lengths


@dataclass(frozen=True, slots=True)
class Part:
    """``made`` gives the workload, and what rows say of it. ``routes`` take turns; the speed of the first
    over that of each of ``over`` is a row. ``long`` ones have fewer repeats. ``afresh``: each repeat has a
    fleet of its own, as the device's server remembers a client that has gone.
    """

    title: str
    name: str
    made: Callable[[Stage], tuple[Workload, str]]
    routes: tuple[str, ...]
    over: tuple[str, ...]
    long: bool = False
    afresh: bool = False

    @property
    def figures(self) -> dict[str, str]:
        """The ratios that it gives, and the peer's key of each."""
        return {f"{self.name}_over_{peer}": peer for peer in self.over}

    def trial(self, stage: Stage) -> Trial:
        """It with the files that it needs."""
        work, what = self.made(stage)
        repeats = stage.lengths.long_repeats if self.long else stage.lengths.repeats
        note = f"{EMULATION}; {_CORES}" if self.routes == _TOGETHER else EMULATION
        return Trial(self.name, f"host, {what}", work, stage.host.routes(*self.routes), repeats, note)


def reads(stage: Stage) -> tuple[Workload, str]:
    """First reads."""
    mib = stage.lengths.mib
    what = f"first read of {mib} MiB by 1 MiB; on the device they are in memory"
    return Read(stage.program, _FILE, MIB, mib, "sequential"), what


def rereads(stage: Stage) -> tuple[Workload, str]:
    """Of what the host has read before."""
    mib = stage.lengths.mib
    work = Read(stage.program, _FILE, MIB, mib, "sequential", again=True)
    return work, f"{mib} MiB by 1 MiB once more after a first read"


def random_reads(stage: Stage) -> tuple[Workload, str]:
    """Of a file not read before."""
    count = stage.lengths.random
    what = f"{count} random reads of 4 KiB of a file of {stage.lengths.mib} MiB, not read before"
    return Read(stage.program, _FILE, PAGE, count, "random"), what


def writes(stage: Stage) -> tuple[Workload, str]:
    """With an fsync."""
    mib = stage.lengths.mib
    work = Write(stage.program, stage.tools.folder("pattern-host"), mib, "sync")
    return work, f"a new file of {mib} MiB written by 1 MiB, and an fsync"


def small_writes(pages: int, stage: Stage) -> tuple[Workload, str]:
    """Of so many pages each, with an fsync. OpenSSH's sftp-server takes 20 to 66 s of processor time for the
    first of a connection, for the next mostly 0.3 s: that is not what is to be compared.
    """
    mib, size = stage.lengths.mib, pages * PAGE
    folder = stage.tools.folder(f"pattern-{size}")
    work = Write(stage.program, folder, mib, "sync", block=size, used=True)
    what = f"a new file of {mib} MiB by write()s of {size >> 10} KiB, and an fsync, the second on a mount"
    return work, what


def listings(stage: Stage) -> tuple[Workload, str]:
    """Of a tree that the host has not looked at."""
    work = ListTree("listed", stage.lengths.listed)
    work.make(stage.host.backing)
    return work, f"ls -lR of {work.count} files, a thousand in a folder, of a fresh mount"


def unpackings(stage: Stage) -> tuple[Workload, str]:
    """Of an archive of small files."""
    work = Untar(stage.tools.folder("archive") / "files.tar", stage.lengths.unpacked)
    work.make()
    return work, f"tar -x of {work.count} files of 1 to 4 KiB, a hundred in a folder"


def large_together(stage: Stage) -> tuple[Workload, str]:
    """Several programs that read a large file each."""
    mib = stage.lengths.each_mib
    work = ReadTogether("together", PROGRAMS, 1, mib * MIB)
    work.make(stage.host.backing)
    return work, f"{PROGRAMS} programs, each with a file of {mib} MiB of its own, first read by 1 MiB"


def small_together(stage: Stage) -> tuple[Workload, str]:
    """Several programs that read many small files each."""
    count = stage.lengths.each_files
    work = ReadTogether("together", PROGRAMS, count, PAGE)
    work.make(stage.host.backing)
    return work, f"{PROGRAMS} programs, each with {count} files of 4 KiB of its own, read for the first time"


def creations(stage: Stage) -> tuple[Workload, str]:
    """With attributes and removals."""
    count = stage.lengths.created
    return CreateFiles(count), f"create, stat and unlink of {count} files, one after the other"


def clones(stage: Stage) -> tuple[Workload, str]:
    """Of a small repository."""
    work = CloneGit(stage.tools.folder("git") / "source")
    work.make()
    return work, "git clone of 200 files with some history, and git status"


def epochs(stage: Stage) -> tuple[Workload, str]:
    """A training set of small files."""
    work = ReadSamples("samples", stage.lengths.samples, PAGE)
    work.make(stage.host.backing)
    return work, f"{work.count} files of 4 KiB in ten folders, read in shuffled order by one reader"


_PEERS = ("sshfs", "plain", "passthrough")
_ALL = ("millpond", *_PEERS)
_FEW = ("plain", "passthrough")
_TOGETHER = ("together", "one")
PARTS = {
    "host-read": Part(
        "The host reads a file for the first time",
        "host_read",
        reads,
        (*_ALL, "cached"),
        (*_PEERS, "cached"),
    ),
    "host-reread": Part(
        "The host reads a file again",
        "host_reread",
        rereads,
        ("millpond", "native", "sshfs", "passthrough"),
        ("native", "passthrough"),
    ),
    "host-random": Part(
        "The host reads at random", "host_rand", random_reads, (*_ALL, "cached"), (*_FEW, "cached")
    ),
    "host-write": Part("The host writes", "host_write", writes, _ALL, _PEERS),
    "host-small-write": Part(
        "The host writes a file by 8 KiB",
        "small_write",
        functools.partial(small_writes, 2),
        ("millpond", *_FEW),
        _FEW,
        long=True,
    ),
    "host-page-write": Part(
        "The host writes a file by 4 KiB",
        "page_write",
        functools.partial(small_writes, 1),
        ("millpond", *_FEW),
        _FEW,
        long=True,
    ),
    "host-list": Part("The host lists a tree", "ls", listings, _ALL, _FEW, long=True, afresh=True),
    "host-parallel": Part(
        "Several programs read on the host", "parallel", large_together, _TOGETHER, ("one",)
    ),
    "host-parallel-small": Part(
        "Several programs read small files on the host",
        "parallel_small",
        small_together,
        _TOGETHER,
        ("one",),
    ),
    "untar": Part("The host unpacks an archive", "untar", unpackings, _ALL, _FEW, long=True),
    "host-meta": Part("The host creates and removes files", "host_meta", creations, _ALL, _FEW),
    "git": Part("The host clones a repository into the volume", "git", clones, _ALL, _PEERS, long=True),
    "epoch": Part(
        "The host reads an epoch of small files",
        "epoch",
        epochs,
        ("millpond", "sshfs", "plain"),
        ("sshfs", "plain"),
        long=True,
    ),
}


def measure(part: Part, tools: Tools, run: Run) -> list[Row]:
    """Its rows, of fleets of its own."""
    lengths = QUICK if run.quick else FULL
    if tools.repeats:
        lengths = replace(lengths, repeats=tools.repeats, long_repeats=tools.repeats)
    trial, record = _in_a_fleet(part, tools, lengths, run, Record())
    for repeat in range(1, trial.repeats if part.afresh else 0):
        _in_a_fleet(part, tools, lengths, run, record, repeat)
    rows = [ratio(figure, trial, record, peer) for figure, peer in part.figures.items()]
    return [*rows, *details(trial, record)]


def _in_a_fleet(
    part: Part, tools: Tools, lengths: Lengths, run: Run, record: Record, repeat: int = 0
) -> tuple[Trial, Record]:
    """Add all repeats to the record, or the one where each has a fleet of its own."""
    with fleet(tools.scratch) as host:
        stage = Stage(host, tools.blocks(), tools, lengths)
        make_file(stage.program, host.backing / _FILE, lengths.mib)
        trial = part.trial(stage)
        return trial, take_turns(trial, run, record, [repeat] if part.afresh else None)
