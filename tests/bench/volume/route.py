# SPDX-License-Identifier: Apache-2.0
"""Edge (processes): a way to files: where they lie, or a mount of them for as long as it is used."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from bench.tunnel.namespace import Traffic
from millpond.base.errors import LocalError
from millpond.fs.fuse.mounts import unmount
from millpond.linux.confinement.sandbox import Sandbox

_STARTS_WITHIN, _ENDS_WITHIN = 30.0, 10.0
_PAUSE = 0.02


class RouteFailed(Exception):
    """A route could not be had or did not do what was asked of it, and why."""


@dataclass(frozen=True, slots=True)
class Mount:
    """Files in ``folder`` that lie in ``backing``. The processes ``near`` serve the mount, those of ``far``
    are at the other end and in between, each with all below it. ``traffic`` counts the bytes that crossed the
    tunnel, on the host; ``how`` is what the mount says of itself. ``programs`` use the mount at once, where
    the workload is one for several. In ``sandbox`` runs the program that reads, where the workload has one of
    its own.
    """

    folder: Path
    backing: Path
    near: tuple[int, ...] = ()
    far: tuple[int, ...] = ()
    traffic: Callable[[], Traffic] | None = None
    how: str = ""
    programs: int = 1
    sandbox: Sandbox = field(default_factory=Sandbox)


@dataclass(frozen=True, slots=True)
class Route:
    """``key`` ends its figures, ``label`` is what a person reads. ``opened`` raises RouteFailed."""

    key: str
    label: str
    opened: Callable[[], AbstractContextManager[Mount]]


@dataclass(frozen=True, slots=True)
class Server:
    """The process of a mount, and what it has said."""

    pid: int
    said: str


@contextlib.contextmanager
def native(folder: Path) -> Iterator[Mount]:
    """The files where they lie."""
    yield Mount(folder, folder)


@contextlib.contextmanager
def served(argv: Sequence[str], mountpoint: Path, ready: str = "") -> Iterator[Server]:
    """A program that mounts and serves until it is told to end; it is ready once it has said ``ready``, too.

    Raises RouteFailed.
    """
    mountpoint.mkdir()
    log = mountpoint.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        _wait(process, mountpoint, log, ready)
        yield Server(process.pid, log.read_text(errors="replace").strip())
    finally:
        _end(process, mountpoint)
        log.unlink()


def _wait(process: subprocess.Popen[bytes], mountpoint: Path, log: Path, ready: str) -> None:
    deadline = time.monotonic() + _STARTS_WITHIN
    while not (is_mounted(mountpoint) and ready in log.read_text(errors="replace")):
        if process.poll() is not None:
            lines = log.read_text(errors="replace").strip().splitlines()
            raise RouteFailed((lines or [f"exit code {process.returncode}"])[-1])
        if time.monotonic() > deadline:
            raise RouteFailed(f"not mounted within {_STARTS_WITHIN:.0f} s")
        time.sleep(_PAUSE)


def is_mounted(mountpoint: Path) -> bool:
    """Whether anything is; asks the kernel alone."""
    table = Path("/proc/self/mountinfo").read_text().splitlines()
    return any(line.split(" ")[4] == str(mountpoint) for line in table)


def _end(process: subprocess.Popen[bytes], mountpoint: Path) -> None:
    process.terminate()
    try:
        process.wait(_ENDS_WITHIN)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    with contextlib.suppress(LocalError):
        unmount(mountpoint)
    mountpoint.rmdir()
