# SPDX-License-Identifier: Apache-2.0
"""Edge: the backplane that boards sit in: switches them on, and on again when one dies."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Protocol

from millpond.base.errors import LocalError

log = logging.getLogger(__name__)
RESET_SECONDS = 1.0


class BoardRuntime(Protocol):
    """A board that can be switched on and off; an orderly shutdown takes up to ``off_seconds``."""

    off_seconds: float

    @property
    def name(self) -> str:
        """Return the device's name."""

    @property
    def pids(self) -> set[int]:
        """Return the board's own processes, children of this one."""

    def power_on(self) -> None:
        """Start it. Raises LocalError."""

    def died(self) -> bool:
        """Return whether the board has gone off by itself; true once."""

    def shut_down(self) -> None:
        """Tell it to go off; returns at once."""

    def power_off(self, patience: float) -> None:
        """Shut all boards down."""


class BoardSupervisor:
    """The supervisor of all boards of a fleet that this machine runs. Call from one thread."""

    def __init__(self, boards: Sequence[BoardRuntime]) -> None:
        self._boards = list(boards)
        self._again: dict[str, float] = {}

    def power_on(self) -> None:
        """Switch all boards on."""
        for board in self._boards:
            board.power_on()

    def add(self, board: BoardRuntime) -> None:
        """Take one board more, and switch it on."""
        self._boards.append(board)
        self._switch_on(board)

    @property
    def names(self) -> set[str]:
        """Return the names of all boards."""
        return {board.name for board in self._boards}

    def tend(self) -> None:
        """Note boards that died, and switch them on again a second later, as a watchdog would."""
        now = time.monotonic()
        for board in self._boards:
            name = board.name
            if board.died():
                log.warning("%s went down; it is switched on again", name)
                self._again[name] = now + RESET_SECONDS
            elif self._again.get(name, now + 1) <= now:
                del self._again[name]
                self._switch_on(board)

    def _switch_on(self, board: BoardRuntime) -> None:
        """Switch one board on; a board that fails must not take the others with it."""
        try:
            board.power_on()
        except LocalError as error:
            log.warning("%s cannot be switched on, it is tried again: %s", board.name, error)
            self._again[board.name] = time.monotonic() + RESET_SECONDS

    @property
    def pids(self) -> set[int]:
        """Return the boards' own processes."""
        return {pid for board in self._boards for pid in board.pids}

    def power_off(self) -> None:
        """Shut all boards down."""
        for board in self._boards:
            board.shut_down()
        for board in self._boards:
            board.power_off(board.off_seconds)
