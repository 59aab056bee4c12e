# SPDX-License-Identifier: Apache-2.0
"""Edge (processes): a walk over more files than a mount may have descriptors, and a read of each.

It takes long, so it is done only if it is named; see ``--files``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench.experiment import Run
from bench.rows import Row, summary
from bench.tunnel.accounting import tree
from bench.volume.fleet import EMULATION, fleet
from bench.volume.ondevice import make_device
from bench.volume.route import Mount, RouteFailed
from bench.volume.tools import Tools

DESCRIPTORS = 65_536
"""The limit of open descriptors of each process, RLIMIT_NOFILE, or less where no more are allowed."""
FULL, QUICK = 1_200_000, 300
_IN_A_FOLDER = 1200  # about as many as a class of ImageNet has
_MOST_ERRORS = 1000
_FOLDER = "million"
_KIB = 1024


@dataclass(frozen=True, slots=True)
class Part:
    """``key`` ends the figures; ``place`` is what the rows say, ``measured`` opens the mount."""

    title: str
    key: str
    place: str
    measured: Callable[[Tools, int, Run], Walked]


@dataclass(slots=True)
class Walked:
    """What happened. ``peak_mib`` is the most memory of the mount's process, None where there is none."""

    emulation: str = ""
    descriptors: int = 0
    found: int = 0
    read: int = 0
    walk_seconds: float = 0
    read_seconds: float = 0
    errors: Counter[str] = field(default_factory=Counter)
    peak_mib: float | None = None

    def failed(self, error: OSError) -> None:
        """Count an error. Raises RouteFailed beyond what makes sense to wait for."""
        self.errors[errno.errorcode.get(error.errno or 0, "EIO")] += 1
        if self.errors.total() >= _MOST_ERRORS:
            raise _TooManyErrors


class _TooManyErrors(Exception):
    """The walk is not worth going on with."""


def measure(part: Part, tools: Tools, run: Run) -> list[Row]:
    """Rows ``million_files``, ``million_files_mib``, and speeds, each of the part's key."""
    count = tools.files or (QUICK if run.quick else FULL)
    with _descriptors() as most:
        walked = part.measured(tools, count, run)
    walked.descriptors = most
    return list(_rows(part, count, walked))


@contextlib.contextmanager
def _descriptors() -> Iterator[int]:
    """Give programs that are started meanwhile the limit of descriptors, which is the value."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTORS
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (OSError, ValueError):  # it takes CAP_SYS_RESOURCE
        most = min(before[1], DESCRIPTORS)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        yield most
    finally:
        with contextlib.suppress(OSError, ValueError):  # only root may raise it again
            resource.setrlimit(resource.RLIMIT_NOFILE, before)


def _rows(part: Part, count: int, walked: Walked) -> Iterator[Row]:
    text = f"{part.place}, {count} files listed with attributes, then read; {walked.descriptors} descriptors"
    if walked.descriptors < DESCRIPTORS:
        text += f" (this machine allows no more; {DESCRIPTORS} were wanted)"
    kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(walked.errors.items())) or "no error"
    seen = f"{walked.found} found, {walked.read} read, {kinds}"
    if walked.errors.total() >= _MOST_ERRORS:
        seen += f"; stopped at {_MOST_ERRORS} errors"

    def row(figure: str, what: str, value: float | None, unit: str) -> Row:
        values = [] if value is None else [value]
        return summary(f"{figure}.{part.key}", what, values, unit, emulation=walked.emulation)

    lost = max(walked.errors.total(), count - walked.read)
    errors = lost if walked.errors.total() < _MOST_ERRORS else walked.errors.total()
    yield row("million_files", f"{text}: errors ({seen})", errors, "errors")
    if walked.peak_mib is None:
        yield row("million_files_mib", "not measured: no process serves the private part", None, "MiB")
    else:
        yield row("million_files_mib", f"{text}: peak of the mount's process", walked.peak_mib, "MiB")
    for what, done, seconds in (
        ("walk", walked.found, walked.walk_seconds),
        ("read", walked.read, walked.read_seconds),
    ):
        speed = done / seconds if seconds else None
        yield row(f"million_files_{what}", f"{text}: {what}, files per second", speed, "1/s")


def make_files(folder: Path, count: int) -> None:
    """Make ``count`` files, each with its own path in it."""
    for number in range(count):
        if number % _IN_A_FOLDER == 0:
            place = folder / f"{number // _IN_A_FOLDER:05}"
            place.mkdir(parents=True)
        name = f"{place.name}/{number:07}"
        descriptor = os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(descriptor, name.encode())
        os.close(descriptor)


def _walk(mount: Mount, walked: Walked, run: Run) -> None:
    """Walk and read. Raises RouteFailed if anything read is other than what was written."""
    top = mount.folder / _FOLDER
    with contextlib.suppress(_TooManyErrors):
        began = time.perf_counter()
        paths = _list(os.fspath(top), walked)
        walked.walk_seconds = time.perf_counter() - began
        run.say(f"{walked.found} files found in {walked.walk_seconds:.1f} s, {walked.errors.total()} errors")
        _read(top, paths, walked)
    run.say(f"{walked.read} files read in {walked.read_seconds:.1f} s, {walked.errors.total()} errors")
    if mount.near:
        walked.peak_mib = sum(_peak_kib(pid) for pid in tree(mount.near)) / _KIB


def _list(top: str, walked: Walked) -> list[str]:
    """Return the paths of all files, each of whose attributes was asked for."""
    paths = []
    for folder in _names(top, walked):
        for path in _names(folder, walked):
            try:
                os.lstat(path)
            except OSError as error:
                walked.failed(error)
            else:
                walked.found += 1
                paths.append(path)
    return paths


def _names(folder: str, walked: Walked) -> list[str]:
    try:
        return [f"{folder}/{name}" for name in sorted(os.listdir(folder))]  # noqa: PTH208 - less of our own
    except OSError as error:
        walked.failed(error)
        return []


def _read(top: Path, paths: list[str], walked: Walked) -> None:
    began, skip = time.perf_counter(), len(os.fspath(top)) + 1
    try:
        for path in paths:
            try:
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    said = os.read(descriptor, 4096)
                finally:
                    os.close(descriptor)
            except OSError as error:
                walked.failed(error)
                continue
            if said.decode() != path[skip:]:
                raise RouteFailed(f"{path}: other contents than were written")
            walked.read += 1
    finally:
        walked.read_seconds = time.perf_counter() - began


def _peak_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    raise RouteFailed(f"process {pid} has ended")


def _on_device(key: str, tools: Tools, count: int, run: Run) -> Walked:
    device = make_device(tools, f"million-{key}")
    made = time.monotonic()
    make_files(device.flash / key / _FOLDER, count)
    run.say(f"{count} files made in {time.monotonic() - made:.0f} s")
    walked = Walked(device.note)
    with device.routes(key)[0].opened() as mount:
        walked.emulation += f"; the mount says: {mount.how}"
        _walk(mount, walked, run)
    if key == "private":
        walked.peak_mib = None  # the mount's process serves the public part alone
    shutil.rmtree(device.folder)
    return walked


def _on_host(tools: Tools, count: int, run: Run) -> Walked:
    walked = Walked(EMULATION)
    with fleet(tools.scratch) as host:
        make_files(host.backing / _FOLDER, count)
        with host.routes("millpond")[0].opened() as mount:
            _walk(mount, walked, run)
    return walked


PARTS = {
    "million-private": Part(
        "A million private files on the device",
        "private",
        "device, private part",
        lambda tools, count, run: _on_device("private", tools, count, run),
    ),
    "million-public": Part(
        "A million public files on the device",
        "public",
        "device, public part",
        lambda tools, count, run: _on_device("public", tools, count, run),
    ),
    "million-host": Part("A million public files on the host", "host", "host", _on_host),
}
