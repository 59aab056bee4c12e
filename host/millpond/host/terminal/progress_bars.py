# SPDX-License-Identifier: Apache-2.0
"""Edge (the terminal): a bar for each copy, with rate and time left, and a line for what has no known end."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column
from rich.text import Text

from millpond.base.text import duration
from millpond.host.terminal.tables import console

_BAR = 12
"""The width of a bar: beside it there is room for a name in 80 columns."""


def _in_one_line(ratio: int | None = None) -> Column:
    return Column(no_wrap=True, overflow="ellipsis", ratio=ratio)


class _Sizes(ProgressColumn):
    """Bytes, rate and time left of a copy; of what has no known end the time that it has lasted."""

    _parts = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text(f"{duration(task.elapsed or 0.0)} so far")
        return Text(" ").join(part.render(task) for part in self._parts)


class ProgressBars:
    """A ProgressView on a terminal."""

    def __init__(self) -> None:
        heading = TextColumn("{task.description}", markup=False, table_column=_in_one_line(ratio=1))
        sizes = _Sizes(table_column=_in_one_line())
        self._bars = Progress(heading, BarColumn(_BAR), sizes, console=console(), expand=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def begin(self, name: str, total: int) -> Callable[[int], None]:
        self._bars.start()  # without a bar it would leave an empty line
        return functools.partial(self._bars.advance, self._bars.add_task(name, total=total))

    @contextlib.contextmanager
    def status(self, name: str) -> Iterator[Callable[[str], None]]:
        task = self._bars.add_task(name, total=None)

        def say(text: str) -> None:
            self._bars.start()
            self._bars.update(task, description=f"{name}: {text}")

        try:
            yield say
        finally:
            self._bars.remove_task(task)

    def print(self, line: str) -> None:
        self._bars.console.print(line, markup=False, soft_wrap=True)
