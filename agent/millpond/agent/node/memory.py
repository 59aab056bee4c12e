# SPDX-License-Identifier: Apache-2.0
"""Edge (shared memory): what the agent and the process of a reduction node share, and what that asks the
agent on their socket pair, one packet each: a letter, and a name.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Final

from millpond.linux import memory
from millpond.tunnel.ring.barrier import barrier_of_threads

DIAL: Final = b"D"
"""For a connection to the node of this name: answered by its descriptor, or by why there is none."""
PARENT: Final = b"P"
"""For whether the node of this name may ask for sums: answered by YES, or by anything else."""
YES: Final = b"Y"


class OfferedExchange:
    """The exchange whose update may leave at present, in memory that the agent writes and the node reads. The
    node copies values, and then looks whether they were offered all the time. For that each change of the
    number lies between those of the values, and each look behind the copy, on processors too that reorder
    loads and stores, such as ARM's.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._number = memoryview(mmap.mmap(descriptor, mmap.PAGESIZE)).cast("Q")

    @classmethod
    def make(cls) -> OfferedExchange:
        """Offer nothing, in new memory."""
        descriptor = os.memfd_create("offered exchange")
        os.ftruncate(descriptor, mmap.PAGESIZE)
        made = cls(descriptor)
        weakref.finalize(made, os.close, descriptor)
        return made

    def offer(self, exchange: int) -> None:
        """Let the update of an exchange leave."""
        barrier_of_threads()
        self._number[0] = exchange + 1

    def withdraw(self) -> None:
        """Let no update leave."""
        self._number[0] = 0
        barrier_of_threads()

    def __contains__(self, exchange: int) -> bool:
        barrier_of_threads()
        found = self._number[0]
        barrier_of_threads()  # what is copied next is no older than the number
        return found == exchange + 1


class NodeMemory:
    """A node's vectors as the agent sees them: ``values`` is the descriptor of the memory of the updates, of
    ``update_bytes``, of which ``offered`` says when they are whole; spread states, of ``size`` values, come
    to ``state``.
    """

    def __init__(self, values: int, update_bytes: int, size: int, offered: OfferedExchange) -> None:
        self.update_bytes, self.size, self.offered = update_bytes, size, offered
        self._descriptors = contextlib.ExitStack()
        weakref.finalize(self, self._descriptors.close)
        self.values = self._kept(os.dup(values))
        self._state_memory = self._kept(memory.make("spread state"))
        self._state = memory.map_first(self._state_memory, 4 * size)

    @classmethod
    def of_zeros(cls, size: int) -> NodeMemory:
        """Make the memory of a node without a job, which offers zeros as exchange 0."""
        values, offered = memory.make("zeros"), OfferedExchange.make()
        try:
            memory.map_first(values, 4 * size)
            made = cls(values, 4 * size, size, offered)
        finally:
            os.close(values)
        offered.offer(0)
        return made

    def _kept(self, descriptor: int) -> int:
        self._descriptors.callback(os.close, descriptor)
        return descriptor

    @property
    def descriptors(self) -> Sequence[int]:
        """The descriptors that a node's process opens, in their order."""
        return self.values, self._state_memory, self.offered.descriptor

    @property
    def state(self) -> memoryview:
        """The bytes of the state that was spread last. The node's process can write to them at any time."""
        return self._state.data
