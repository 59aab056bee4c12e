# SPDX-License-Identifier: Apache-2.0
"""Edge: bounds of what a process tree takes of the machine, and the evidence that it ran into them.

A tree has a control group where this process may make some. Where not, the kernel's limits of each process
remain (``RLIMIT_DATA``, ``RLIMIT_NPROC``). Either way its processes are the first that the kernel kills when
the memory of the machine runs out.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from millpond.base.errors import LocalError
from millpond.linux.limits.cgroups import ControlGroup, ControlGroups, GroupLimits, own_groups

log = logging.getLogger(__name__)

PROCESSES = 1024
"""Processes and threads of one tree: torch starts one or two for each processor."""
_OOM_FIRST, _OOM_LATE = 500, -500
_USERS_SHARE = 16
"""RLIMIT_NPROC counts all processes of a user, on all emulated devices of a machine."""
_LEAST_RESERVE = 384 << 20


class Shortage(StrEnum):
    """The resource that a process tree ran out of."""

    NONE = ""
    MEMORY = "memory"  # its own limit
    MACHINE_MEMORY = "machine-memory"  # that of the machine, or of all such trees together
    PROCESSES = "processes"

    @property
    def text(self) -> str:
        """The reason for the end of the tree, "" for none."""
        return _TEXTS[self]


_TEXTS = {
    Shortage.NONE: "",
    Shortage.MEMORY: "out of memory: the process took more than it may",
    Shortage.MACHINE_MEMORY: "out of memory: that of the whole machine ran out, for all processes together",
    Shortage.PROCESSES: "the process started more processes and threads than it may",
}
REFUSED = "a process or thread was refused before, as it had as many as it may"
"""The hint at what may be the reason for an end, of a tree with refusals."""


def spare_from_oom() -> None:
    """Make this process, and those that it starts, the last that the kernel kills when memory runs out, as
    far as that is permitted.
    """
    with contextlib.suppress(OSError):
        present = int(Path("/proc/self/oom_score_adj").read_text())
        Path("/proc/self/oom_score_adj").write_text(str(min(present, _OOM_LATE)))


def memory_for_jobs() -> int:
    """Return the bytes of memory that all jobs of this machine may take together."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(total - max(total // 8, _LEAST_RESERVE), total // 2)


class ProcessLimits:
    """Limits of trees of ``memory`` bytes, None for any, and so many ``processes`` each, in ``groups`` if
    there are any.
    """

    def __init__(
        self, memory: int | None = None, processes: int = PROCESSES, groups: ControlGroups | None = None
    ) -> None:
        self.memory, self.processes, self._groups = memory, processes, groups

    @classmethod
    def here(cls, memory: int, processes: int) -> ProcessLimits:
        """Return the limits with control groups if this process, which must have no children yet, may make
        some; the log has the reason if not.
        """
        try:
            groups = own_groups(GroupLimits(memory, processes), memory_for_jobs())
        except LocalError as error:
            log.info("jobs are bounded by process, not in control groups: %s", error)
            return cls(memory, processes)
        log.info("jobs are bounded in control groups of %d MiB", memory >> 20)
        return cls(memory, processes, groups)

    def begin(self) -> LimitedTree:
        """Begin a tree. Raises OSError."""
        return LimitedTree(self._groups.make() if self._groups else None)


class LimitedTree:
    """A tree of processes, in ``group`` if there is one. ``descriptors`` go to its first process."""

    def __init__(self, group: ControlGroup | None = None) -> None:
        self._group, self._killed = group, _oom_kills()
        self._killed_until: int | None = None
        self._final: Shortage | None = None
        self._refusals = 0

    @property
    def descriptors(self) -> list[int]:
        """The descriptors by which a process joins the tree."""
        return list(self._group.descriptors) if self._group else []

    def joined(self) -> None:
        """Note that the first process has the descriptors."""
        if self._group:
            self._group.left()

    def shortage(self, exit_code: int | None = None) -> Shortage:
        """Return the memory that the tree has run out of, if it has. ``exit_code`` is that of its first
        process, if it has ended; without a group the evidence is that the kernel killed some process for
        memory meanwhile.
        """
        if self._final is not None:
            return self._final
        if self._group is None:
            killed = exit_code in (-signal.SIGKILL, 128 + signal.SIGKILL)
            until = _oom_kills() if self._killed_until is None else self._killed_until
            return Shortage.MACHINE_MEMORY if killed and until > self._killed else Shortage.NONE
        if not self._group.was_killed_for_memory:
            return Shortage.NONE
        return Shortage.MEMORY if self._group.reached_memory_limit else Shortage.MACHINE_MEMORY

    @property
    def refusals(self) -> int:
        """The number of processes and threads that the tree was refused; 0 where there is no group."""
        return self._refusals if self._group is None or self._final is not None else self._group.refusals

    def end(self, exit_code: int | None) -> None:
        """Remove the group of a tree that has ended, with the exit code of its first process."""
        if self._group is None:  # another process may be the one whose exit code is asked for
            self._killed_until = _oom_kills()
            return
        self._refusals, self._final = self.refusals, self.shortage(exit_code)
        self._group.remove()


def enter_limits(descriptors: Sequence[int], memory: int | None, processes: int) -> None:
    """Put this process into a tree with ``descriptors``, or, without any, under limits of its own. Raises
    OSError.
    """
    Path("/proc/self/oom_score_adj").write_text(str(_OOM_FIRST))
    for descriptor in descriptors:
        os.write(descriptor, b"0")
    if not descriptors:
        if memory is not None:
            _lower(resource.RLIMIT_DATA, memory)
        _lower(resource.RLIMIT_NPROC, _USERS_SHARE * processes)


def _lower(kind: int, value: int) -> None:
    most = resource.getrlimit(kind)[1]
    value = value if most == resource.RLIM_INFINITY else min(value, most)
    resource.setrlimit(kind, (value, value))


def _oom_kills() -> int:
    """Return how many processes the kernel of this machine has killed because memory ran out."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
