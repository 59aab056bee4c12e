# SPDX-License-Identifier: Apache-2.0
"""Edge (an emulated fleet): ``millpond cp -r`` of many small files against rsync over SSH, both ways."""

from __future__ import annotations

import os
import random
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.experiment import Run
from bench.rows import Row, summary
from bench.tunnel.record import Record
from bench.tunnel.ssh_routes import CIPHER
from bench.volume.fleet import DEVICE, EMULATION, FOLDER, Host, fleet, ssh_options
from bench.volume.route import RouteFailed
from bench.volume.tools import Tools
from millpond.fs.store.layout import PUBLIC
from millpond.images.ondevice.sshd_config import HOME, USER
from system.support import MILLPOND

_BYTES = 3000
_SECONDS = 300.0
_PEER = f"rsync -a over SSH ({CIPHER})"
_FULL, _QUICK = (2000, 5), (40, 1)  # files, repeats
_STEPS = {
    "cp": "to the device, first time",
    "cp_again": "to the device, again with nothing to do",
    "cp_back": "from the device, first time",
    "cp_back_again": "from the device, again with nothing to do",
}
FIGURES = tuple(f"{step}_over_rsync" for step in _STEPS)


@dataclass(frozen=True, slots=True)
class Trees:
    """The files to copy, in ``folder/source``; the copies of one program in one repeat lie beside it."""

    host: Host
    folder: Path
    count: int

    def make(self) -> None:
        """Write the source: ``count`` files in ten folders."""
        content = random.Random(1)
        for number in range(self.count):
            path = self.source / str(number % 10) / f"{number:05}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.randbytes(_BYTES))

    @property
    def source(self) -> Path:
        """The folder to copy."""
        return self.folder / "source"

    def check(self, copy: Path) -> None:
        """Raise RouteFailed unless ``copy`` has the contents and modification times of the source."""
        for path in self.source.rglob("*"):
            other = copy / path.relative_to(self.source)
            if path.is_dir():
                continue
            same_time = other.is_file() and other.stat().st_mtime_ns == path.stat().st_mtime_ns
            if not same_time or other.read_bytes() != path.read_bytes():
                raise RouteFailed(f"{other.name} did not arrive as it was")

    def millpond(self, *paths: str) -> list[str]:
        """Return the command that copies with millpond."""
        return [*MILLPOND, "cp", "--fleet", str(self.host.emulation.directory), "-r", *paths]

    def rsync(self, *paths: str) -> list[str]:
        """Return the command that copies with rsync over the device's SSH server. Raises RouteFailed."""
        if shutil.which("rsync") is None:
            raise RouteFailed("rsync is not installed")
        network = f"nsenter --net=/proc/{self.host.emulation.daemon().pid}/ns/net --"
        shell = f"{network} ssh -F /dev/null {shlex.join(ssh_options(self.host))}"
        return ["rsync", "-a", "-e", shell, *paths]


def _steps(trees: Trees, key: str, name: str) -> list[tuple[list[str], int, Path]]:
    """Return the command of each step, the bytes that must cross the tunnel, and the resulting copy."""
    there, back, size = trees.host.backing / name, trees.folder / name, trees.count * _BYTES
    for folder in (there, back):
        folder.mkdir()
        folder.chmod(0o777)
    if key == "millpond":
        program, remote = trees.millpond, f"{DEVICE}:{PUBLIC}/{FOLDER}/{name}"
    else:
        program, remote = trees.rsync, f"{USER.user}@{trees.host.address}:{HOME}/{PUBLIC}/{FOLDER}/{name}"
    to, from_there = program(str(trees.source), remote), program(f"{remote}/{trees.source.name}", str(back))
    ways = ((to, there / trees.source.name), (from_there, back / trees.source.name))
    return [(argv, least, copy) for argv, copy in ways for least in (size, 0)]


def _run(argv: Sequence[str], bytecode: Path) -> float:
    """Run a command to its end. Returns its seconds. Raises RouteFailed. Python keeps what it compiles in
    ``bytecode``, as beside an installed program, whatever the caller's environment says.
    """
    environment = os.environ | {"PYTHONPYCACHEPREFIX": str(bytecode)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    began = time.perf_counter()
    done = subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        env=environment,
        check=False,
    )
    seconds = time.perf_counter() - began
    if done.returncode:
        raise RouteFailed((done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1])
    return seconds


def _measure(trees: Trees, key: str, repeat: int) -> dict[str, float]:
    """Return the files per second of each step of one program."""
    speeds, name = {}, f"{key}{repeat}"
    for step, (argv, size, copy) in zip(_STEPS, _steps(trees, key, name), strict=True):
        os.sync()  # what the step before left to be written is not this one's
        before = trees.host.traffic()
        speeds[step] = trees.count / _run(argv, trees.folder / "bytecode")
        now = trees.host.traffic()
        if now.received - before.received + now.sent - before.sent < size:
            raise RouteFailed(f"{step}: fewer bytes crossed the tunnel than were copied")
        trees.check(copy)
    shutil.rmtree(trees.host.backing / name)
    shutil.rmtree(trees.folder / name)
    return speeds


def _compile(trees: Trees) -> None:
    """Have Python compile millpond, which is not measured: copy one file. Raises RouteFailed."""
    name = "compiling"
    _run(
        trees.millpond(str(trees.source / "0" / "00000"), f"{DEVICE}:{PUBLIC}/{FOLDER}/{name}"),
        trees.folder / "bytecode",
    )
    (trees.host.backing / name).unlink()


def _turns(trees: Trees, repeats: int, run: Run) -> Record:
    record = Record()
    _compile(trees)
    for repeat in range(repeats):
        for key in ("millpond", "rsync") if repeat % 2 else ("rsync", "millpond"):
            if key in record.missing:
                continue
            try:
                record.add(key, **_measure(trees, key, repeat))
            except (RouteFailed, OSError, subprocess.SubprocessError) as error:
                if key == "millpond":
                    raise RouteFailed(str(error)) from error
                record.missing[key] = " ".join(str(error).split())
        latest = [f"{step} {_latest(record, step)}" for step in _STEPS]
        run.say(f"copy: {repeat + 1} of {repeats}: {', '.join(latest)}")
    return record


def _latest(record: Record, step: str) -> str:
    found = [record.values(step, key) for key in ("millpond", "rsync")]
    return "/".join(f"{values[-1]:.0f}" if values else "-" for values in found)


def measure(tools: Tools, run: Run) -> list[Row]:
    """Rows ``cp_over_rsync``, ``cp_again_over_rsync`` and, from the device, ``cp_back_over_rsync``,
    ``cp_back_again_over_rsync``.
    """
    count, repeats = _QUICK if run.quick else _FULL
    with fleet(tools.scratch) as host:
        trees = Trees(host, tools.folder("copies"), count)
        trees.make()
        record = _turns(trees, repeats, run)
    rows = [_ratio(step, count, record) for step in _STEPS]
    for step in _STEPS:
        for key, label in (("millpond", "millpond cp -r"), ("rsync", _PEER)):
            values = record.values(step, key)
            what = f"{label}: {_STEPS[step]}"
            rows.append(summary(f"{step}.{key}", what, values, "1/s", emulation=EMULATION))
    return rows


def _ratio(step: str, count: int, record: Record) -> Row:
    what = f"millpond cp -r of {count} files of 3 kB, {_STEPS[step]}: speed over that of {_PEER}"
    if reason := record.missing.get("rsync"):
        what = f"not measured: {_PEER}: {reason}"
    return _row(f"{step}_over_rsync", what, record.ratios(step, "millpond", "rsync"))


def _row(figure: str, what: str, values: Sequence[float]) -> Row:
    return summary(figure, what, values, "x", peer=_PEER, emulation=EMULATION)
