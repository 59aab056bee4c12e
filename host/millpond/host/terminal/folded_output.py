# SPDX-License-Identifier: Apache-2.0
"""Edge (the terminal): the output of several devices, equal output once, under the names of its devices."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence

from millpond.host.records.device_set import fold

MOST_HELD = 32 << 20
"""Characters to keep; more are shown at once."""


class FoldedOutput:
    """Keeps the output of ``devices`` until ``show``."""

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices = devices
        self.forget()

    def add(self, device: str, lines: Sequence[str], *, is_error: bool) -> None:
        """Keep lines of a device."""
        self._held[is_error][device] += lines
        self._size += sum(map(len, lines))
        if self._size > MOST_HELD:
            self.show()

    def show(self) -> None:
        """Print the kept output and forget it."""
        held = self._held
        self.forget()
        for is_error, stream in ((False, sys.stdout), (True, sys.stderr)):
            for text in folded(held[is_error]):
                print(text, file=stream)
            stream.flush()

    def forget(self) -> None:
        """Forget the kept output."""
        self._size = 0
        self._held: tuple[dict[str, list[str]], ...] = tuple(
            {device: [] for device in self._devices} for _ in range(2)
        )


def folded(outputs: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield a text for each different output: ``csd[0-2]: line``, or lines below their devices' names."""
    devices: dict[tuple[str, ...], list[str]] = {}
    for device, lines in outputs.items():
        if lines:
            devices.setdefault(tuple(lines), []).append(device)
    for lines, names in devices.items():
        yield f"{fold(names)}: {lines[0]}" if len(lines) == 1 else "\n  ".join([f"{fold(names)}:", *lines])
