# SPDX-License-Identifier: Apache-2.0
"""Pure: the messages of a command that reads the audit log of a device, over the daemon's Unix socket."""

from __future__ import annotations

from millpond.wire.messages import Message, message


@message("api.audit.head.get")
class GetAuditHeadOf(Message):
    """Ask a device for the head of its audit log, see GetAuditHead; answered by its AuditHead."""

    device: str
    nonce: str = ""


@message("api.audit.get")
class GetAuditEntriesOf(Message):
    """Ask a device for entries of its audit log from the ``first`` on; answered by its AuditEntries."""

    device: str
    first: int
