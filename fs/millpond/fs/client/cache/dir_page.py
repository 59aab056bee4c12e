# SPDX-License-Identifier: Apache-2.0
"""Pure: a page of a directory's listing, and the offsets by which programs know places in it."""

from __future__ import annotations

from dataclasses import dataclass

MAX_OFFSET = (1 << 63) - 1
DOTS_END = 2
"""The offset behind the dots; a server's cookie is behind it."""


def offset_of(cookie: int) -> int:
    """Return the offset that programs see in place of a server's cookie."""
    return min(cookie + DOTS_END, MAX_OFFSET)


def cookie_of(offset: int) -> int:
    """Return the server's cookie for an offset that programs have seen. The largest cookie is the end of an
    ext4 directory.
    """
    return offset if offset == MAX_OFFSET else max(0, offset - DOTS_END)


@dataclass(slots=True)
class HeldPage:
    """A page of a directory: its entries begin behind ``cookie``, those not yet passed on at byte ``at``,
    behind the offset ``next``. ``granted``, ``since`` and ``verifier`` are those of the request.
    """

    data: bytes
    end: bool
    granted: int
    since: int
    verifier: int
    cookie: int
    at: int
    next: int
    size: int

    @property
    def is_used(self) -> bool:
        """Whether all entries are passed on."""
        return self.at >= len(self.data)
