# SPDX-License-Identifier: Apache-2.0
"""Edge (memory, multiprocessing): the passes of a DataLoader, counted where all of its processes see them."""

from __future__ import annotations

import mmap
import os
import uuid
import weakref
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any

from millpond.base.errors import LocalError

_PROCESSES = 64


class PassCounter:
    """Names the passes of DataLoaders alike in all of their processes, forked or spawned. A copy in any other
    process counts for itself.
    """

    def __init__(self, descriptor: int | None = None, name: str = "") -> None:
        self._name = name or uuid.uuid4().hex
        self._memory = os.memfd_create("passes") if descriptor is None else descriptor
        weakref.finalize(self, os.close, self._memory)
        size = 8 * _most_processes(_PROCESSES)
        os.ftruncate(self._memory, size)
        self._counts = memoryview(mmap.mmap(self._memory, size)).cast("q")

    def __reduce__(self) -> tuple[Any, ...]:
        if get_spawning_popen() is None:
            return PassCounter, ()
        return _inherited, (DupFd(self._memory), self._name)

    def begin(self, number: int, processes: int) -> str:
        """Return the name of the pass that process ``number`` of so many begins: how often it has begun one.
        Raises LocalError for too many processes.
        """
        if processes > _PROCESSES:
            raise LocalError(f"a DataLoader of a stream has at most {_PROCESSES} processes")
        place = _most_processes(processes - 1) + number
        self._counts[place] += 1
        return f"{self._name} {processes} {self._counts[place]}"


def _inherited(memory: Any, name: str) -> PassCounter:
    return PassCounter(memory.detach(), name)


def _most_processes(processes: int) -> int:
    """Return how many processes DataLoaders of 1, 2, ..., ``processes`` of them have together."""
    return processes * (processes + 1) // 2
