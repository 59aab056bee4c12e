# SPDX-License-Identifier: Apache-2.0
"""Edge (shared memory): the release buffer of a job: the one place from which an update leaves the device.

A worker trains in memory that its own code can write to at any time. Once the guard has let an exchange pass
and its head has been checked, the agent copies the update here, and all that sends it reads this copy: the
answers to the host, the reduction node, its datagrams and their repairs. What leaves is what was released.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import TypeVar

from millpond.agent.node.memory import NodeMemory, OfferedExchange
from millpond.linux import memory

R = TypeVar("R")


class ReleaseBuffer:
    """The update of a job's ``size`` bytes that may leave at present, or none. Its memory is taken by the
    first update. The job's state has so many ``values``.
    """

    def __init__(self, job: str, size: int, values: int) -> None:
        self._size, self._count = size, values
        self._descriptor = memory.make(f"released update of {job}")
        weakref.finalize(self, os.close, self._descriptor)
        self._values = memory.map_first(self._descriptor, size)
        memory.freeze(self._descriptor)  # other processes, as a node's, read alone
        self._offered = OfferedExchange.make()
        self._node_memory: NodeMemory | None = None

    @property
    def node_memory(self) -> NodeMemory:
        """The memory of a reduction node of the job's updates."""
        if self._node_memory is None:
            self._node_memory = NodeMemory(self._descriptor, self._size, self._count, self._offered)
        return self._node_memory

    @property
    def spread_state(self) -> memoryview | None:
        """The bytes of the state that was spread over the nodes last; None without a node."""
        return self._node_memory.state if self._node_memory else None

    def withdraw(self) -> None:
        """Let no update leave any more. A node that is sending one says that it was withdrawn."""
        self._offered.withdraw()

    def release(self, exchange: int, values: memoryview) -> None:
        """Let the ``values`` of an exchange leave, as they are now."""

        def copy(memory: memoryview) -> None:
            memory[:] = values

        self.fill(exchange, copy)

    def fill(self, exchange: int, write: Callable[[memoryview], R]) -> R:
        """Let the values of an exchange leave that ``write`` writes, and return its result. None leave if it
        raises.
        """
        self.withdraw()
        found = write(self._values.data)
        self._offered.offer(exchange)
        return found

    def part(self, start: int, stop: int) -> memoryview:
        """Return the bytes from ``start`` to ``stop`` of the update."""
        return self._values.data[start:stop]
