# SPDX-License-Identifier: Apache-2.0
"""Pure: map the shared region to registers, and per queue to rings, doorbells, sleep words and buffers."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.tunnel.ring import layout as at
from millpond.tunnel.ring import nvme_defs
from millpond.tunnel.ring.barrier import WEAKLY_ORDERED
from millpond.tunnel.ring.layout import Layout, Span
from millpond.tunnel.ring.registers import RegisterFile


@dataclass(frozen=True, slots=True)
class QueueMemory:
    """The memory of queue pair ``number``, limited to the depth in use.

    A sleep word other than 0 means that its side waits for a notification. ``weakly_ordered`` means that this
    processor may reorder two loads, or two stores, of this memory.
    """

    number: int
    submissions: memoryview
    completions: memoryview
    tail_doorbell: memoryview
    head_doorbell: memoryview
    controller_sleep_word: memoryview
    host_sleep_word: memoryview
    span: Span
    buffers: tuple[memoryview, ...]
    weakly_ordered: bool

    @property
    def entries(self) -> int:
        """Number of entries of either ring."""
        return len(self.buffers)


class Region:
    """The shared memory of one link."""

    def __init__(self, memory: memoryview, layout: Layout, *, weakly_ordered: bool = WEAKLY_ORDERED) -> None:
        self.memory, self.layout, self._weakly_ordered = memory, layout, weakly_ordered
        self.registers = RegisterFile(memory)

    @staticmethod
    def create(memory: memoryview, layout: Layout, *, weakly_ordered: bool = WEAKLY_ORDERED) -> Region:
        """Prepare, as the controller, a region in memory that is all zero and has the size of the layout."""
        region = Region(memory, layout, weakly_ordered=weakly_ordered)
        region.registers.prepare(layout)
        return region

    @staticmethod
    def attach(memory: memoryview) -> Region:
        """Attach, as the host, to a region that the controller prepared. Raises LinkViolation."""
        return Region(memory, RegisterFile(memory).read_layout())

    def queue(self, number: int, depth: int) -> QueueMemory:
        """Return the memory of a queue pair, limited to ``depth`` entries."""
        span = self.layout.buffers(number)
        starts = range(span.start, span.start + depth * span.size, span.size)
        return QueueMemory(
            number,
            self._cut(self.layout.submission_ring(number), depth),
            self._cut(self.layout.completion_ring(number), depth),
            self._word(nvme_defs.DOORBELLS, 2 * number),
            self._word(nvme_defs.DOORBELLS, 2 * number + 1),
            self._word(at.SLEEP_WORDS, 2 * number),
            self._word(at.SLEEP_WORDS, 2 * number + 1),
            Span(span.start, span.size, depth),
            tuple(self.memory[start : start + span.size] for start in starts),
            self._weakly_ordered,
        )

    def _cut(self, ring: Span, depth: int) -> memoryview:
        return self.memory[ring.start : ring.start + ring.size * depth]

    def _word(self, base: int, index: int) -> memoryview:
        return self.registers.word(base + nvme_defs.doorbell_offset(index, at.STRIDE))
