# SPDX-License-Identifier: Apache-2.0
"""Pure: credits in bytes: a sender never has more on the way than its receiver has granted."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.base.errors import ProtocolError


@dataclass(slots=True)
class ByteCredit:
    """Counts the bytes that one direction of a connection may still send."""

    room: int = 0

    def grant(self, size: int) -> None:
        """Allow ``size`` more bytes. Raises ProtocolError for a negative size."""
        if size < 0:
            raise ProtocolError(f"a grant of {size} bytes is negative")
        self.room += size

    def spend(self, size: int) -> None:
        """Note that ``size`` bytes are sent, or have come. Raises ProtocolError for more than was granted."""
        self.check(size)
        self.room -= size

    def check(self, size: int) -> None:
        """Raise ProtocolError for more bytes than were granted."""
        if size > self.room:
            raise ProtocolError(f"{size} bytes were sent where {self.room} were granted")
