# SPDX-License-Identifier: Apache-2.0
"""Edge (files): saved copies of audit logs: a line of JSON about the head, and the device's own lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from millpond.base.errors import ConfigError, LocalError, ProtocolError
from millpond.base.schema import dump, load
from millpond.host.remote.audit.reading import AuditLogCopy, follow
from millpond.linux.files import write_durably
from millpond.wire.audit_log import LATEST, LONGEST_LINE, is_nonce
from millpond.wire.control_messages import AuditHead

FORMAT = "millpond audit log, 1"


@dataclass(frozen=True, slots=True)
class _Heading:
    """The first line of a file: the head of a ``device``'s log, signed with ``nonce`` and asked for at
    ``time`` (s since 1970, by the clock of the host that saved it).
    """

    format: str
    device: str
    oldest: int
    number: int
    digest: str
    signature: str
    nonce: str
    time: float


def save(path: Path, copy: AuditLogCopy, time: float) -> None:
    """Write or replace a file by a log that was read at ``time``. Raises LocalError, also for a log that is
    not signed.
    """
    head = copy.head
    if not head.signature:
        raise LocalError(f"{copy.device}: its audit log is not signed: {head.reason or 'it says not why'}")
    numbers = head.oldest, head.number, head.digest, head.signature
    heading = json.dumps(dump(_Heading(FORMAT, copy.device, *numbers, copy.nonce, time)))
    try:
        write_durably(path, "".join(f"{line}\n" for line in (heading, *copy.lines)).encode())
    except OSError as error:
        raise LocalError(f"{path} cannot be written: {error.strerror}") from None


def load_copy(path: Path, device: str) -> tuple[AuditLogCopy, float]:
    """Return the log of a device in a file, whose chain is whole, and when it was read. Raises LocalError,
    OSError, and RemoteError as ``reading.read`` does.
    """
    with path.open(encoding="ascii", errors="replace", newline="\n") as file:
        heading = _heading(path, file.readline(LONGEST_LINE))
        if heading.device != device:
            raise LocalError(f"{path} is the audit log of {heading.device!r:.80}, not of {device}")
        head = AuditHead(heading.oldest, heading.number, heading.digest, heading.signature)
        return follow(device, head, heading.nonce, _lines(file)), heading.time


def _heading(path: Path, line: str) -> _Heading:
    try:
        found = load(_Heading, json.loads(line), path.name)
    except (ValueError, RecursionError, ConfigError):
        found = None
    if found is None or found.format != FORMAT or not is_nonce(found.nonce) or not 0 <= found.time < LATEST:
        raise LocalError(f"{path} is no saved audit log of this version: 'millpond audit --save' writes one")
    return found


def _lines(file: IO[str]) -> Iterator[str]:
    while line := file.readline(LONGEST_LINE + 2):
        if not line.endswith("\n"):
            raise ProtocolError(f"{file.name}: it ends within an entry")
        yield line.removesuffix("\n")
