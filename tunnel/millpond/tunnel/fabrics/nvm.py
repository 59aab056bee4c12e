"""Pure: the NVM command set on the one namespace (NVM command set specification 1.0)."""

from __future__ import annotations

import struct
from typing import Protocol

from millpond.tunnel.fabrics.commands import Answer, Command, Io, Status
from millpond.tunnel.fabrics.identify import NAMESPACE, Identity
from millpond.tunnel.fabrics.pdu import MAX_TRANSFER
from millpond.tunnel.fabrics.tally import Tally

_ALL_NAMESPACES = 0xFFFFFFFF
_FORCE_UNIT_ACCESS = 1 << 30
_DEALLOCATE = 1 << 2
_RANGE = struct.Struct("<IIQ")


class Volume(Protocol):
    """The blocks of a namespace, in bytes. Each method raises OSError if it fails."""

    def read(self, offset: int, size: int) -> bytes:
        """``size`` bytes."""

    def write(self, offset: int, data: memoryview) -> None:
        """Until the next flush it may get lost."""

    def flush(self) -> None:
        """Make all writes durable."""

    def zero(self, offset: int, size: int) -> None:
        """Make a range read as zeros."""

    def discard(self, offset: int, size: int) -> None:
        """Give up a range; it reads as zeros."""


class Namespace:
    """Checks commands against the volume's bounds and carries them out at once."""

    def __init__(self, identity: Identity, volume: Volume, tally: Tally) -> None:
        self._volume, self._tally = volume, tally
        self._block, self._blocks = identity.block_size, identity.blocks

    def execute(self, command: Command, data: memoryview) -> Answer:
        """The answer to an I/O command."""
        nsid = command.nsid
        if nsid != NAMESPACE and not (command.opcode == Io.FLUSH and nsid == _ALL_NAMESPACES):
            return Answer(Status.INVALID_NAMESPACE)
        try:
            if command.opcode == Io.FLUSH:
                self._volume.flush()
                self._tally.count(Io.FLUSH, 0)
                return Answer()
            if command.opcode == Io.DATASET_MANAGEMENT:
                return self._dataset_management(command, data)
            return self._on_range(command, data)
        except OSError:
            return Answer(Status.READ_ERROR if command.opcode == Io.READ else Status.WRITE_FAULT)

    def _on_range(self, command: Command, data: memoryview) -> Answer:
        start, count = command.cdw10 | command.cdw11 << 32, (command.cdw12 & 0xFFFF) + 1
        if start + count > self._blocks:
            return Answer(Status.OUT_OF_RANGE)
        offset, size = start * self._block, count * self._block
        if command.opcode == Io.WRITE_ZEROES:
            self._volume.zero(offset, size)
            found = b""
        elif size != command.length or size > MAX_TRANSFER:
            return Answer(Status.INVALID_FIELD)
        elif command.opcode == Io.READ:
            found = self._volume.read(offset, size)
        else:
            self._volume.write(offset, data)
            found = b""
        if command.opcode != Io.READ and command.cdw12 & _FORCE_UNIT_ACCESS:
            self._volume.flush()
        self._tally.count(command.opcode, size)
        return Answer(data=found)

    def _dataset_management(self, command: Command, data: memoryview) -> Answer:
        """Deallocate ranges; other hints are taken and not acted on."""
        count = (command.cdw10 & 0xFF) + 1
        if len(data) < count * _RANGE.size:
            return Answer(Status.INVALID_FIELD)
        ranges = [_RANGE.unpack_from(data, number * _RANGE.size)[1:] for number in range(count)]
        if any(start + blocks > self._blocks for blocks, start in ranges):
            return Answer(Status.OUT_OF_RANGE)
        for blocks, start in ranges if command.cdw11 & _DEALLOCATE else ():
            self._volume.discard(start * self._block, blocks * self._block)
        self._tally.count(Io.DATASET_MANAGEMENT, 0)
        return Answer()
