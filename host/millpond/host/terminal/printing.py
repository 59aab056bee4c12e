# SPDX-License-Identifier: Apache-2.0
"""Edge (the terminal): results for a person and for a program, without loading what a table needs."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

from millpond.base.schema import dump


class Format(StrEnum):
    """The format of results: text or JSON."""

    TEXT = "text"
    JSON = "json"


def show(output: Format, document: object, text: str | Callable[[], Any]) -> None:
    """Print a result: the ``document`` as JSON, or else a ``text``, nothing if that is empty. A function is
    called only for a person, and may also return what rich renders.
    """
    if output is Format.JSON:
        print_json(document)
    elif shown := text if isinstance(text, str) else text():
        if isinstance(shown, str):
            print(shown)
        else:
            from millpond.host.terminal import tables  # loads rich

            tables.console().print(shown)


def print_json(value: object) -> None:
    """Print one JSON document on standard output."""
    import json  # takes as long as all else here

    print(json.dumps(dump(value), indent=2, default=_plain, allow_nan=False))


def _plain(value: object) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def size(count: float) -> str:
    """Format a number of bytes: 512 B, 1.4 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
