"""Pure: the shared region as an end sees it: registers, and per queue its rings, doorbells and buffers."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.tunnel.ring import layout as at
from millpond.tunnel.ring import nvme_defs
from millpond.tunnel.ring.barrier import WEAKLY_ORDERED
from millpond.tunnel.ring.layout import Layout, Span
from millpond.tunnel.ring.registers import RegisterFile


@dataclass(frozen=True, slots=True)
class QueueMemory:
    """The memory of queue pair ``number``, cut to the depth in use.

    The sleep flags are words: not 0 says that the side waits for its bell. ``weakly_ordered`` says that this
    processor may reorder two loads, or two stores, of this memory.
    """

    number: int
    submissions: memoryview
    completions: memoryview
    tail_doorbell: memoryview
    head_doorbell: memoryview
    controller_sleeps: memoryview
    host_sleeps: memoryview
    span: Span
    buffers: tuple[memoryview, ...]
    weakly_ordered: bool

    @property
    def entries(self) -> int:
        """Entries of either ring."""
        return len(self.buffers)


class Region:
    """One link's shared memory."""

    def __init__(self, memory: memoryview, layout: Layout, *, weakly_ordered: bool = WEAKLY_ORDERED) -> None:
        self.memory, self.layout, self._weakly_ordered = memory, layout, weakly_ordered
        self.registers = RegisterFile(memory)

    @staticmethod
    def create(memory: memoryview, layout: Layout, *, weakly_ordered: bool = WEAKLY_ORDERED) -> Region:
        """As the controller: make a region of memory that is all zero and has the layout's size."""
        region = Region(memory, layout, weakly_ordered=weakly_ordered)
        region.registers.prepare(layout)
        return region

    @staticmethod
    def attach(memory: memoryview) -> Region:
        """As the host: find one's way in a region that the controller made. Raises LinkViolation."""
        return Region(memory, RegisterFile(memory).read_layout())

    def queue(self, number: int, depth: int) -> QueueMemory:
        """The memory of a queue pair, ``depth`` entries of those it has."""
        span = self.layout.buffers(number)
        starts = range(span.start, span.start + depth * span.size, span.size)
        return QueueMemory(
            number,
            self._cut(self.layout.submission_ring(number), depth),
            self._cut(self.layout.completion_ring(number), depth),
            self._word(nvme_defs.DOORBELLS, 2 * number),
            self._word(nvme_defs.DOORBELLS, 2 * number + 1),
            self._word(at.SLEEP_FLAGS, 2 * number),
            self._word(at.SLEEP_FLAGS, 2 * number + 1),
            Span(span.start, span.size, depth),
            tuple(self.memory[start : start + span.size] for start in starts),
            self._weakly_ordered,
        )

    def _cut(self, ring: Span, depth: int) -> memoryview:
        return self.memory[ring.start : ring.start + ring.size * depth]

    def _word(self, base: int, index: int) -> memoryview:
        return self.registers.word(base + nvme_defs.doorbell_offset(index, at.STRIDE))
