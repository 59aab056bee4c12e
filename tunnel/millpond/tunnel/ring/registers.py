# SPDX-License-Identifier: Apache-2.0
"""Pure: access the register file at the start of the region.

Every access is one aligned load or store of the register's width: ``struct.pack_into`` could tear it.
"""

from __future__ import annotations

from millpond.tunnel.errors import LinkViolation
from millpond.tunnel.ring import layout as at
from millpond.tunnel.ring import nvme_defs
from millpond.tunnel.ring.barrier import barrier
from millpond.tunnel.ring.layout import ADMIN, ADMIN_ENTRIES, Layout, layout_of


class RegisterFile:
    """The controller registers of NVMe and the tunnel's own, over the region's memory."""

    def __init__(self, memory: memoryview) -> None:
        self._size = len(memory)
        self._words = memory[: at.PAGE].cast("I")
        self._quads = memory[: at.PAGE].cast("Q")

    def word(self, offset: int) -> memoryview:
        """Return a view of the one 32-bit register at ``offset``."""
        return self._words[offset // 4 : offset // 4 + 1]

    def prepare(self, layout: Layout) -> None:
        """Describe, as the controller, a region that is all zero."""
        self._quads[nvme_defs.CAP // 8] = layout.capabilities.pack()
        self._words[nvme_defs.VS // 4] = nvme_defs.VERSION_1_4
        self._quads[at.SIZE_REGISTER // 8] = layout.size
        self._quads[at.MAGIC_REGISTER // 8] = at.MAGIC

    def read_layout(self) -> Layout:
        """Read, as the host, the layout of the region that the controller described. Raises LinkViolation."""
        if self._quads[at.MAGIC_REGISTER // 8] != at.MAGIC:
            raise LinkViolation("the shared region is not a millpond tunnel")
        return layout_of(self._quads[nvme_defs.CAP // 8], self._size)

    def enable(self, layout: Layout) -> None:
        """Write, as the host, the places of the admin queues, and enable the controller."""
        self._words[nvme_defs.AQA // 4] = nvme_defs.admin_attributes(ADMIN_ENTRIES)
        self._quads[nvme_defs.ASQ // 8] = layout.submission_ring(ADMIN).start
        self._quads[nvme_defs.ACQ // 8] = layout.completion_ring(ADMIN).start
        barrier()  # the registers above are written before CC.EN is
        self._words[nvme_defs.CC // 4] = nvme_defs.configuration(at.PAGE_SHIFT)

    @property
    def enabled(self) -> bool:
        """Whether the host has enabled the controller (CC.EN)."""
        found = self._words[nvme_defs.CC // 4]
        barrier()
        return bool(found & nvme_defs.CC_ENABLE)

    def check_enabled(self, layout: Layout) -> None:
        """Check, as the controller, the registers that the host wrote before it enabled. Raises
        LinkViolation.
        """
        found = (
            self._words[nvme_defs.CC // 4],
            self._words[nvme_defs.AQA // 4],
            self._quads[nvme_defs.ASQ // 8],
            self._quads[nvme_defs.ACQ // 8],
        )
        expected = (
            nvme_defs.configuration(at.PAGE_SHIFT),
            nvme_defs.admin_attributes(ADMIN_ENTRIES),
            layout.submission_ring(ADMIN).start,
            layout.completion_ring(ADMIN).start,
        )
        if found != expected:
            raise LinkViolation(
                "the host enabled the controller with CC, AQA, ASQ or ACQ that it does not have"
            )

    @property
    def ready(self) -> bool:
        """Whether the controller takes commands (CSTS.RDY)."""
        found = self._words[nvme_defs.CSTS // 4]
        barrier()
        return bool(found & nvme_defs.CSTS_READY)

    def set_ready(self) -> None:
        """Accept commands, as the controller, from now on."""
        barrier()
        self._words[nvme_defs.CSTS // 4] = nvme_defs.CSTS_READY

    @property
    def generation(self) -> int:
        """The number of this link, counted over all resets; for people and tools.

        The endpoints negotiate it by OPEN.
        """
        return int(self._quads[at.GENERATION_REGISTER // 8])

    def set_generation(self, generation: int) -> None:
        """Publish, as the controller, the negotiated generation."""
        self._quads[at.GENERATION_REGISTER // 8] = generation
