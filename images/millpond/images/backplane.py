"""Edge: the backplane that boards sit in: switches them on, and on again when one dies."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from millpond.images.emulated import BoardSpec, EmulatedBoard

log = logging.getLogger(__name__)
RESET_SECONDS = 1.0
OFF_SECONDS = 10.0


class Backplane:
    """All emulated boards of a fleet. Call from one thread."""

    def __init__(self, specs: Sequence[BoardSpec]) -> None:
        self._boards = [EmulatedBoard(spec) for spec in specs]
        self._again: dict[str, float] = {}

    def power_on(self) -> None:
        """Switch all boards on."""
        for board in self._boards:
            board.power_on()

    def tend(self) -> None:
        """Note boards that died, and switch them on again a second later, as a watchdog would."""
        now = time.monotonic()
        for board in self._boards:
            name = board.spec.name
            if board.died():
                log.warning("%s went down; it is switched on again", name)
                self._again[name] = now + RESET_SECONDS
            elif self._again.get(name, now + 1) <= now:
                del self._again[name]
                board.power_on()

    @property
    def pids(self) -> set[int]:
        """The boards' own processes."""
        return {board.pid for board in self._boards if board.pid}

    def power_off(self) -> None:
        """Shut all boards down."""
        for board in self._boards:
            board.shut_down()
        for board in self._boards:
            board.power_off(OFF_SECONDS)
