"""Edge: the figures of an image: taken on the image itself, booted in QEMU where it must run."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from bench.image.machine import Machine, emulated, make_fleet
from bench.rows import Row, summary
from millpond.host import bundles
from millpond.images import image_files
from millpond.linux.files import sha256_of
from millpond.wire.errors import MillpondError

EMULATION = "QEMU's machine virt under TCG, Cortex-A72, 2 processors: no speed of a board"
MIB = 1 << 20
_IDLE_SECONDS = 30.0
_PSS = (
    "for p in $(cat /sys/fs/cgroup/system.slice/millpond-agent.service/cgroup.procs); do "
    "grep ^Pss: /proc/$p/smaps_rollup; done"
)


@dataclass(frozen=True)
class Setting:
    """What is measured, and where there is room for it."""

    image: Path
    scratch: Path
    repeats: int
    cuts: int


def _row(figure: str, what: str, values: list[float], unit: str, emulation: str | None = None) -> Row:
    return summary(figure, what, values, unit, peer=None, emulation=emulation)


def size(setting: Setting) -> list[Row]:
    """What crosses the link in an update: root, kernel and initial file system, compressed."""
    path, manifest = image_files.find(setting.image)
    fleet = make_fleet(setting.scratch / "size", setting.image)
    bundle = bundles.make(fleet, path, manifest).path.stat().st_size / MIB
    root = (setting.image / "root.squashfs").stat().st_size / MIB
    return [
        _row("compressed_mib", "an update: root, kernel and all else, compressed", [bundle], "MiB"),
        _row("root_mib", "of it the root", [root], "MiB"),
    ]


def boot(setting: Setting) -> list[Row]:
    """From power-on to the host's greeting, and the agent's memory half a minute later."""
    seconds, idle, load = [], [], []
    make_fleet(setting.scratch / "boot", setting.image)
    for _ in range(setting.repeats):
        load.append(os.getloadavg()[0])
        with emulated(setting.scratch / "boot") as machine:
            seconds.append(machine.wait_ready())
            time.sleep(_IDLE_SECONDS)
            idle.append(sum(int(line.split()[1]) for line in machine.admin(_PSS).splitlines()) / 1024)
    what = f"power-on to ready; the first boot is among them; load before: {max(load):.1f}"
    return [
        _row("boot_to_ready_s", what, seconds, "s", EMULATION),
        _row("agent_idle_mib", "the agent's processes, proportional set size", idle, "MiB", EMULATION),
    ]


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
    directory = setting.scratch / "power"
    make_fleet(directory, setting.image)
    survived = 0
    with emulated(directory) as machine:
        machine.wait_ready()
        length = _whole_update(machine, later)
        for number in range(setting.cuts):
            survived += _survives(machine, (setting.image, later)[number % 2], length)
            print(f"cut {number + 1} of {setting.cuts}: survived {survived}", flush=True)
    what = f"of {setting.cuts} cuts of the power at random moments of an update"
    return [_row("power_cuts_survived", what, [survived], "", EMULATION)]


def _whole_update(machine: Machine, image: Path) -> float:
    """Seconds that an update takes; it also makes sure that the others are not vain."""
    bundles_made = time.monotonic()
    process = machine.update(image)
    if process.wait(1800):
        raise RuntimeError(f"the first update failed: {machine.said()}")
    machine.wait_ready()
    return time.monotonic() - bundles_made


def _survives(machine: Machine, image: Path, length: float) -> bool:
    process = machine.update(image)
    time.sleep(random.uniform(0.1, 1.0) * length)
    machine.cut_power()
    process.kill()
    process.wait()
    time.sleep(5)
    try:
        machine.wait_ready()
        _settled(machine)
    except (TimeoutError, MillpondError, ValueError) as error:
        print(f"did not come back: {error}", flush=True)
        return False
    return True


def _settled(machine: Machine) -> None:
    """Until nothing is on trial. Raises TimeoutError."""
    end = time.monotonic() + 900
    while time.monotonic() < end:
        try:
            if not machine.running()["trial"]:
                return
        except (MillpondError, ValueError):
            pass
        time.sleep(2)
    raise TimeoutError("its slot is on trial for ever")
