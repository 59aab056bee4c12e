# SPDX-License-Identifier: Apache-2.0
"""Pure: compute the layout of the shared region.

Addresses in commands are offsets in the region. The memory page is 128 KiB (CC.MPS 5) and every ring and
packet buffer starts on one, so PRP1 alone describes a transfer, without a PRP list. Untouched pages are free.

| page        | holds                                                         |
|-------------|---------------------------------------------------------------|
| 0           | registers, doorbells (1000h), sleep words (2000h), vendor registers (3000h) |
| 1, 2        | admin submission and completion ring                          |
| 3, 4        | SEND rings                                                    |
| 5, 6        | RECV rings                                                    |
| 7           | admin data buffers, 4 KiB each                                |
| 8 ...       | SEND buffers, then RECV buffers: one page per ring entry      |
"""

from __future__ import annotations

from dataclasses import dataclass

from millpond.tunnel.errors import LinkViolation
from millpond.tunnel.ring import nvme_defs

PAGE_SHIFT = 5
PAGE = 4096 << PAGE_SHIFT
MDTS = 5
"""MDTS: a command moves at most 2^MDTS * 4 KiB = 128 KiB, room for a 64 KiB packet with its vnet header."""
STRIDE = 4
"""CAP.DSTRD: doorbells and sleep words lie 64 bytes apart, so two writers never share a cache line."""

SLEEP_WORDS = 0x2000
MAGIC_REGISTER, SIZE_REGISTER, GENERATION_REGISTER = 0x3000, 0x3008, 0x3010
MAGIC = 0x646E_6F70_6C6C_696D  # "millpond", little endian

ADMIN, SEND, RECV = 0, 1, 2
QUEUES = 3
ADMIN_ENTRIES = 4
ADMIN_BUFFER = 4096
_ADMIN_BUFFERS_PAGE = 1 + 2 * QUEUES
MIN_ENTRIES, MAX_ENTRIES = 2, 1024


@dataclass(frozen=True, slots=True)
class Span:
    """``count`` buffers of ``size`` bytes, one after another from offset ``start``."""

    start: int
    size: int
    count: int

    @property
    def end(self) -> int:
        """First offset behind the buffers."""
        return self.start + self.size * self.count


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a region whose I/O queues have up to ``entries`` entries. Raises ValueError outside 2 to
    1024.
    """

    entries: int

    def __post_init__(self) -> None:
        if not MIN_ENTRIES <= self.entries <= MAX_ENTRIES:
            raise ValueError(f"a queue has {MIN_ENTRIES} to {MAX_ENTRIES} entries, not {self.entries}")

    @property
    def size(self) -> int:
        """Size of the whole region in bytes."""
        return self.buffers(RECV).end

    @property
    def capabilities(self) -> nvme_defs.Capabilities:
        """The CAP register of this layout."""
        return nvme_defs.Capabilities(self.entries, STRIDE, 0, PAGE_SHIFT)

    def queue_entries(self, queue: int) -> int:
        """Return the number of entries of a queue's rings."""
        return ADMIN_ENTRIES if queue == ADMIN else self.entries

    def submission_ring(self, queue: int) -> Span:
        """Return the place of a submission ring, of 64-byte entries."""
        return Span((1 + 2 * queue) * PAGE, nvme_defs.SQE_SIZE, self.queue_entries(queue))

    def completion_ring(self, queue: int) -> Span:
        """Return the place of a completion ring, of 16-byte entries."""
        return Span((2 + 2 * queue) * PAGE, nvme_defs.CQE_SIZE, self.queue_entries(queue))

    def buffers(self, queue: int) -> Span:
        """Return the place of a queue's data buffers, one per entry; the command with CID n uses buffer n."""
        start = _ADMIN_BUFFERS_PAGE * PAGE
        if queue == ADMIN:
            return Span(start, ADMIN_BUFFER, ADMIN_ENTRIES)
        skipped = self.entries if queue == RECV else 0
        return Span(start + (1 + skipped) * PAGE, PAGE, self.entries)


def layout_of(capabilities: int, size: int) -> Layout:
    """Return the layout that a peer's CAP register describes, in a region of ``size`` bytes. Raises
    LinkViolation.
    """
    fields = nvme_defs.Capabilities.unpack(capabilities)
    try:
        layout = Layout(fields.entries)
    except ValueError as error:
        raise LinkViolation(f"the peer's CAP register: {error}") from None
    if fields != layout.capabilities or layout.size != size:
        raise LinkViolation(
            f"the peer's CAP register {capabilities:#x} does not fit a region of {size} bytes"
        )
    return layout
