# SPDX-License-Identifier: Apache-2.0
"""Edge (the terminal): a bar for each copy, with rate and time left."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from millpond.host.terminal.tables import console


class ProgressBars:
    """A ProgressView on a terminal."""

    def __init__(self) -> None:
        heading = TextColumn("{task.description}", markup=False)
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._bars = Progress(heading, *columns, console=console())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def begin(self, name: str, total: int) -> Callable[[int], None]:
        self._bars.start()  # without a bar it would leave an empty line
        return functools.partial(self._bars.advance, self._bars.add_task(name, total=total))

    def print(self, line: str) -> None:
        self._bars.console.print(line, markup=False, soft_wrap=True)
