# SPDX-License-Identifier: Apache-2.0
"""Edge (FUSE): the device's mount by the raw binding, against the backing file system."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.balance.experiment import Findings, Run
from bench.rows import Row, summary
from bench.tunnel.record import Record
from bench.volume.blocks import MIB, PAGE, ReadOpened, make_file
from bench.volume.measuring import Trial, details, ratio, take_turns
from bench.volume.names import ReadSamples
from bench.volume.route import Mount, Route, native, served
from bench.volume.tools import Tools, file_system
from bench.volume.workload import Workload
from millpond.fs.store.layout import PRIVATE, prepare

_FILE = "file"


@dataclass(frozen=True, slots=True)
class Lengths:
    """MiB of the file, how many times all of it is read, small files, repeats."""

    mib: int
    passes: int
    files: int
    repeats: int


FULL, QUICK = Lengths(64, 8, 1000, 9), Lengths(8, 2, 50, 2)


def local_route(flash: Path, scratch: Path, binding: str) -> Route:
    """Millpond's mount of the device's own volume; the workload's files are in its private part."""
    opened = functools.partial(_local, flash, scratch, binding)
    return Route("millpond", f"millpond's device mount, --binding {binding}", opened)


@contextlib.contextmanager
def _local(flash: Path, scratch: Path, binding: str) -> Iterator[Mount]:
    mountpoint = scratch / "mount"
    argv = [sys.executable, "-m", "millpond.fs.mount.device", str(flash), str(mountpoint), "--name", "bench"]
    with served([*argv, "--binding", binding], mountpoint, "ready") as server:
        how = server.said.partition("ready: ")[2]
        yield Mount(mountpoint / PRIVATE, flash / PRIVATE, (server.pid,), how=how)


def measure(tools: Tools, run: Run) -> Findings:
    """Rows ``device_seq_over_native``, ``device_rand_over_native``, ``device_daemon_us_per_mib``."""
    trials = _trials(tools, QUICK if run.quick else FULL, run)
    records = [take_turns(trial, run) for trial in trials]
    rows = [ratio(f"{t.name}_over_native", t, r, "native") for t, r in zip(trials, records, strict=True)]
    rows.insert(2, _daemon(trials[0].emulation, *records[:2]))
    for trial, record in zip(trials, records, strict=True):
        rows += details(trial, record)
    return Findings(tuple(rows))


def _trials(tools: Tools, lengths: Lengths, run: Run) -> list[Trial]:
    program, flash = tools.blocks(), tools.folder("device")
    prepare(flash)
    make_file(program, flash / PRIVATE / _FILE, lengths.mib)
    ours = local_route(flash, tools.scratch, "raw")
    routes = (ours, Route("native", "the backing file system", lambda: native(flash / PRIVATE)))
    note = _note(flash, ours, run)
    return [
        Trial(name, what, workload, routes, lengths.repeats, note)
        for name, what, workload in _workloads(program, flash / PRIVATE, lengths)
    ]


def _workloads(program: Path, folder: Path, lengths: Lengths) -> list[tuple[str, str, Workload]]:
    """Sequential reads, random reads, small files, which are made in ``folder``."""
    total = lengths.mib * lengths.passes
    file = f"a file of {lengths.mib} MiB that is open, read {lengths.passes} times"
    sequential = ReadOpened(program, _FILE, MIB, total, "sequential")
    random = ReadOpened(program, _FILE, PAGE, total * MIB // PAGE, "random")
    small = ReadSamples("small", lengths.files, PAGE)
    small.make(folder)
    files = f"{lengths.files} files of 4 KiB, opened and read in shuffled order"
    return [
        ("device_seq", f"device, sequential reads of 1 MiB, {file}", sequential),
        ("device_rand", f"device, random reads of 4 KiB, {file}", random),
        ("device_small", f"device, {files}", small),
    ]


def _note(flash: Path, route: Route, run: Run) -> str:
    """What is emulated, and how the mount that will be measured reads files."""
    with route.opened() as mount:
        run.say(f"device: {mount.how}")
        return (
            f"the device is this machine, its flash a folder on {file_system(flash)}; there is no tunnel; "
            f"the mount says: {mount.how}"
        )


def _daemon(note: str, sequential: Record, random: Record) -> Row:
    """Over both: as many MiB of one as of the other."""
    pairs = zip(sequential.values("near", "millpond"), random.values("near", "millpond"), strict=True)
    values = [(per_mib + per_page * MIB / PAGE) / 2 for per_mib, per_page in pairs]
    what = "processor time of the device mount's process, sequential and random reads together"
    return summary("device_daemon_us_per_mib", what, values, "us/MiB", peer=None, emulation=note)
