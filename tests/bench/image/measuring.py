# SPDX-License-Identifier: Apache-2.0
"""Edge: the figures of an image: taken on the image itself, booted in QEMU where it must run."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.rows import Row, summary
from millpond.base.errors import MillpondError
from millpond.host.remote import bundles
from millpond.images.format import locate
from millpond.linux.files import sha256_of
from system.qemu import Board, create

EMULATION = "QEMU's machine virt under TCG, Cortex-A72, 2 processors: no speed of a board"
MIB = 1 << 20
_IDLE_SECONDS = 30.0
_PSS = (
    "for p in $(cat /sys/fs/cgroup/system.slice/millpond-agent.service/cgroup.procs); do "
    "grep ^Pss: /proc/$p/smaps_rollup; done; true"
)


@dataclass(frozen=True)
class Setting:
    """What is measured, and where there is room for it."""

    image: Path
    scratch: Path
    repeats: int
    cuts: int


def _row(figure: str, what: str, values: list[float], unit: str, emulation: str | None = None) -> Row:
    return summary(figure, what, values, unit, emulation=emulation)


def size(setting: Setting) -> list[Row]:
    """What crosses the link in an update: root, kernel and initial file system, compressed."""
    path, manifest = locate.find(setting.image)
    fleet = create(setting.scratch / "size", setting.image).fleet
    bundle = bundles.make(fleet, path, manifest).path.stat().st_size / MIB
    root = (setting.image / "root.squashfs").stat().st_size / MIB
    return [
        _row("compressed_mib", "an update: root, kernel and all else, compressed", [bundle], "MiB"),
        _row("root_mib", "of it the root", [root], "MiB"),
    ]


def boot(setting: Setting) -> list[Row]:
    """From power-on to the host's greeting, and the agent's memory half a minute later."""
    seconds, idle, load = [], [], []
    board = create(setting.scratch / "boot", setting.image)
    for _ in range(setting.repeats):
        load.append(os.getloadavg()[0])
        with _emulated(board) as waited:
            seconds.append(waited)
            time.sleep(_IDLE_SECONDS)
            idle.append(sum(int(line.split()[1]) for line in board.admin(_PSS).splitlines()) / 1024)
    what = f"power-on to ready; the first boot is among them; load before: {max(load):.1f}"
    return [
        _row("boot_to_ready_s", what, seconds, "s", EMULATION),
        _row("agent_idle_mib", "the agent's processes, proportional set size", idle, "MiB", EMULATION),
    ]


@contextlib.contextmanager
def _emulated(board: Board) -> Iterator[float]:
    """Switch its fleet on, off again in the end; the seconds until it was ready."""
    board.emulation.start()
    began = time.monotonic()
    try:
        board.wait_ready()
        yield time.monotonic() - began
    finally:
        board.emulation.stop(60.0)


def _build(output: Path, cache: Path, *options: str) -> Path:
    argv = [sys.executable, "-m", "millpond.images.build", "--output", str(output), "--cache", str(cache)]
    subprocess.run([*argv, *options], check=True, stdout=subprocess.DEVNULL)
    return output / "qemu-virt"


def rebuild(setting: Setting) -> list[Row]:
    """After a change in our own code alone."""
    cache, values = setting.image.parent / "cache", []
    for number in range(setting.repeats):
        began = time.monotonic()
        _build(setting.scratch / "rebuild", cache, "--serial", str(number))
        values.append(time.monotonic() - began)
    return [_row("rebuild_s", "the image again, after a change in our own code", values, "s")]


def reproducible(setting: Setting) -> list[Row]:
    """Two builds that share nothing but the downloaded packages."""
    digests = []
    for name in ("one", "two"):
        cache = setting.scratch / f"cache-{name}"
        shutil.copytree(setting.image.parent / "cache" / "debian", cache / "debian")
        digests.append(sha256_of(_build(setting.scratch / name, cache) / "millpond-qemu-virt.img"))
        shutil.rmtree(setting.scratch / name)
        shutil.rmtree(cache)
    same = float(digests[0] == digests[1])
    return [_row("reproducible", "1: two builds from nothing are the same, bit by bit", [same], "")]


def power(setting: Setting) -> list[Row]:
    """The power is cut at random moments of an update; the device must come back with a slot that works."""
    cache = setting.image.parent / "cache"
    later = _build(setting.scratch / "later", cache, "--serial", "4000000000")
    board, survived = create(setting.scratch / "power", setting.image), 0
    with _emulated(board):
        length = _whole_update(board, later)
        for number in range(setting.cuts):
            survived += _survives(board, (setting.image, later)[number % 2], length)
            print(f"cut {number + 1} of {setting.cuts}: survived {survived}", flush=True)
    what = f"of {setting.cuts} cuts of the power at random moments of an update"
    return [_row("power_cuts_survived", what, [survived], "", EMULATION)]


def _whole_update(board: Board, image: Path) -> float:
    """Seconds that an update takes; it also makes sure that the others are not vain."""
    began = time.monotonic()
    with board.updating(image) as process:
        if process.wait(1800):
            raise RuntimeError(f"the first update failed: {board.said()}")
    board.wait_ready()
    return time.monotonic() - began


def _survives(board: Board, image: Path, length: float) -> bool:
    try:
        with board.updating(image):
            time.sleep(random.uniform(0.1, 1.0) * length)
            board.cut_power()
        board.wait_ready()
        _settled(board)
    except (AssertionError, TimeoutError, subprocess.TimeoutExpired, MillpondError) as error:
        print(f"did not come back: {error}", flush=True)
        return False
    return True


def _settled(board: Board) -> None:
    """Until nothing is on trial. Raises TimeoutError."""
    end = time.monotonic() + 900
    while time.monotonic() < end:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired, ValueError):
            if not board.running()["trial"]:
                return
        time.sleep(2)
    raise TimeoutError("its slot is on trial for ever")
