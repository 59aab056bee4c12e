# SPDX-License-Identifier: Apache-2.0
"""Pure: define the NVMe structures and numbers that the tunnel uses, as the NVMe 1.4
specification has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

VERSION_1_4 = 0x0001_0400

# Controller registers, offsets in bytes.
CAP, VS, CC, CSTS, AQA, ASQ, ACQ = 0x00, 0x08, 0x14, 0x1C, 0x24, 0x28, 0x30
DOORBELLS = 0x1000

CC_ENABLE = 1
CSTS_READY = 1

SQE_SIZE = 64
CQE_SIZE = 16
_CAP_FIXED = 1 << 16 | 2 << 24 | 1 << 37  # contiguous queues required, ready within 1 s, NVM command set


class Opcode(IntEnum):
    """Opcodes of the tunnel's vendor commands. Bits 1:0 give the direction of data: 1 host to controller, 2
    controller to host.
    """

    SEND = 0x81
    RECV = 0x82
    IDENTIFY = 0xC1
    OPEN = 0xC2


class Status(IntEnum):
    """Status code type and code of a completion, as its bits 10:0; 7xxh is vendor specific."""

    SUCCESS = 0x000
    VERSION_MISMATCH = 0x701


def doorbell_offset(index: int, stride: int) -> int:
    """Return a doorbell's offset from the first one: index 2y is the tail of submission queue y, 2y+1 the
    head of completion queue y; ``stride`` is CAP.DSTRD.
    """
    return index * (4 << stride)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Fields of CAP in use: entries of the largest queue, doorbell stride, page sizes as 2^(12+n)."""

    entries: int
    stride: int
    page_min: int
    page_max: int

    def pack(self) -> int:
        """Pack the fields as the 64-bit register."""
        pages = self.page_min << 48 | self.page_max << 52
        return (self.entries - 1) | _CAP_FIXED | self.stride << 32 | pages

    @staticmethod
    def unpack(value: int) -> Capabilities:
        """Unpack a 64-bit register; any value is valid."""
        return Capabilities((value & 0xFFFF) + 1, value >> 32 & 15, value >> 48 & 15, value >> 52 & 15)


def configuration(page_size: int) -> int:
    """Return CC with the controller enabled: 64-byte and 16-byte entries, pages of 2^(12+page_size) bytes."""
    return CC_ENABLE | page_size << 7 | 6 << 16 | 4 << 20


def admin_attributes(entries: int) -> int:
    """Return AQA for admin queues of ``entries`` entries each."""
    return (entries - 1) << 16 | (entries - 1)
