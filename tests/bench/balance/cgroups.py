# SPDX-License-Identifier: Apache-2.0
"""Edge (cgroup v1 or v2): less processor time, or memory, for a tree of processes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from bench.experiment import Unmeasured

Controller = Literal["cpu", "memory"]

PERIOD_US = 10_000
"""A short one, so that a step of training is slowed evenly and not stopped in its middle."""
_LEAST_QUOTA_US = 1_000  # the kernel's
_ATTEMPTS, _PAUSE = 100, 0.02  # to remove a group whose last processes are just ending


@dataclass(frozen=True, slots=True)
class Cgroup:
    """A group of processes in ``folder``; who is left at its end goes ``home``, to the caller's own group."""

    folder: Path
    home: Path
    version: int

    def limit(self, processors: float) -> None:
        """Processor time for all its processes together: 0.5 is half of one processor, at least 0.1."""
        quota = max(_LEAST_QUOTA_US, round(processors * PERIOD_US))
        if self.version == 2:
            (self.folder / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        else:
            (self.folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (self.folder / "cpu.cfs_quota_us").write_text(str(quota))

    def unlimit(self) -> None:
        """All the processor time there is."""
        if self.version == 2:
            (self.folder / "cpu.max").write_text("max")
        else:
            (self.folder / "cpu.cfs_quota_us").write_text("-1")

    def limit_memory(self, size: int) -> None:
        """Bytes of memory for all its processes together, what the kernel caches of files for them included;
        no swap.
        """
        if self.version == 2:
            (self.folder / "memory.max").write_text(str(size))
            with contextlib.suppress(FileNotFoundError):  # a kernel without swap
                (self.folder / "memory.swap.max").write_text("0")
        else:
            (self.folder / "memory.limit_in_bytes").write_text(str(size))
            with contextlib.suppress(FileNotFoundError):
                (self.folder / "memory.memsw.limit_in_bytes").write_text(str(size))

    def held_memory(self) -> int:
        """Bytes that the kernel cannot take back now: anonymous memory, and that of files without a disk
        (memfd, tmpfs). What it caches of files is not in it.
        """
        found = _table(self.folder / "memory.stat")
        keys = ("anon", "shmem") if self.version == 2 else ("total_rss", "total_shmem")
        return sum(int(found[key]) for key in keys)

    def out_of_memory(self) -> int:
        """How many processes the kernel has killed because the limit was not enough."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        return int(_table(self.folder / name)["oom_kill"])

    def most_memory(self) -> int:
        """The most bytes so far, with the kernel's cache. Raises OSError for version 2 before Linux 5.19."""
        name = "memory.peak" if self.version == 2 else "memory.max_usage_in_bytes"
        return int((self.folder / name).read_text())

    def add(self, pid: int) -> None:
        """Move a process and all below it here, those too that it starts meanwhile."""
        while new := [number for number in _tree(pid) if number not in self.members()]:
            for number in new:
                _move(number, self.folder)

    def members(self) -> set[int]:
        """The processes in it."""
        return {int(line) for line in (self.folder / "cgroup.procs").read_text().split()}

    def remove(self) -> None:
        """Its processes go on in this one's group. Raises OSError if it can not be removed."""
        for attempt in range(_ATTEMPTS):
            for number in self.members():
                _move(number, self.home)
            try:
                self.folder.rmdir()
            except OSError:
                if attempt == _ATTEMPTS - 1:
                    raise
                time.sleep(_PAUSE)
            else:
                return


@contextlib.contextmanager
def cgroup(name: str, controller: Controller = "cpu") -> Iterator[Cgroup]:
    """A new group for as long as it is used. Raises Unmeasured."""
    made = _make(name, controller)
    try:
        yield made
    finally:
        made.remove()


def _make(name: str, controller: Controller) -> Cgroup:
    """Version 2 if it hands out the controller here, otherwise version 1."""
    reasons = []
    for version, top, home in _hierarchies(controller):
        above = [path for path in home.parents if path.is_relative_to(top)]
        parents = [home] if version == 1 else [home, *above]
        for parent in parents:
            folder = parent / f"{name}-{os.getpid()}"
            try:
                if version == 2:
                    _hand_out(controller, parent, home)
                folder.mkdir()
            except OSError as error:
                reasons.append(f"cgroup v{version}: {parent}: {error.strerror}")
                continue
            return Cgroup(folder, home, version)
    raise Unmeasured("; ".join(reasons) or f"no cgroup hierarchy with the {controller} controller is mounted")


def _hand_out(controller: Controller, parent: Path, home: Path) -> None:
    """See to it that groups below ``parent`` have the controller and may have processes from ``home``.

    Raises OSError.
    """
    if controller not in (parent / "cgroup.controllers").read_text().split():
        raise OSError(0, f"it has no {controller} controller")
    if (parent / "cgroup.type").exists() and (parent / "cgroup.procs").read_text():
        raise OSError(0, "it has processes of its own")  # only the root may, and groups below it
    if not all(os.access(group / "cgroup.procs", os.W_OK) for group in (parent, home)):
        raise OSError(0, "processes may not be moved")
    control = parent / "cgroup.subtree_control"
    if controller not in control.read_text().split():
        control.write_text(f"+{controller}")


def _table(path: Path) -> dict[str, str]:
    return dict(line.split() for line in path.read_text().splitlines())


def _hierarchies(controller: Controller) -> list[tuple[int, Path, Path]]:
    """Version, 2 first, top folder, and this process's own, where groups with the controller could be."""
    own: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), path)
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, mounted = before.split()[3:5]
        kind, options = after.split()[0], after.split()[2].split(",")
        if kind == "cgroup2" and "" in own:
            found.append((2, Path(mounted), _below(Path(mounted), root, own[""])))
        elif kind == "cgroup" and controller in options and controller in own:
            found.append((1, Path(mounted), _below(Path(mounted), root, own[controller])))
    return sorted(found, reverse=True)


def _below(mounted: Path, root: str, path: str) -> Path:
    relative = os.path.relpath(path, root)
    return mounted if relative.startswith("..") else mounted / relative


def _tree(pid: int) -> list[int]:
    try:
        process = psutil.Process(pid)
        return [pid, *(child.pid for child in process.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def _move(pid: int, folder: Path) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended
        (folder / "cgroup.procs").write_text(str(pid))
