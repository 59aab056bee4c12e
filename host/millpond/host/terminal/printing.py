# SPDX-License-Identifier: Apache-2.0
"""Edge (the terminal): results without tables, for commands that load nothing else."""

from __future__ import annotations

from typing import Any

from millpond.base.schema import dump


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
