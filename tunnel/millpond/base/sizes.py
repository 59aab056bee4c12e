# SPDX-License-Identifier: Apache-2.0
"""Pure: sizes in bytes, as people write them."""

from __future__ import annotations

from millpond.base.errors import LocalError

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
SLOWEST = 1e6
"""Bytes per second, below which a transfer counts as stuck."""


def bytes_of(text: str | int) -> int:
    """Return the bytes of a number, or of a text such as "8 GiB". Raises LocalError."""
    if isinstance(text, int):
        return text
    number = text.rstrip("BKMGTi ")
    unit = text[len(number) :].strip()
    try:
        return int(float(number) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        raise LocalError(f"'{text}' is no size such as 8 GiB") from None
