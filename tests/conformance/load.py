# SPDX-License-Identifier: Apache-2.0
"""Edge (processes): the load under a power cut or kill: writers on both sides of a volume, their files."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import shutil
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from conformance import writers
from conformance.machine import DEVICE, HOST, Machine
from conformance.readback import Findings, judge
from conformance.records import History, Span, count_acknowledged, count_names_acknowledged
from millpond.base.errors import LocalError

SIDES = {"the device": DEVICE, "the host": HOST}
_EACH = 3
_SECONDS = 30.0
_LOOK = 0.05
_PAUSES = (0, 0.005, 0.03)
_ALONE = (0.1, 0.2)
_LONGEST_ALONE = 2.0
_INSTANT = 0.0005


class TooFew(Exception):
    """A side was not promised what it must be, so nothing was shown."""


class Load:
    """Writers on the mounts of a machine, in a directory ``name`` of their own, with notes in ``notes``."""

    def __init__(self, machine: Machine, notes: Path, name: str, chance: random.Random) -> None:
        self.machine, self.chance = machine, chance
        self._notes, self._name = notes, name
        self._pids: dict[str, list[int]] = {}

    def start(self) -> None:
        """On both sides."""
        self._notes.mkdir()
        numbers = {side: range(first * _EACH, (first + 1) * _EACH) for first, side in enumerate(SIDES)}
        writers.prepare(
            self.machine.mount_of(DEVICE) / self._name, [n for side in numbers.values() for n in side]
        )
        pause = self.chance.choice(_PAUSES)
        for side, part in SIDES.items():
            place = self.machine.mount_of(part) / self._name
            (self._notes / side).mkdir()
            self._pids[side] = [
                writers.start(
                    place, number, self._notes / side / str(number), self.chance.getrandbits(32), pause
                )
                for number in numbers[side]
            ]

    def acknowledged(self) -> dict[str, int]:
        """How many records the writers of each side have been promised."""
        return {
            side: sum(count_acknowledged(path.read_text()) for path in (self._notes / side).iterdir())
            for side in SIDES
        }

    def wait_for(self, more: int) -> None:
        """Until each side that has writers has been promised so many more. Raises TooFew."""
        before, end = self.acknowledged(), time.monotonic() + _SECONDS
        writing = [side for side, pids in self._pids.items() if pids]
        while waiting := [side for side in writing if self.acknowledged()[side] < before[side] + more]:
            self._require_alive()
            if time.monotonic() > end:
                now = self.acknowledged()
                counts = ", ".join(f"{now[side] - before[side]} to {side}" for side in waiting)
                raise TooFew(f"in {_SECONDS:.0f} s fewer than {more} records were acknowledged: {counts}")
            time.sleep(_LOOK)

    def _require_alive(self) -> None:
        for side, pids in self._pids.items():
            if any(os.waitpid(pid, os.WNOHANG)[0] for pid in pids):
                raise LocalError(f"a writer of {side} has ended")

    def leave_one(self) -> None:
        """Let one writer alone go on for a while: no other's fsync makes up for what its own leaves out."""
        chosen = self.chance.choice(list(itertools.chain.from_iterable(self._pids.values())))
        for side, pids in self._pids.items():
            _kill([pid for pid in pids if pid != chosen])
            self._pids[side] = [pid for pid in pids if pid == chosen]
        time.sleep(self.chance.uniform(*_ALONE))
        self._await_promise(max(self._notes.glob("*/*"), key=lambda path: path.stat().st_mtime_ns))

    def _await_promise(self, notes: Path) -> None:
        """Until just after a name was: what makes up for an fsync a bit later has not had the time."""
        before, end = count_names_acknowledged(notes.read_text()), time.monotonic() + _LONGEST_ALONE
        while count_names_acknowledged(notes.read_text()) == before and time.monotonic() < end:
            time.sleep(_INSTANT)

    def stop(self, sides: Iterable[str] = tuple(SIDES)) -> None:
        """Kill the writers of these sides."""
        _kill([pid for side in sides for pid in self._pids.pop(side, ())])

    def read_back(self, without_power: Span | None) -> Mapping[str, Findings]:
        """What is in the file system below, and what each side sees."""
        history = History()
        for path in self._notes.glob("*/*"):
            history.add(int(path.name), path.read_text(), without_power)
        seen = {"below": self.machine.below}
        seen |= {f"seen by {side}": self.machine.mount_of(part) for side, part in SIDES.items()}
        return {
            place: judge(history, functools.partial(_read, top / self._name)) for place, top in seen.items()
        }

    def remove(self) -> None:
        """All that was written."""
        shutil.rmtree(self.machine.mount_of(DEVICE) / self._name)
        shutil.rmtree(self._notes)


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _read(top: Path, path: str) -> bytes:
    return (top / path).read_bytes()
