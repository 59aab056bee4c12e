# SPDX-License-Identifier: Apache-2.0
"""Edge (an emulated fleet): the host's mount of a device, against sshfs and a plain FUSE passthrough over the
same tunnel.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.experiment import Findings, Run
from bench.rows import summary
from bench.tunnel.record import Record
from bench.volume.blocks import MIB, PAGE, Read, Write, make_file
from bench.volume.fleet import EMULATION, PROGRAMS, Host, fleet
from bench.volume.measuring import Trial, details, ratio, take_turns
from bench.volume.names import CloneGit, CreateFiles, ReadSamples
from bench.volume.together import ReadTogether
from bench.volume.tools import Tools
from bench.volume.trees import ListTree, Untar
from system.support import why_not

_FILE = "file"
_SMALL_WRITE = {1: "page_write", 2: "small_write"}
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
    """``figures`` are the ratios that it gives, and the peer's key of each. ``afresh``: each repeat has a
    fleet of its own, as the device's server remembers a client that has gone.
    """

    title: str
    figures: Mapping[str, str]
    trial: Callable[[Stage], Trial]
    afresh: bool = False


def reads(stage: Stage) -> Trial:
    """First reads."""
    mib = stage.lengths.mib
    what = f"host, first read of {mib} MiB by 1 MiB; on the device they are in memory"
    routes = stage.host.routes("millpond", "sshfs", "plain", "passthrough")
    work = Read(stage.program, _FILE, MIB, mib, "sequential")
    return Trial("host_read", what, work, routes, stage.lengths.repeats, EMULATION)


def rereads(stage: Stage) -> Trial:
    """Of what the host has read before."""
    mib = stage.lengths.mib
    what = f"host, {mib} MiB by 1 MiB once more after a first read"
    routes = stage.host.routes("millpond", "native", "sshfs", "passthrough")
    work = Read(stage.program, _FILE, MIB, mib, "sequential", again=True)
    return Trial("host_reread", what, work, routes, stage.lengths.repeats, EMULATION)


def random_reads(stage: Stage) -> Trial:
    """Of a file not read before."""
    count = stage.lengths.random
    what = f"host, {count} random reads of 4 KiB of a file of {stage.lengths.mib} MiB, not read before"
    work = Read(stage.program, _FILE, PAGE, count, "random")
    routes = stage.host.routes("millpond", "sshfs", "plain", "passthrough")
    return Trial("host_rand", what, work, routes, stage.lengths.repeats, EMULATION)


def writes(stage: Stage) -> Trial:
    """With an fsync."""
    mib = stage.lengths.mib
    what = f"host, a new file of {mib} MiB written by 1 MiB, and an fsync"
    work = Write(stage.program, stage.tools.folder("pattern-host"), mib, "sync")
    routes = stage.host.routes("millpond", "sshfs", "plain", "passthrough")
    return Trial("host_write", what, work, routes, stage.lengths.repeats, EMULATION)


def small_writes(pages: int, stage: Stage) -> Trial:
    """Of so many pages each, with an fsync. OpenSSH's sftp-server takes 20 to 66 s of processor time for the
    first of a connection, for the next mostly 0.3 s: that is not what is to be compared.
    """
    mib, size = stage.lengths.mib, pages * PAGE
    what = (
        f"host, a new file of {mib} MiB by write()s of {size >> 10} KiB, and an fsync, the second on a mount"
    )
    folder = stage.tools.folder(f"pattern-{size}")
    work = Write(stage.program, folder, mib, "sync", block=size, used=True)
    routes = stage.host.routes("millpond", "plain", "passthrough")
    return Trial(_SMALL_WRITE[pages], what, work, routes, stage.lengths.long_repeats, EMULATION)


def listings(stage: Stage) -> Trial:
    """Of a tree that the host has not looked at."""
    count = stage.lengths.listed
    work = ListTree("listed", count)
    work.make(stage.host.backing)
    what = f"host, ls -lR of {count} files, a thousand in a folder, of a fresh mount"
    routes = stage.host.routes("millpond", "plain", "sshfs", "passthrough")
    return Trial("ls", what, work, routes, stage.lengths.long_repeats, EMULATION)


def unpackings(stage: Stage) -> Trial:
    """Of an archive of small files."""
    count = stage.lengths.unpacked
    work = Untar(stage.tools.folder("archive") / "files.tar", count)
    work.make()
    what = f"host, tar -x of {count} files of 1 to 4 KiB, a hundred in a folder"
    routes = stage.host.routes("millpond", "plain", "sshfs", "passthrough")
    return Trial("untar", what, work, routes, stage.lengths.long_repeats, EMULATION)


def large_together(stage: Stage) -> Trial:
    """Several programs that read a large file each."""
    mib = stage.lengths.each_mib
    work = ReadTogether("together", PROGRAMS, 1, mib * MIB)
    work.make(stage.host.backing)
    what = f"host, {PROGRAMS} programs, each with a file of {mib} MiB of its own, first read by 1 MiB"
    routes = stage.host.routes("together", "one")
    return Trial("parallel", what, work, routes, stage.lengths.repeats, f"{EMULATION}; {_CORES}")


def small_together(stage: Stage) -> Trial:
    """Several programs that read many small files each."""
    count = stage.lengths.each_files
    work = ReadTogether("together", PROGRAMS, count, PAGE)
    work.make(stage.host.backing)
    what = f"host, {PROGRAMS} programs, each with {count} files of 4 KiB of its own, read for the first time"
    routes = stage.host.routes("together", "one")
    return Trial("parallel_small", what, work, routes, stage.lengths.repeats, f"{EMULATION}; {_CORES}")


def creations(stage: Stage) -> Trial:
    """With attributes and removals."""
    count = stage.lengths.created
    what = f"host, create, stat and unlink of {count} files, one after the other"
    routes = stage.host.routes("millpond", "sshfs", "plain", "passthrough")
    return Trial("host_meta", what, CreateFiles(count), routes, stage.lengths.repeats, EMULATION)


def clones(stage: Stage) -> Trial:
    """Of a small repository."""
    work = CloneGit(stage.tools.folder("git") / "source")
    work.make()
    what = "host, git clone of 200 files with some history, and git status"
    routes = stage.host.routes("millpond", "sshfs", "plain", "passthrough")
    return Trial("git", what, work, routes, stage.lengths.long_repeats, EMULATION)


def epochs(stage: Stage) -> Trial:
    """A training set of small files."""
    count = stage.lengths.samples
    work = ReadSamples("samples", count, PAGE)
    work.make(stage.host.backing)
    what = f"host, {count} files of 4 KiB in ten folders, read in shuffled order by one reader"
    routes = stage.host.routes("millpond", "sshfs", "plain")
    return Trial("epoch", what, work, routes, stage.lengths.long_repeats, EMULATION)


def _over(name: str, *peers: str) -> dict[str, str]:
    """Return the ratios over these peers, and the peer's key of each."""
    return {f"{name}_over_{peer}": peer for peer in peers}


PARTS = {
    "host-read": Part(
        "The host reads a file for the first time",
        _over("host_read", "sshfs", "plain", "passthrough"),
        reads,
    ),
    "host-reread": Part(
        "The host reads a file again", _over("host_reread", "native", "passthrough"), rereads
    ),
    "host-random": Part("The host reads at random", _over("host_rand", "plain", "passthrough"), random_reads),
    "host-write": Part("The host writes", _over("host_write", "sshfs", "plain", "passthrough"), writes),
    "host-small-write": Part(
        "The host writes a file by 8 KiB",
        _over("small_write", "plain", "passthrough"),
        functools.partial(small_writes, 2),
    ),
    "host-page-write": Part(
        "The host writes a file by 4 KiB",
        _over("page_write", "plain", "passthrough"),
        functools.partial(small_writes, 1),
    ),
    "host-list": Part("The host lists a tree", _over("ls", "plain", "passthrough"), listings, afresh=True),
    "host-parallel": Part("Several programs read on the host", _over("parallel", "one"), large_together),
    "host-parallel-small": Part(
        "Several programs read small files on the host", _over("parallel_small", "one"), small_together
    ),
    "untar": Part("The host unpacks an archive", _over("untar", "plain", "passthrough"), unpackings),
    "host-meta": Part(
        "The host creates and removes files", _over("host_meta", "plain", "passthrough"), creations
    ),
    "git": Part(
        "The host clones a repository into the volume",
        _over("git", "sshfs", "plain", "passthrough"),
        clones,
    ),
    "epoch": Part(
        "The host reads an epoch of small files",
        _over("epoch", "sshfs", "plain"),
        epochs,
    ),
}


def measure(part: Part, tools: Tools, run: Run) -> Findings:
    """Its rows, of fleets of its own."""
    lengths = QUICK if run.quick else FULL
    if complaint := why_not():
        what = f"not measured: {complaint}"
        missing = [summary(figure, what, [], "x", peer=None, emulation=None) for figure in part.figures]
        return Findings(tuple(missing))
    trial, record = _in_a_fleet(part, tools, lengths, run, Record())
    for repeat in range(1, trial.repeats if part.afresh else 0):
        _in_a_fleet(part, tools, lengths, run, record, repeat)
    rows = [ratio(figure, trial, record, peer) for figure, peer in part.figures.items()]
    return Findings((*rows, *details(trial, record)))


def _in_a_fleet(
    part: Part, tools: Tools, lengths: Lengths, run: Run, record: Record, repeat: int = 0
) -> tuple[Trial, Record]:
    """Add all repeats to the record, or the one where each has a fleet of its own."""
    with fleet(tools.scratch) as host:
        stage = Stage(host, tools.blocks(), tools, lengths)
        make_file(stage.program, host.backing / _FILE, lengths.mib)
        trial = part.trial(stage)
        return trial, take_turns(trial, run, record, [repeat] if part.afresh else None)
