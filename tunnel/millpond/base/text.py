"""Pure: text that a peer sent, made fit for logs and terminals."""

from __future__ import annotations

LONGEST = 1000


def printable(text: str, longest: int = LONGEST) -> str:
    """One line without control characters, shortened: a peer must not write on a terminal as it likes."""
    cleaned = "".join(char if char.isprintable() else " " for char in text[: longest + 1])
    return cleaned if len(cleaned) <= longest else cleaned[: longest - 3] + "..."
