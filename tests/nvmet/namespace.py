# SPDX-License-Identifier: Apache-2.0
"""Pure: execute the NVM command set on the one namespace (NVM command set specification 1.0)."""

from __future__ import annotations

import struct
from typing import Protocol

from nvmet.commands import Command, CommandAnswer, Io, TargetStatus
from nvmet.identify import NAMESPACE, TargetIdentity
from nvmet.pdu import MAX_TRANSFER
from nvmet.stats import CommandStats

_ALL_NAMESPACES = 0xFFFFFFFF
_FORCE_UNIT_ACCESS = 1 << 30
_DEALLOCATE = 1 << 2
_RANGE = struct.Struct("<IIQ")


class BlockStore(Protocol):
    """The blocks of a namespace, in bytes. Each method raises OSError if it fails."""

    def read(self, offset: int, size: int) -> bytes:
        """Read ``size`` bytes."""

    def write(self, offset: int, data: memoryview) -> None:
        """Write ``data``; until the next flush it may get lost."""

    def flush(self) -> None:
        """Make all writes durable."""

    def zero(self, offset: int, size: int) -> None:
        """Make a range read as zeros."""

    def discard(self, offset: int, size: int) -> None:
        """Give up a range; it reads as zeros."""


class Namespace:
    """Checks commands against the bounds of the block store and executes them at once."""

    def __init__(self, identity: TargetIdentity, store: BlockStore, stats: CommandStats) -> None:
        self._store, self._stats = store, stats
        self._block, self._blocks = identity.block_size, identity.blocks

    def execute(self, command: Command, data: memoryview) -> CommandAnswer:
        """Execute an I/O command."""
        nsid = command.nsid
        if nsid != NAMESPACE and not (command.opcode == Io.FLUSH and nsid == _ALL_NAMESPACES):
            return CommandAnswer(TargetStatus.INVALID_NAMESPACE)
        try:
            if command.opcode == Io.FLUSH:
                self._store.flush()
                self._stats.count(Io.FLUSH, 0)
                return CommandAnswer()
            if command.opcode == Io.DATASET_MANAGEMENT:
                return self._dataset_management(command, data)
            return self._on_range(command, data)
        except OSError:
            return CommandAnswer(
                TargetStatus.READ_ERROR if command.opcode == Io.READ else TargetStatus.WRITE_FAULT
            )

    def _on_range(self, command: Command, data: memoryview) -> CommandAnswer:
        start, count = command.cdw10 | command.cdw11 << 32, (command.cdw12 & 0xFFFF) + 1
        if start + count > self._blocks:
            return CommandAnswer(TargetStatus.OUT_OF_RANGE)
        offset, size = start * self._block, count * self._block
        if command.opcode == Io.WRITE_ZEROES:
            self._store.zero(offset, size)
            found = b""
        elif size != command.length or size > MAX_TRANSFER:
            return CommandAnswer(TargetStatus.INVALID_FIELD)
        elif command.opcode == Io.READ:
            found = self._store.read(offset, size)
        else:
            self._store.write(offset, data)
            found = b""
        if command.opcode != Io.READ and command.cdw12 & _FORCE_UNIT_ACCESS:
            self._store.flush()
        self._stats.count(command.opcode, size)
        return CommandAnswer(data=found)

    def _dataset_management(self, command: Command, data: memoryview) -> CommandAnswer:
        """Deallocate ranges; other hints are accepted and ignored."""
        count = (command.cdw10 & 0xFF) + 1
        if len(data) < count * _RANGE.size:
            return CommandAnswer(TargetStatus.INVALID_FIELD)
        ranges = [_RANGE.unpack_from(data, number * _RANGE.size)[1:] for number in range(count)]
        if any(start + blocks > self._blocks for blocks, start in ranges):
            return CommandAnswer(TargetStatus.OUT_OF_RANGE)
        for blocks, start in ranges if command.cdw11 & _DEALLOCATE else ():
            self._store.discard(start * self._block, blocks * self._block)
        self._stats.count(Io.DATASET_MANAGEMENT, 0)
        return CommandAnswer()
