"""Edge (an emulated fleet): the host's mount of a device, against sshfs over the same tunnel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.balance.experiment import Findings, Run
from bench.rows import summary
from bench.volume.blocks import MIB, PAGE, Read, Write, make_file
from bench.volume.fleet import EMULATION, Host, fleet
from bench.volume.measuring import Trial, details, ratio, take_turns
from bench.volume.names import CloneGit, CreateFiles, ReadSamples
from bench.volume.tools import Tools
from system.support import why_not

_FILE = "file"


@dataclass(frozen=True, slots=True)
class Lengths:
    """MiB of a file, random reads, files to create, files to read, repeats, repeats of what takes long."""

    mib: int
    random: int
    created: int
    samples: int
    repeats: int
    long_repeats: int


FULL, QUICK = Lengths(64, 2000, 300, 10_000, 5, 3), Lengths(4, 100, 20, 100, 1, 1)


@dataclass(frozen=True, slots=True)
class Stage:
    """What the parts are measured with."""

    host: Host
    program: Path
    tools: Tools
    lengths: Lengths


Figures = dict[str, str]
"""Of a trial: figures, and the peer's key of each."""


def reads(stage: Stage) -> tuple[Trial, Figures]:
    """First reads."""
    mib = stage.lengths.mib
    what = f"host, first read of {mib} MiB by 1 MiB; on the device they are in memory"
    routes = stage.host.routes("millpond", "sshfs", "plain")
    work = Read(stage.program, _FILE, MIB, mib, "sequential")
    trial = Trial("host_read", what, work, routes, stage.lengths.repeats, EMULATION)
    return trial, {"host_read_over_sshfs": "sshfs", "host_read_over_plain": "plain"}


def rereads(stage: Stage) -> tuple[Trial, Figures]:
    """Of what the host has read before."""
    mib = stage.lengths.mib
    what = f"host, {mib} MiB by 1 MiB once more after a first read"
    routes = stage.host.routes("millpond", "native", "sshfs")
    work = Read(stage.program, _FILE, MIB, mib, "sequential", again=True)
    trial = Trial("host_reread", what, work, routes, stage.lengths.repeats, EMULATION)
    return trial, {"host_reread_over_native": "native"}


def random_reads(stage: Stage) -> tuple[Trial, Figures]:
    """Of a file not read before."""
    count = stage.lengths.random
    what = f"host, {count} random reads of 4 KiB of a file of {stage.lengths.mib} MiB, not read before"
    work = Read(stage.program, _FILE, PAGE, count, "random")
    routes = stage.host.routes("millpond", "sshfs", "plain")
    trial = Trial("host_rand", what, work, routes, stage.lengths.repeats, EMULATION)
    return trial, {"host_rand_over_plain": "plain"}


def writes(stage: Stage) -> tuple[Trial, Figures]:
    """With an fsync."""
    mib = stage.lengths.mib
    what = f"host, a new file of {mib} MiB written by 1 MiB, and an fsync"
    work = Write(stage.program, stage.tools.folder("pattern-host"), mib, "sync")
    routes = stage.host.routes("millpond", "sshfs", "plain")
    trial = Trial("host_write", what, work, routes, stage.lengths.repeats, EMULATION)
    return trial, {"host_write_over_sshfs": "sshfs"}


def creations(stage: Stage) -> tuple[Trial, Figures]:
    """With attributes and removals."""
    count = stage.lengths.created
    what = f"host, create, stat and unlink of {count} files, one after the other"
    routes = stage.host.routes("millpond", "sshfs", "plain")
    trial = Trial("host_meta", what, CreateFiles(count), routes, stage.lengths.repeats, EMULATION)
    return trial, {"host_meta_over_plain": "plain"}


def clones(stage: Stage) -> tuple[Trial, Figures]:
    """Of a small repository."""
    work = CloneGit(stage.tools.folder("git") / "source")
    work.make()
    what = "host, git clone of 200 files with some history, and git status"
    routes = stage.host.routes("millpond", "sshfs")
    trial = Trial("git", what, work, routes, stage.lengths.long_repeats, EMULATION)
    return trial, {"git_over_sshfs": "sshfs"}


def epochs(stage: Stage) -> tuple[Trial, Figures]:
    """A training set of small files."""
    count = stage.lengths.samples
    work = ReadSamples("samples", count, PAGE)
    work.make(stage.host.backing)
    what = (
        f"host, {count} files of 4 KiB in ten folders, read in shuffled order by one reader, without prefetch"
    )
    routes = stage.host.routes("millpond", "sshfs")
    trial = Trial("epoch", what, work, routes, stage.lengths.long_repeats, EMULATION)
    return trial, {"epoch_over_sshfs": "sshfs"}


Part = Callable[[Stage], tuple[Trial, Figures]]
PARTS: dict[str, tuple[str, Part]] = {
    "host-read": ("The host reads a file for the first time", reads),
    "host-reread": ("The host reads a file again", rereads),
    "host-random": ("The host reads at random", random_reads),
    "host-write": ("The host writes", writes),
    "host-meta": ("The host creates and removes files", creations),
    "git": ("The host clones a repository into the volume", clones),
    "epoch": ("The host reads an epoch of small files", epochs),
}


def measure(part: Part, tools: Tools, run: Run) -> Findings:
    """Its rows, of a fleet of its own."""
    lengths = QUICK if run.quick else FULL
    if complaint := why_not():
        row = summary(part.__name__, f"not measured: {complaint}", [], "x", peer=None, emulation=None)
        return Findings((row,))
    with fleet(tools.scratch) as host:
        stage = Stage(host, tools.blocks(), tools, lengths)
        make_file(stage.program, host.backing / _FILE, lengths.mib)
        trial, figures = part(stage)
        record = take_turns(trial, run)
    rows = [ratio(figure, trial, record, peer) for figure, peer in figures.items()]
    return Findings((*rows, *details(trial, record)))
