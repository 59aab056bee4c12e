# SPDX-License-Identifier: Apache-2.0
"""Pure: messages by which the host queries the status of a volume's server, on a connection of their own."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.wire.messages import Kind, Message, message


@message("fs.status.get", Kind.VOLUME)
class GetStatus(Message):
    """First and only request of a connection: get the server's status. With ``count`` the files are counted,
    which may take long. Answered by StatusIs.
    """

    count: bool = False


@dataclass(frozen=True, slots=True)
class ClientIs:
    """Status of a client: seconds since it was last heard, None if its lease has expired; how many files it
    holds delegations of; how many it has open with the server's knowledge; whether it has a connection.
    """

    number: int
    heard: float | None
    kept: int
    open: int
    connected: bool


@message("fs.status", Kind.VOLUME)
class StatusIs(Message):
    """Status of a volume's server. ``quota`` in bytes, None for none; ``used`` bytes and ``files`` of the
    public part, None if not counted. ``device``: whether the device's own mount has reported, ``written``:
    how many files its kernel writes by passthrough.
    """

    quota: int | None
    used: int | None
    files: int | None
    lease: float
    clients: tuple[ClientIs, ...]
    device: bool
    written: int
    sandbox: str
