# SPDX-License-Identifier: Apache-2.0
"""Edge (the daemon's socket): reads the audit log of a device, page by page, and follows its chain."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from millpond.base.errors import ProtocolError
from millpond.host.client.daemon_client import DaemonClient
from millpond.wire.audit_log import MOST_BYTES, MOST_ENTRIES, ChainReader, Entry, LogHead
from millpond.wire.control_messages import AuditHead
from millpond.wire.texts import cleaned


@dataclass(frozen=True, slots=True)
class AuditLogCopy:
    """The log of a ``device`` up to its ``head``, which was asked for with a ``nonce``: its lines and its
    entries in order, and the digests of the lines.
    """

    device: str
    head: AuditHead
    nonce: str
    lines: tuple[str, ...]
    entries: tuple[Entry, ...]
    digests: dict[int, str]

    @property
    def end(self) -> LogHead:
        """The number and the digest of the head."""
        return LogHead(self.head.number, self.head.digest)


def read(
    client: DaemonClient, device: str, nonce: str = "", tell: Callable[[str], None] = lambda _: None
) -> AuditLogCopy:
    """Read the log of a device, its head signed if there is a ``nonce``, and ``tell`` how far that is. Raises
    RemoteError, also where its entries are no chain up to its head.
    """
    head = client.audit_head(device, nonce)
    return follow(device, head, nonce, _asked(client, device, head, tell))


def follow(device: str, head: AuditHead, nonce: str, lines: Iterable[str]) -> AuditLogCopy:
    """Return the log of a device that has these lines. Raises RemoteError where they are no chain up to its
    ``head``.
    """
    if head.number - head.oldest >= MOST_ENTRIES:
        raise ProtocolError(f"{device}: its audit log has more entries than a device keeps")
    reader = ChainReader(LogHead() if head.oldest == 1 else None)
    kept, entries, digests, size = list[str](), list[Entry](), dict[int, str](), 0
    for line in lines:
        size += len(line)
        if size > MOST_BYTES:
            raise ProtocolError(f"{device}: its audit log is too long")
        entry = _taken(reader, line, device)
        if not entries and entry.number != head.oldest:
            raise ProtocolError(
                f"{device}: its audit log begins with entry {entry.number}, not {head.oldest}"
            )
        kept.append(line)
        entries.append(cleaned(entry))
        assert reader.head
        digests[entry.number] = reader.head.digest
    if reader.head != LogHead(head.number, head.digest):
        raise ProtocolError(f"{device}: the last entry of its audit log is not the one that it has signed")
    return AuditLogCopy(device, head, nonce, tuple(kept), tuple(entries), digests)


def _asked(client: DaemonClient, device: str, head: AuditHead, tell: Callable[[str], None]) -> Iterator[str]:
    """Yield the lines of a log up to its ``head``. Raises RemoteError."""
    number = head.oldest
    while number <= head.number:
        lines = client.audit_entries(device, number)
        if not lines:
            raise ProtocolError(f"{device}: its audit log ends before entry {head.number}")
        yield from lines[: head.number - number + 1]
        number += len(lines)
        tell(f"sends its audit log: {number - head.oldest} of {head.number - head.oldest + 1} entries")


def _taken(reader: ChainReader, line: str, device: str) -> Entry:
    try:
        return reader.take(line)
    except ProtocolError as error:
        raise ProtocolError(f"{device}: {error}") from None
