# SPDX-License-Identifier: Apache-2.0
"""Edge (FUSE): a volume on its device, against the backing file system.

The files are reached as programs of a device reach them: the private part is the flash itself, the public
part a FUSE mount by the raw binding with the server beside it, and a job's worker has the public part in its
sandbox.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from bench.experiment import Run
from bench.rows import Row, summary
from bench.tunnel.record import Record
from bench.volume.blocks import MIB, PAGE, ReadOpened, make_file
from bench.volume.measuring import Trial, details, ratio, take_turns
from bench.volume.names import ReadSamples
from bench.volume.ondevice import Device, make_device
from bench.volume.route import Route
from bench.volume.small import ReadByProgram, cannot_drop_caches
from bench.volume.tools import Tools
from bench.volume.workload import Workload
from millpond.fs.store.layout import PRIVATE, PUBLIC

_FILE, _SAMPLES = "file", "small"
_SMALL = {"private": "device_private_small", "public": "device_public_small", "worker": "worker_small"}
"""The beginning of the figures of each route."""
_COLD = "first time, the kernel's caches dropped once the mount was up (/proc/sys/vm/drop_caches)"
_WARM = "again by the same program, after it has read them once"


@dataclass(frozen=True, slots=True)
class Lengths:
    """MiB of the file, how many times all of it is read, small files, repeats; small files of the experiment
    with nothing else, its repeats.
    """

    mib: int
    passes: int
    files: int
    repeats: int
    samples: int
    sample_repeats: int


FULL, QUICK = Lengths(64, 8, 1000, 9, 10_000, 5), Lengths(8, 2, 50, 2, 100, 1)


def measure(tools: Tools, run: Run) -> list[Row]:
    """Rows ``device_seq_over_native``, ``device_rand_over_native``, ``device_daemon_us_per_mib`` and
    ``device_small_over_native``: the public part.
    """
    trials = _trials(tools, QUICK if run.quick else FULL, run)
    records = [take_turns(trial, run) for trial in trials]
    rows = [ratio(f"{t.name}_over_native", t, r, "native") for t, r in zip(trials, records, strict=True)]
    rows.insert(2, _daemon(trials[0].emulation, *records[:2]))
    for trial, record in zip(trials, records, strict=True):
        rows += details(trial, record)
    return rows


def _trials(tools: Tools, lengths: Lengths, run: Run) -> list[Trial]:
    program, device = tools.blocks(), make_device(tools, "device")
    make_file(program, device.flash / PUBLIC / _FILE, lengths.mib)
    routes = device.routes("public", "native")
    note = _note(device, routes[0], run)
    return [
        Trial(name, what, workload, routes, lengths.repeats, note)
        for name, what, workload in _workloads(program, device, lengths)
    ]


def _workloads(program: Path, device: Device, lengths: Lengths) -> list[tuple[str, str, Workload]]:
    """Sequential reads, random reads, and small files, which are made here."""
    total = lengths.mib * lengths.passes
    file = f"a public file of {lengths.mib} MiB that is open, read {lengths.passes} times"
    sequential = ReadOpened(program, _FILE, MIB, total, "sequential")
    random = ReadOpened(program, _FILE, PAGE, total * MIB // PAGE, "random")
    small = ReadSamples(_SAMPLES, lengths.files, PAGE)
    small.make(device.flash / PUBLIC)
    files = (
        f"{lengths.files} public files of 4 KiB, which are in memory, opened and read once in shuffled order"
    )
    return [
        ("device_seq", f"device, sequential reads of 1 MiB, {file}", sequential),
        ("device_rand", f"device, random reads of 4 KiB, {file}", random),
        ("device_small", f"device, {files} of a fresh mount", small),
    ]


def _note(device: Device, route: Route, run: Run) -> str:
    """What is emulated, and how the mount that will be measured reads files."""
    with route.opened() as mount:
        run.say(f"device: {mount.how}")
        return f"{device.note}; the mount says: {mount.how}"


def _daemon(note: str, sequential: Record, random: Record) -> Row:
    """Over both: as many MiB of one as of the other."""
    pairs = zip(sequential.values("near", "public"), random.values("near", "public"), strict=True)
    values = [(per_mib + per_page * MIB / PAGE) / 2 for per_mib, per_page in pairs]
    what = "processor time of the device mount's process, sequential and random reads together"
    return summary("device_daemon_us_per_mib", what, values, "us/MiB", emulation=note)


def measure_small(tools: Tools, run: Run) -> list[Row]:
    """Rows ``device_private_small_over_native``, ``device_public_small_over_native`` and
    ``worker_small_over_native``, of the first time, and those with ``_again``.
    """
    lengths = QUICK if run.quick else FULL
    device = make_device(tools, "device-small")
    samples = ReadSamples(_SAMPLES, lengths.samples, PAGE)
    samples.make(device.flash / PUBLIC)
    shutil.copytree(device.flash / PUBLIC / _SAMPLES, device.flash / PRIVATE / _SAMPLES)
    note = _note(device, device.routes("public")[0], run)
    rows: list[Row] = []
    for again in (False, True):
        rows += _small(device, ReadByProgram(samples, again), lengths.sample_repeats, note, run)
    return sorted(rows, key=lambda row: row.unit != "x")


def _small(device: Device, work: ReadByProgram, repeats: int, note: str, run: Run) -> list[Row]:
    suffix, when = ("_again", _WARM) if work.again else ("", _COLD)
    figures = {f"{name}{suffix}_over_native": key for key, name in _SMALL.items()}
    complaint = None if work.again else cannot_drop_caches()
    if complaint:
        what = f"not measured: {complaint}"
        return [summary(figure, what, [], "x", emulation=note) for figure in figures]
    what = f"device, {work.samples.count} files of 4 KiB opened and read in shuffled order, {when}"
    routes = device.routes(*_SMALL, "native")
    trial = Trial(f"device_small_files{suffix}", what, work, routes, repeats, note)
    record = take_turns(trial, run)
    rows = [ratio(figure, trial, record, "native", key) for figure, key in figures.items()]
    return [*rows, *details(trial, record)]
