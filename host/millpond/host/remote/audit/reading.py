# SPDX-License-Identifier: Apache-2.0
"""Edge (the daemon's socket): reads the audit log of a device, page by page, and follows its chain."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.base.errors import ProtocolError
from millpond.host.client.daemon_client import DaemonClient
from millpond.wire.audit_log import MOST_BYTES, MOST_ENTRIES, ChainReader, Entry, LogHead
from millpond.wire.control_messages import AuditHead
from millpond.wire.texts import cleaned


@dataclass(frozen=True, slots=True)
class AuditLogCopy:
    """The log of a ``device`` up to its ``head``: its entries in order, and the digests of their lines."""

    device: str
    head: AuditHead
    entries: tuple[Entry, ...]
    digests: dict[int, str]

    @property
    def end(self) -> LogHead:
        """The number and the digest of the head."""
        return LogHead(self.head.number, self.head.digest)


def read(client: DaemonClient, device: str) -> AuditLogCopy:
    """Read the log of a device. Raises RemoteError, also where its entries are no chain up to its head."""
    head = client.audit_head(device)
    if head.number - head.oldest >= MOST_ENTRIES:
        raise ProtocolError(f"{device}: its audit log has more entries than a device keeps")
    reader = ChainReader(LogHead() if head.oldest == 1 else None)
    entries, digests, size = list[Entry](), dict[int, str](), 0
    number = head.oldest
    while number <= head.number:
        lines = client.audit_entries(device, number)
        size += sum(map(len, lines))
        if not lines or size > MOST_BYTES:
            raise ProtocolError(f"{device}: its audit log ends before entry {head.number}, or is too long")
        for line in lines[: head.number - number + 1]:
            entry = _taken(reader, line, device)
            entries.append(cleaned(entry))
            assert reader.head
            digests[entry.number] = reader.head.digest
        number += len(lines)
    if reader.head != LogHead(head.number, head.digest):
        raise ProtocolError(f"{device}: the last entry of its audit log is not the one that it has signed")
    return AuditLogCopy(device, head, tuple(entries), digests)


def _taken(reader: ChainReader, line: str, device: str) -> Entry:
    try:
        return reader.take(line)
    except ProtocolError as error:
        raise ProtocolError(f"{device}: {error}") from None
