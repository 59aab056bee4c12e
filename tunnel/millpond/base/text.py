# SPDX-License-Identifier: Apache-2.0
"""Pure: make texts fit for logs and terminals."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 1000


def escaped(text: str) -> str:
    """Return a text that can be encoded: bytes of a name that are no UTF-8 become ``\\xe9`` and the like."""
    return text.encode(errors="surrogateescape").decode(errors="backslashreplace")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 file", "2 files"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Format a time: 8 s, 3 min, 2 h 5 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def printable(text: str, longest: int = LONGEST, *, kept: str = "") -> str:
    """Return one line without control characters but those ``kept``, shortened: a peer must not control a
    terminal.
    """
    cleaned = "".join(char if char.isprintable() or char in kept else " " for char in text[: longest + 1])
    return cleaned if len(cleaned) <= longest else cleaned[: longest - 3] + "..."


def named(names: Sequence[str], most: int = 8) -> str:
    """Return names as one text, of many the first ones and a number."""
    more = len(names) - most
    return ", ".join([*names[:most], *([f"{more} more"] if more > 0 else [])])
