# SPDX-License-Identifier: Apache-2.0
"""Real mounts: the server is killed again and again while programs of the host make small files: whatever was
closed is there.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from ..effort import scaled
from ..waiting import eventually
from .conftest import mounted
from .world import World

KILLS = scaled(quick=4, full=50)
LEASE = 60.0  # a slow machine starts a server within it, too
PROGRAMS = 3
_MORE = 25  # files of each program between two kills
_SIZES = (0, 1, 100, 4096, 8192, 8193, 100_000)


def contents(number: int) -> bytes:
    dice = random.Random(number)
    return dice.randbytes(dice.choice(_SIZES))


def make_files(directory: Path, notes: Path) -> None:
    """Make files and remove some, named by the notes, and note what has succeeded; for ever."""
    dice, kept = random.Random(notes.name), list[int]()
    with notes.open("ab", buffering=0) as log:
        for number in range(1 << 30):
            try:
                if kept and dice.random() < 0.2:
                    gone = kept.pop(dice.randrange(len(kept)))
                    log.write(f"removing {gone}\n".encode())
                    (directory / f"{notes.name}-{gone}").unlink()
                    log.write(f"removed {gone}\n".encode())
                with (directory / f"{notes.name}-{number}").open("xb", buffering=0) as file:
                    file.write(contents(number))
                log.write(f"closed {number}\n".encode())
                kept.append(number)
            except OSError as error:
                log.write(f"error {error.errno}\n".encode())
                time.sleep(0.02)


def program(directory: Path, notes: Path) -> int:
    if pid := os.fork():
        return pid
    with contextlib.suppress(BaseException):
        make_files(directory, notes)
    os._exit(1)


def noted(notes: Path) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {"closed": [], "removing": [], "removed": [], "error": []}
    for line in notes.read_text().splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        word, number = line.split()
        found[word].append(int(number))
    return found


def await_more(logs: Sequence[Path]) -> None:
    """Return once each program has closed so many files more."""
    before = [len(noted(log)["closed"]) for log in logs]

    def all_go_on() -> bool:
        counts = zip(logs, before, strict=True)
        return all(len(noted(log)["closed"]) >= count + _MORE for log, count in counts)

    eventually(all_go_on, "each program goes on")


def wrong(world: World, place: Path, name: str, found: dict[str, list[int]]) -> list[int]:
    """The files that are not as they must be: whole where they were made, seen on the flash; or removed."""
    names, flash = set(os.listdir(place)), world.backing / "public" / place.name  # noqa: PTH208
    kept = set(found["closed"]) - set(found["removing"])
    lost = [n for n in kept if f"{name}-{n}" not in names or not is_whole(flash / f"{name}-{n}", n)]
    return lost + [n for n in found["removed"] if f"{name}-{n}" in names]


def is_whole(path: Path, number: int) -> bool:
    try:
        return path.read_bytes() == contents(number)
    except OSError:
        return False


@pytest.mark.parametrize("rival", [False, True], ids=["", "beside-the-device"])
@mounted(waits=True, lease=LEASE, timeout=LEASE)
def test_what_was_closed_outlives_its_server(world: World, tmp_path: Path, rival: bool) -> None:
    """Also if a program of the device makes files in the same directory."""
    kills = KILLS // (1 + rival)
    dice = random.Random(5)
    places = [world.host / "public" / f"d{number}" for number in range(PROGRAMS)]
    for place in places:
        place.mkdir(mode=0o777)
        place.chmod(0o777)
    places += [world.device / "public" / "d0"] if rival else []
    logs = [tmp_path / f"p{number}" for number in range(len(places))]
    for log in logs:
        log.touch()
    pids = [program(*each) for each in zip(places, logs, strict=True)]
    try:
        for _ in range(kills):
            await_more(logs)
            time.sleep(dice.uniform(0, 0.15))
            world.kill(world.server_pid)
            time.sleep(dice.choice((0.0, 0.3)))
            world.start_server()
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    for place, log in zip(places, logs, strict=True):
        found = noted(log)
        print(log.name, {word: len(numbers) for word, numbers in found.items()})
        assert not wrong(world, place, log.name, found)
        assert len(found["error"]) <= kills, found["error"]
