# SPDX-License-Identifier: Apache-2.0
"""Edge (cgroup v2 or v1): control groups, below this process's own one, that bound the memory and the number
of processes of one job each.

With v2 this process's group must be its own: systemd gives it to a unit with ``Delegate=``. A group with
children can hold no processes, so this process moves to the child ``agent``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from dataclasses import dataclass
from pathlib import Path

from millpond.base.errors import LocalError

_CONTROLLERS = ("memory", "pids")
_UNIFIED = ""
"""The name of the one hierarchy of v2."""
_PREFIX = "millpond-"
_REMOVE_SECONDS, _PAUSE = 2.0, 0.01


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """The bytes of memory and the number of processes (threads count as such) of a group."""

    memory: int
    processes: int


class ControlGroup:
    """A group of processes in ``folders``, one for each hierarchy. ``descriptors`` are of files to which a
    process writes "0" to become a member. Raises OSError.
    """

    def __init__(self, folders: dict[str, Path], limits: GroupLimits) -> None:
        self.folders = folders
        self.descriptors = list[int]()
        try:
            for hierarchy, folder in folders.items():
                folder.mkdir()
                _limit(hierarchy, folder, limits)
                self.descriptors.append(os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
        except OSError:
            self.remove()
            raise

    def left(self) -> None:
        """Close the descriptors: no more processes become members."""
        while self.descriptors:
            os.close(self.descriptors.pop())

    @property
    def was_killed_for_memory(self) -> bool:
        """Whether the kernel has killed a member because memory ran out, here or in the whole machine."""
        name = "memory.events" if _UNIFIED in self.folders else "memory.oom_control"
        return _count(self._folder("memory") / name, "oom_kill") > 0

    @property
    def reached_memory_limit(self) -> bool:
        """Whether the members have reached the group's own limit; with v1 also if the kernel could then take
        back enough of what it had cached.
        """
        if _UNIFIED in self.folders:
            return _count(self._folder("memory") / "memory.events", "oom") > 0
        with contextlib.suppress(OSError, ValueError):
            return int((self._folder("memory") / "memory.failcnt").read_text()) > 0
        return False

    @property
    def refusals(self) -> int:
        """The number of times that a member could not start a process because there were too many."""
        return _count(self._folder("pids") / "pids.events", "max")

    def _folder(self, controller: str) -> Path:
        return self.folders.get(controller) or self.folders[_UNIFIED]

    def remove(self) -> None:
        """Remove the group. Its members must have ended; the kernel may still be busy with their end."""
        self.left()
        end = time.monotonic() + _REMOVE_SECONDS
        for folder in self.folders.values():
            while not _removed(folder) and time.monotonic() < end:
                time.sleep(_PAUSE)


class ControlGroups:
    """Makes groups below ``parents``, one folder for each hierarchy, each with ``limits``."""

    def __init__(self, parents: dict[str, Path], limits: GroupLimits) -> None:
        self._parents, self._limits = parents, limits
        self._numbers = itertools.count(1)
        for parent in parents.values():
            _remove_old(parent)

    def make(self) -> ControlGroup:
        """Make a group. Raises OSError."""
        name = f"{_PREFIX}{os.getpid()}-{next(self._numbers)}"
        return ControlGroup({kind: parent / name for kind, parent in self._parents.items()}, self._limits)


def own_groups(limits: GroupLimits, together: int) -> ControlGroups:
    """Return the maker of groups of this process, which has started no others yet. With v2 all groups
    together take the bytes ``together``. Raises LocalError with the reason for having none.
    """
    try:
        own = _own_folders()
        if _UNIFIED in own:
            own[_UNIFIED] = _prepare(own[_UNIFIED], together)
        groups = ControlGroups(own, limits)
        groups.make().remove()  # folders that are seen can often not be written to
        return groups
    except OSError as error:
        raise LocalError(f"{error.filename or 'control groups'}: {error.strerror}") from None


def withheld() -> tuple[int, tuple[str, ...]]:
    """Return the version of this process's control groups, and the controllers that it may not use below its
    own group. Changes nothing. Raises LocalError, OSError.
    """
    own = _own_folders()
    if _UNIFIED not in own:
        return 1, tuple(name for name, folder in own.items() if not os.access(folder, os.W_OK))
    delegated = os.access(own[_UNIFIED], os.W_OK)
    there = (own[_UNIFIED] / "cgroup.controllers").read_text().split() if delegated else ()
    return 2, tuple(name for name in _CONTROLLERS if name not in there)


def _own_folders() -> dict[str, Path]:
    """Return this process's own folders: those of v1 for each controller, or else that of v2."""
    paths = dict[str, str]()
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    mounts = _mounts()
    wanted = _CONTROLLERS if all(name in paths for name in _CONTROLLERS) else (_UNIFIED,)
    found = {name: _below(mounts, name, paths.get(name)) for name in wanted}
    if missing := [name or "cgroup v2" for name, folder in found.items() if folder is None]:
        raise LocalError(f"there is no control group of {', '.join(missing)} that this process can see")
    return {name: folder for name, folder in found.items() if folder}


def _mounts() -> dict[str, tuple[str, Path]]:
    """Return the root and the mount point of each hierarchy."""
    found = dict[str, tuple[str, Path]]()
    for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
        before, _, after = line.partition(" - ")
        root, point = before.split()[3:5]
        kind, _, options = after.split()[:3]
        if kind in ("cgroup", "cgroup2"):
            names = [_UNIFIED] if kind == "cgroup2" else options.split(",")
            found |= dict.fromkeys(names, (root, Path(point)))
    return found


def _below(mounts: dict[str, tuple[str, Path]], name: str, path: str | None) -> Path | None:
    if name not in mounts or path is None:
        return None
    root, point = mounts[name]
    try:
        return point / Path(path).relative_to(root)
    except ValueError:  # the mount shows another part of the hierarchy
        return None


def _prepare(own: Path, together: int) -> Path:
    """Make this process's own group of v2 the parent of groups. Returns the folder for them."""
    if missing := set(_CONTROLLERS) - set((own / "cgroup.controllers").read_text().split()):
        raise LocalError(f"{own} has no controller {', '.join(sorted(missing))}: it is not delegated")
    if others := [pid for pid in (own / "cgroup.procs").read_text().split() if int(pid) != os.getpid()]:
        raise LocalError(f"{own} is not this process's alone: it has {len(others)} others")
    ours, jobs = own / "agent", own / "jobs"
    for folder in (ours, jobs):
        folder.mkdir(exist_ok=True)
    (ours / "cgroup.procs").write_text("0")
    enabled = " ".join(f"+{name}" for name in _CONTROLLERS)
    (own / "cgroup.subtree_control").write_text(enabled)
    (jobs / "memory.max").write_text(str(together))
    (jobs / "cgroup.subtree_control").write_text(enabled)
    return jobs


def _limit(hierarchy: str, folder: Path, limits: GroupLimits) -> None:
    if hierarchy in (_UNIFIED, "pids"):
        (folder / "pids.max").write_text(str(limits.processes))
    if hierarchy == _UNIFIED:
        (folder / "memory.max").write_text(str(limits.memory))
        (folder / "memory.oom.group").write_text("1")  # half a worker is of no use
        with contextlib.suppress(FileNotFoundError):  # a kernel without swap
            (folder / "memory.swap.max").write_text("0")
    elif hierarchy == "memory":
        (folder / "memory.limit_in_bytes").write_text(str(limits.memory))


def _count(file: Path, name: str) -> int:
    with contextlib.suppress(OSError):
        for line in file.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _remove_old(parent: Path) -> None:
    """Remove the groups of a process that has died without it; those of living ones stay."""
    for folder in parent.glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if not Path("/proc", pid).exists() or pid == str(os.getpid()):
            _removed(folder)
