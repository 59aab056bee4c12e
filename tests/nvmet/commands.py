# SPDX-License-Identifier: Apache-2.0
"""Pure: parse submission entries of command capsules; opcodes and status values (NVMe 1.4, NVMe-oF 1.1)."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

ENTRY = struct.Struct("<BBHIQQQI3xB6I")
"""opcode, flags, CID, NSID, DW2-3, MPTR, SGL address, SGL length, SGL type, CDW10 to CDW15: 64 bytes."""

SGL_IN_CAPSULE = 0x01
SGL_TRANSPORT = 0x5A
TO_CONTROLLER, TO_HOST = 1, 2
_USES_SGL = 0x40


class Admin(IntEnum):
    """Admin opcodes that are supported; the tunnel's are in ``millpond.tunnel.ring.nvme_defs``."""

    GET_LOG_PAGE = 0x02
    IDENTIFY = 0x06
    ABORT = 0x08
    SET_FEATURES = 0x09
    GET_FEATURES = 0x0A
    ASYNC_EVENT = 0x0C
    KEEP_ALIVE = 0x18
    FABRICS = 0x7F


class Fabrics(IntEnum):
    """Types of the FABRICS command."""

    PROPERTY_SET = 0x00
    CONNECT = 0x01
    PROPERTY_GET = 0x04


class Io(IntEnum):
    """Opcodes of I/O queues."""

    FLUSH = 0x00
    WRITE = 0x01
    READ = 0x02
    WRITE_ZEROES = 0x08
    DATASET_MANAGEMENT = 0x09


_DO_NOT_RETRY = 0x4000


class TargetStatus(IntEnum):
    """Status type and code of a completion; 4000h (do not retry) where the same command can never succeed."""

    SUCCESS = 0x000
    INVALID_OPCODE = _DO_NOT_RETRY | 0x001
    INVALID_FIELD = _DO_NOT_RETRY | 0x002
    INTERNAL_ERROR = 0x006
    ABORTED = 0x007
    INVALID_NAMESPACE = _DO_NOT_RETRY | 0x00B
    SEQUENCE_ERROR = _DO_NOT_RETRY | 0x00C
    INVALID_SGL = _DO_NOT_RETRY | 0x00D
    OUT_OF_RANGE = _DO_NOT_RETRY | 0x080
    ASYNC_EVENT_LIMIT = _DO_NOT_RETRY | 0x105
    INVALID_LOG_PAGE = _DO_NOT_RETRY | 0x109
    CONNECT_FORMAT = _DO_NOT_RETRY | 0x180
    CONNECT_BUSY = 0x181
    CONNECT_PARAMETERS = _DO_NOT_RETRY | 0x182
    WRITE_FAULT = 0x280
    READ_ERROR = 0x281
    VERSION_MISMATCH = _DO_NOT_RETRY | 0x701
    NOT_OPEN = _DO_NOT_RETRY | 0x702


class Command(NamedTuple):
    """A command as it was submitted. ``length`` is that of its SGL, bytes."""

    opcode: int
    flags: int
    cid: int
    nsid: int
    dw2_3: int
    metadata: int
    address: int
    length: int
    sgl: int
    cdw10: int
    cdw11: int
    cdw12: int
    cdw13: int
    cdw14: int
    cdw15: int

    @property
    def fabrics_type(self) -> int:
        """FCTYPE, in the place of the NSID."""
        return self.nsid & 0xFF

    @property
    def direction(self) -> int:
        """The direction of data: bits 1:0 of the opcode or of FCTYPE."""
        return (self.fabrics_type if self.opcode == Admin.FABRICS else self.opcode) & 3

    def check(self) -> TargetStatus:
        """Check that flags and SGL are of kinds that NVMe/TCP has; returns the status."""
        if self.flags != _USES_SGL or self.direction == 3:
            return TargetStatus.INVALID_FIELD
        if self.direction == TO_CONTROLLER and self.sgl == SGL_IN_CAPSULE and self.address == 0:
            return TargetStatus.SUCCESS
        if self.direction and self.length and self.sgl != SGL_TRANSPORT:
            return TargetStatus.INVALID_SGL
        return TargetStatus.SUCCESS


class CommandAnswer(NamedTuple):
    """The result of a command: status, DW0 and DW1 as one number, data for the host."""

    status: int = TargetStatus.SUCCESS
    result: int = 0
    data: bytes | memoryview = b""


def parse(entry: bytes | memoryview) -> Command:
    """Parse a submission entry; any 64 bytes are valid."""
    return Command(*ENTRY.unpack(entry))
