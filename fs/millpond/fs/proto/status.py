"""Pure: how the host asks the server of a volume how it is doing, on a connection for that alone."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.wire.messages import Kind, Message, message


@message("fs.status.get", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class GetStatus(Message):
    """First on a connection, and last. With ``count`` the files are counted, which may take long. Answered by
    StatusIs.
    """

    count: bool = False


@dataclass(frozen=True, slots=True)
class ClientIs:
    """A client: seconds since it was last heard, None if its lease is over; files that it may keep something
    of; files that it has open with the server's knowledge; whether it has a connection.
    """

    number: int
    heard: float | None
    kept: int
    open: int
    connected: bool


@message("fs.status", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class StatusIs(Message):
    """``quota`` in bytes, None for none; ``used`` bytes and ``files`` of the public part, None if they were
    not counted; ``wrong`` by how many bytes the quota's books were, if they were compared. ``device`` is
    whether the device's own mount has reported, ``written`` the files that its kernel writes.
    """

    quota: int | None
    used: int | None
    files: int | None
    wrong: int | None
    lease: float
    clients: tuple[ClientIs, ...]
    device: bool
    written: int
    sandbox: str
