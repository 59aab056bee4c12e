# SPDX-License-Identifier: Apache-2.0
"""Pure: the messages with which a command gets a connection to a device's volume from the host daemon.

They are apart from the daemon's other messages, which take longer to load than many a copy.
"""

from __future__ import annotations

from dataclasses import dataclass

from millpond.wire.messages import Message, message

ENDED = "the host daemon has ended; jobs go on when it is back"
"""The text of a command that has lost the daemon."""
CLOSED = "the host daemon has closed this command's connection, and runs; start the command again"
"""The text of a command that has lost its connection to a running daemon."""


@message("api.volume")
@dataclass(frozen=True, slots=True)
class GetVolume(Message):
    """Ask for a connection to a device's volume: answered by VolumeTicket, then the socket's descriptor."""

    device: str


@message("api.volume.connection")
@dataclass(frozen=True, slots=True)
class VolumeTicket(Message):
    """A ticket: the connection that follows must attach with ``token``, in TLS if ``tls``."""

    token: bytes
    tls: bool
