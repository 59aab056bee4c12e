# SPDX-License-Identifier: Apache-2.0
"""Edge (the terminal): how far a launch is until its scripts run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Self

from millpond.host.api.launch import LaunchInput, LaunchPrepares
from millpond.host.terminal.progress_lines import ProgressView


class LaunchProgress:
    """Shows the preparation of a launch on ``view``, from the context's begin until its scripts run. The
    files that the daemon is sent have ``size`` bytes.
    """

    def __init__(self, view: ProgressView, size: int) -> None:
        self._view, self._size = view, size
        self._open, self._status = contextlib.ExitStack(), contextlib.ExitStack()
        self._say: Callable[[str], None] | None = None
        self._advance: Callable[[int], None] | None = None
        self._left = 0

    def __enter__(self) -> Self:
        self._open.enter_context(self._view)
        self._open.push(self._status)
        if not self._size:
            self._wait("")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def sending(self, inputs: Iterable[tuple[LaunchInput, bytes]]) -> Iterator[tuple[LaunchInput, bytes]]:
        """Yield the files for the daemon, and show how much of them is sent."""
        if not self._size:
            yield from inputs
            return
        advance = self._view.begin("files to the host daemon", self._size)
        for part, data in inputs:
            yield part, data
            advance(len(data))
        self._wait("")

    def take(self, news: LaunchPrepares) -> None:
        """Show what the daemon says; it has no words once the scripts run."""
        if news.total:
            self._send_on(news)
            return
        if self._advance:
            self._advance(self._left)
            self._left = 0
        if news.text:
            self._wait(news.text)
        else:
            self._open.close()

    def _send_on(self, news: LaunchPrepares) -> None:
        self._status.close()
        self._say = None
        if not self._advance:
            self._advance, self._left = self._view.begin("files to the workers", news.total), news.total
        left = news.total - news.done
        self._advance(self._left - left)
        self._left = left

    def _wait(self, text: str) -> None:
        if not self._say:
            self._say = self._status.enter_context(self._view.status("launch"))
        if text:
            self._say(text)
