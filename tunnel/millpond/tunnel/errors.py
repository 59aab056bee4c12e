# SPDX-License-Identifier: Apache-2.0
"""Pure: errors of the link, beyond those of the wire."""

from __future__ import annotations

from millpond.base.errors import LocalError, ProtocolError


class LinkViolation(ProtocolError):
    """The peer wrote something into the region that the protocol forbids; the link is reset."""


class Orphaned(LocalError):
    """The process that started this endpoint no longer reads the endpoint's status."""


class InterfaceGone(LocalError):
    """The TUN interface was deleted under this endpoint; only a new endpoint can make another."""
