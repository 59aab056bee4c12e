# SPDX-License-Identifier: Apache-2.0
"""Edge (the terminal): a bar for each source of a copy, with rate and time left."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from millpond.host.terminal.tables import console


def transfer_progress(heading: TextColumn, shown_on: Console, *, disable: bool = False) -> Progress:
    """Return a display of transfers: behind ``heading`` a bar, the bytes, the rate and the time left."""
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    return Progress(heading, *columns, console=shown_on, disable=disable)


class ProgressBars:
    """A context that shows the bars."""

    def __init__(self) -> None:
        self._bars = transfer_progress(TextColumn("{task.description}", markup=False), console())

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def begin(self, name: str, total: int) -> Callable[[int], None]:
        """Add a bar of ``total`` bytes. Returns the function to call with the bytes of a step."""
        return functools.partial(self._bars.advance, self._bars.add_task(name, total=total))

    def print(self, line: str) -> None:
        """Print a line above the bars."""
        self._bars.console.print(line, markup=False)
