# SPDX-License-Identifier: Apache-2.0
"""Edge (the terminal, the clock): how far something is where there is no terminal: a line now and then."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, TypeVar

from millpond.base.text import counted, duration
from millpond.host.terminal.printing import size

PERIOD_SECONDS = 10.0
"""Time between two lines."""
QUIET_SECONDS = 2.0
"""Time after which a terminal shows what ``waiting`` is for."""
T = TypeVar("T")


class ProgressView(Protocol):
    """A context that shows how far copies, and other things that last, are."""

    def __enter__(self) -> Self:
        """Begin to show."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""

    def begin(self, name: str, total: int) -> Callable[[int], None]:
        """Begin what has ``total`` bytes. Returns the function to call with the bytes of a step."""

    def status(self, name: str) -> contextlib.AbstractContextManager[Callable[[str], None]]:
        """Show, inside the context, for how long something without a known end has lasted. Enters as the
        function to call with what is known of it; a terminal shows nothing before its first call.
        """

    def print(self, line: str) -> None:
        """Print a line for the user."""


@dataclass(slots=True)
class _Copy:
    name: str
    total: int
    began: float
    done: int = 0


@dataclass(slots=True, eq=False)
class _Status:
    name: str
    began: float
    text: str = ""


class ProgressLines:
    """A ProgressView without a terminal. Every PERIOD_SECONDS it calls ``tell`` with a line for each copy
    or status that is under way, or prints it on standard error; ``shows`` false prints nothing at all.
    ``clock`` is a steady one (s). Thread-safe.
    """

    def __init__(
        self,
        *,
        shows: bool = True,
        tell: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shows, self._tell, self._clock = shows, tell or _tell, clock
        self._copies: list[_Copy] = []
        self._statuses: list[_Status] = []
        self._lock, self._end = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> Self:
        if self._shows:
            self._thread.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._end.set()
        if self._shows:
            self._thread.join()

    def begin(self, name: str, total: int) -> Callable[[int], None]:
        copy = _Copy(name, total, self._clock())

        def advance(count: int) -> None:
            with self._lock:
                copy.done += count

        with self._lock:
            self._copies.append(copy)
        return advance

    @contextlib.contextmanager
    def status(self, name: str) -> Iterator[Callable[[str], None]]:
        status = _Status(name, self._clock())

        def say(text: str) -> None:
            status.text = text

        with self._lock:
            self._statuses.append(status)
        try:
            yield say
        finally:
            with self._lock:
                self._statuses.remove(status)

    def print(self, line: str) -> None:
        if self._shows:
            print(line, flush=True)

    def look(self) -> None:
        """Tell how far each copy and status is that has not ended."""
        with self._lock:
            self._copies = [copy for copy in self._copies if copy.done < copy.total]
            now = self._clock()
            lines = [described(copy.name, copy.done, copy.total, now - copy.began) for copy in self._copies]
            lines += [lasting(each.name, each.text, now - each.began) for each in self._statuses]
        for line in lines:
            self._tell(line)

    def _run(self) -> None:
        while not self._end.wait(PERIOD_SECONDS):
            self.look()


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def described(name: str, done: int, total: int, seconds: float) -> str:
    """Return how far a copy is that has ``done`` so many bytes of ``total`` in some seconds."""
    share = f"{name}: {done / max(total, 1):.0%} of {size(total)}"
    if not done:
        return share
    rate = done / max(seconds, 1e-3)
    return f"{share}, {size(rate)}/s, {duration((total - done) / rate)} left"


def lasting(name: str, text: str, seconds: float) -> str:
    """Return what is known of something that has lasted some seconds, without a known end."""
    return f"{name}: {f'{text}, ' if text else ''}{duration(seconds)} so far"


def view(*, terminal: bool, shows: bool = True) -> ProgressView:
    """Return a view: bars on a terminal, lines elsewhere, none unless it ``shows``."""
    if not (terminal and shows):
        return ProgressLines(shows=shows)
    from millpond.host.terminal.progress_bars import ProgressBars  # loads rich

    return ProgressBars()


@contextlib.contextmanager
def waiting(name: str, text: str, *, shows: bool = True) -> Iterator[Callable[[str], None]]:
    """Show ``text`` of something without a known end that lasts longer than QUIET_SECONDS inside the context.
    Enters as the function to call with what is known of it later.
    """
    told, said = threading.Event(), [text]
    with view(terminal=sys.stdout.isatty(), shows=shows) as shown, shown.status(name) as say:

        def tell_of(later: str) -> None:
            said[0] = later
            if told.is_set():
                say(later)

        def begin() -> None:
            told.set()
            say(said[0])

        timer = threading.Timer(QUIET_SECONDS, begin)
        timer.daemon = True
        timer.start()
        try:
            yield tell_of
        finally:
            timer.cancel()
            timer.join()


def each_told(
    name: str,
    items: Collection[T],
    noun: str,
    *,
    shows: bool = True,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[T]:
    """Yield ``items``, and show as ``waiting`` does how many of them are done, and how long the others will
    take: as long each as those before. ``noun`` is the word for one of them, ``clock`` a steady one (s).
    """
    total, began = counted(len(items), noun), clock()
    with waiting(name, f"0 of {total}", shows=shows) as tell:
        for done, item in enumerate(items, 1):
            yield item
            left = (clock() - began) / done * (len(items) - done)
            tell(f"{done} of {total}, about {duration(left)} left")
