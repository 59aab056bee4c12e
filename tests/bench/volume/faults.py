# SPDX-License-Identifier: Apache-2.0
"""Edge (an emulated fleet): the host's mount of a device with a slow flash, or of one that stands still."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.experiment import Run, Unmeasured
from bench.rows import Row, summary
from bench.tunnel.accounting import tree
from bench.volume.blocks import MIB
from bench.volume.fleet import DEVICE, EMULATION, Host, fleet, mounted
from bench.volume.route import RouteFailed
from bench.volume.tools import Tools
from millpond.fs.store.layout import prepare
from millpond.linux import syscalls

_THROTTLE = Path("/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device")
"""The root control group's, of cgroup version 1: it holds for all who write, the kernel's own threads too."""
_PATH = ":/usr/sbin:/sbin"
_SLACK = 2
"""The flash must take at least half of the time that its speed says; the controller lets through what is
written in its first slices, of 0.1 s.
"""


@dataclass(frozen=True, slots=True)
class SlowFlash:
    """MiB written, MiB per second that the flash takes, repeats."""

    mib: int
    speed: int
    repeats: int


@dataclass(frozen=True, slots=True)
class Stalled:
    """Programs that ask for attributes, repeats, the mount's timeout, and seconds after which the device goes
    on.
    """

    programs: int
    repeats: int
    timeout: float
    patience: float


SLOW_FULL, SLOW_QUICK = SlowFlash(512, 20, 2), SlowFlash(32, 20, 1)
STALLED_FULL, STALLED_QUICK = Stalled(20, 3, 5.0, 120.0), Stalled(2, 1, 5.0, 60.0)


def measure_slow_flash(tools: Tools, run: Run) -> list[Row]:
    """Rows ``slow_flash`` and ``slow_flash_seconds``."""
    lengths = SLOW_QUICK if run.quick else SLOW_FULL
    if complaint := _cannot_throttle():
        raise Unmeasured(complaint)
    note = (
        f"{EMULATION}; the flash is ext4 on a loop device, throttled by the control group's blkio controller"
    )
    errors: list[float] = []
    seconds: list[float] = []
    kinds = Counter[str]()
    for repeat in range(lengths.repeats):
        with _slow_fleet(tools, lengths) as (host, slow):
            found, took = _write_and_sync(host, slow, lengths, repeat)
        errors.append(found.total())
        seconds.append(took)
        kinds += found
        run.say(f"slow_flash: {repeat + 1} of {lengths.repeats}: {dict(found) or 'no error'}, {took:.1f} s")
    what = f"host, {lengths.mib} MiB written and one fsync, the flash takes {lengths.speed} MiB/s"
    seen = ", ".join(f"{number} {kind}" for kind, number in kinds.items()) or "none"
    return [
        summary("slow_flash", f"{what}: errors ({seen})", errors, "errors", emulation=note),
        summary("slow_flash_seconds", f"{what}: until fsync is over", seconds, "s", emulation=note),
    ]


def _cannot_throttle() -> str | None:
    if not os.access(_THROTTLE, os.W_OK):
        return f"{_THROTTLE} may not be written: it takes root and cgroup version 1's blkio controller"
    return None if os.access("/dev/loop-control", os.R_OK | os.W_OK) else "there are no loop devices"


@contextlib.contextmanager
def _slow_fleet(tools: Tools, lengths: SlowFlash) -> Iterator[tuple[Host, Path]]:
    """A fleet, and the statistics of its device's flash."""
    image = tools.scratch / "image"
    with image.open("wb") as file:
        file.truncate(4 * lengths.mib * MIB + 256 * MIB)
    devices: list[str] = []

    @contextlib.contextmanager
    def slow(top: Path) -> Iterator[None]:
        with _loop_mounted(image, top) as loop:
            prepare(top)
            devices.append(Path(loop).name)
            number = Path(loop).stat().st_rdev
            with _throttled(f"{os.major(number)}:{os.minor(number)}", lengths.speed):
                yield

    try:
        with fleet(tools.scratch, slow) as host:
            yield host, Path("/sys/block", devices[0], "stat")
    finally:
        image.unlink()


@contextlib.contextmanager
def _loop_mounted(image: Path, top: Path) -> Iterator[str]:
    """ext4 in a file, mounted; its loop device."""
    _command("mke2fs", "-q", "-t", "ext4", "-m", "0", str(image))
    loop = _command("losetup", "--find", "--show", str(image))
    try:
        syscalls.mount(loop, top, "ext4")
        try:
            yield loop
        finally:
            syscalls.unmount(top)
    finally:
        _command("losetup", "--detach", loop)  # at the latest when nothing has it mounted any more


@contextlib.contextmanager
def _throttled(device: str, speed: int) -> Iterator[None]:
    _THROTTLE.write_text(f"{device} {speed * MIB}")
    try:
        yield
    finally:
        _THROTTLE.write_text(f"{device} 0")


def _command(*argv: str) -> str:
    environment = os.environ | {"PATH": os.environ["PATH"] + _PATH}
    done = subprocess.run(argv, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RouteFailed(f"{argv[0]}: {' '.join(done.stderr.split())}")
    return done.stdout.strip()


def _write_and_sync(host: Host, slow: Path, lengths: SlowFlash, repeat: int) -> tuple[Counter[str], float]:
    """Return the errors of the program that writes and syncs, and how long the sync took. Raises RouteFailed
    if the flash was not slow, or has other contents in spite of a sync without an error.
    """
    errors = Counter[str]()
    data = os.urandom(MIB)
    name = f"slow{repeat}"
    with (
        host.routes("millpond")[0].opened() as mount,
        (mount.folder / name).open("wb", buffering=0) as file,
    ):
        before, began = _written(slow), time.monotonic()
        for _ in range(lengths.mib):
            with _counted(errors):
                file.write(data)
        synced = time.monotonic()
        with _counted(errors):
            os.fsync(file.fileno())
        seconds = time.monotonic() - synced
        written, taken = (_written(slow) - before) / MIB, time.monotonic() - began
        if taken < written / lengths.speed / _SLACK:
            raise RouteFailed(f"the flash took {written:.0f} MiB in {taken:.1f} s: it was not slow")
        if not errors and (mount.backing / name).read_bytes() != data * lengths.mib:
            raise RouteFailed("other contents than were written")
    return errors, seconds


@contextlib.contextmanager
def _counted(errors: Counter[str]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        errors[errno.errorcode.get(error.errno or 0, "EIO")] += 1


def _written(statistics: Path) -> int:
    """Return the bytes that were written to a block device."""
    return int(statistics.read_text().split()[6]) * 512


def measure_stalled(tools: Tools, run: Run) -> list[Row]:
    """Row ``stalled_stats``."""
    lengths = STALLED_QUICK if run.quick else STALLED_FULL
    values: list[float] = []
    kinds = Counter[str]()
    with fleet(tools.scratch) as host:
        for repeat in range(lengths.repeats):
            seconds, found = _stall(host, lengths, repeat)
            values.append(seconds)
            kinds += found
            run.say(f"stalled_stats: {repeat + 1} of {lengths.repeats}: {seconds:.1f} s, {dict(found)}")
    seen = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
    what = (
        f"host, {lengths.programs} stats at once of a stopped device, timeout={lengths.timeout:.0f}: "
        "until the last one ends"
    )
    limit = f"; went on after {lengths.patience:.0f} s" if max(values) >= lengths.patience else ""
    note = f"{EMULATION}; all processes of the device are stopped by SIGSTOP"
    return [summary("stalled_stats", f"{what} ({seen}{limit})", values, "s", emulation=note)]


def _stall(host: Host, lengths: Stalled, repeat: int) -> tuple[float, Counter[str]]:
    """Return when the last one ended, and how all did."""
    folder = host.backing / f"stalled{repeat}"
    folder.mkdir()
    for number in range(lengths.programs):
        (folder / str(number)).touch()
    with mounted(host, timeout=lengths.timeout) as mount:
        place = mount.folder / folder.name
        place.stat()  # its way is known; the files are not
        began = time.monotonic()
        with _stopped(host.emulation.pid_one(DEVICE)):
            ended = _stats([place / str(number) for number in range(lengths.programs)], lengths.patience)
            seconds = time.monotonic() - began
        ended.wait()
    shutil.rmtree(folder)
    return seconds, ended.kinds


@contextlib.contextmanager
def _stopped(first: psutil.Process) -> Iterator[None]:
    pids = tree([first.pid])
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@dataclass(frozen=True, slots=True)
class _Stats:
    threads: list[threading.Thread]
    kinds: Counter[str]

    def wait(self, seconds: float | None = None) -> None:
        """Wait until all have ended, or the seconds are over."""
        end = None if seconds is None else time.monotonic() + seconds
        for thread in self.threads:
            thread.join(None if end is None else max(0.0, end - time.monotonic()))


def _stats(paths: list[Path], patience: float) -> _Stats:
    """Ask for the attributes of all files at once; wait until all have an answer, at most ``patience``."""
    kinds = Counter[str]()

    def ask(path: Path) -> None:
        with _counted(kinds):
            path.stat()
            kinds["answered"] += 1

    found = _Stats([threading.Thread(target=ask, args=(path,), daemon=True) for path in paths], kinds)
    for thread in found.threads:
        thread.start()
    found.wait(patience)
    return found
