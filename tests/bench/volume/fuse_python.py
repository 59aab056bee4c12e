# SPDX-License-Identifier: Apache-2.0
"""Edge (FUSE): the device's mount by fuse-python, against libfuse's C example that passes everything on."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.experiment import Run, Unmeasured
from bench.rows import Row, summary
from bench.tunnel.record import Record
from bench.volume.blocks import MIB, PAGE, Read, Write, make_file
from bench.volume.measuring import Trial, details, ratio, take_turns
from bench.volume.route import Mount, Route, served
from bench.volume.tools import Tools, file_system
from bench.volume.workload import Workload
from millpond.fs.store.layout import PUBLIC, prepare

_FILE, _FIGURE = "file", "device_fusepython_over_c"
_PEER, _LABEL = "c", "libfuse's C example"


@dataclass(frozen=True, slots=True)
class Lengths:
    """MiB of a file, random reads, repeats."""

    mib: int
    reads: int
    repeats: int


FULL, QUICK = Lengths(64, 16384, 9), Lengths(8, 500, 2)


def measure(tools: Tools, run: Run) -> list[Row]:
    """Row ``device_fusepython_over_c``, and one each for reads and writes."""
    if tools.c_example is None:
        raise Unmeasured("libfuse's example was not given (--c-example PROGRAM)", _FIGURE)
    trials = _trials(tools, tools.c_example, QUICK if run.quick else FULL)
    records = [take_turns(trial, run) for trial in trials]
    rows = [_worst(trials, records)]
    rows += [ratio(f"{t.name}_over_c", t, r, _PEER) for t, r in zip(trials, records, strict=True)]
    for trial, record in zip(trials, records, strict=True):
        rows += details(trial, record)
    return rows


def _trials(tools: Tools, c_example: Path, lengths: Lengths) -> list[Trial]:
    program, flash, pattern = tools.blocks(), tools.folder("fuse-python"), tools.folder("pattern")
    prepare(flash)
    make_file(program, flash / PUBLIC / _FILE, lengths.mib)
    example = c_example.absolute()
    routes = (
        Route(
            "millpond", "millpond's device mount, --binding fuse-python", lambda: _ours(flash, tools.scratch)
        ),
        Route(_PEER, f"{_LABEL} {example.name}", lambda: _example(example, flash / PUBLIC, tools.scratch)),
    )
    note = f"the device is this machine, its flash a folder on {file_system(flash)}; there is no tunnel"
    return [
        Trial(name, f"device by fuse-python, {what}", workload, routes, lengths.repeats, note)
        for name, what, workload in _workloads(program, pattern, lengths)
    ]


def _workloads(program: Path, pattern: Path, lengths: Lengths) -> list[tuple[str, str, Workload]]:
    read = Read(program, _FILE, MIB, lengths.mib, "sequential")
    write = Write(program, pattern, lengths.mib, "nosync")
    random = Read(program, _FILE, PAGE, lengths.reads, "random")
    mib = f"{lengths.mib} MiB"
    return [
        ("device_fusepython_read", f"sequential reads of 1 MiB, {mib}, first of a fresh mount", read),
        ("device_fusepython_write", f"writes of 1 MiB, {mib}, a new file, no fsync", write),
        ("device_fusepython_rand", f"random reads of 4 KiB, {mib}, first of a fresh mount", random),
    ]


@contextlib.contextmanager
def _ours(flash: Path, scratch: Path) -> Iterator[Mount]:
    """The public part; no server is beside it, as the example has none."""
    mountpoint = scratch / "mount"
    argv = [sys.executable, "-m", "millpond.fs.mount.device", str(flash), str(mountpoint), "--name", "bench"]
    with served([*argv, "--binding", "fuse-python"], mountpoint, "ready") as server:
        yield Mount(mountpoint / PUBLIC, flash / PUBLIC, (server.pid,))


@contextlib.contextmanager
def _example(program: Path, folder: Path, scratch: Path) -> Iterator[Mount]:
    mountpoint = scratch / "c-mount"
    with served([str(program), str(mountpoint), "-f"], mountpoint) as server:
        yield Mount(mountpoint / folder.relative_to("/"), folder, (server.pid,))


def _worst(trials: list[Trial], records: list[Record]) -> Row:
    """Of sequential reads and writes."""
    found = [r.ratios("speed", "millpond", _PEER) for r in records[:2]]
    peer = trials[0].routes[1].label
    values = [min(pair) for pair in zip(*found, strict=False)]
    what = "device by fuse-python, the worse of sequential reads and writes: speed over that of the example"
    if not values:
        reasons = [record.missing[_PEER] for record in records if _PEER in record.missing]
        what = f"not measured: {peer}: {'; '.join(reasons)}"
    return summary(_FIGURE, what, values, "x", peer=peer, emulation=trials[0].emulation)
