"""Pure: what can go wrong on the link, beyond the errors of the wire."""

from __future__ import annotations

from millpond.base.errors import LocalError, ProtocolError


class LinkViolation(ProtocolError):
    """The peer put something into the region that the protocol forbids; the link is reset."""


class Orphaned(LocalError):
    """Whoever started this end does not listen to it any more."""


class InterfaceGone(LocalError):
    """The TUN interface was deleted under this end; only a new end can make another."""
