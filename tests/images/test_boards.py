# SPDX-License-Identifier: Apache-2.0
"""Emulated boards, switched on for real with a small program in the agent's place."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millpond.base.errors import LocalError
from millpond.images.runtime.emulated import BoardSpec, EmulatedBoard
from millpond.images.runtime.supervisor import BoardSupervisor

from ..waiting import eventually


def _why_not() -> str | None:
    if os.geteuid() != 0:
        return "needs root"
    for device in ("/dev/fuse", "/dev/net/tun"):
        if not os.access(device, os.R_OK | os.W_OK):
            return f"{device} is not usable"
    return None


pytestmark = pytest.mark.expected_log("csd0 does not shut down; its power is cut")
needs_boards = pytest.mark.skipif(_why_not() is not None, reason=_why_not() or "")


def spec(directory: Path, script: str) -> BoardSpec:
    for part in ("etc", "flash", "state", "slot"):
        (directory / part).mkdir(parents=True, exist_ok=True)
    return BoardSpec("csd0", directory, ("/bin/sh", "-c", script))


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Callable[[str], EmulatedBoard]]:
    boards: list[EmulatedBoard] = []

    def make(script: str) -> EmulatedBoard:
        boards.append(EmulatedBoard(spec(tmp_path / "csd0", script)))
        boards[-1].power_on()
        return boards[-1]

    yield make
    for one in boards:
        one.power_off(0)


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@needs_boards
def test_a_board_is_a_machine_of_its_own(board: Callable[[str], EmulatedBoard], tmp_path: Path) -> None:
    script = """
        exec 2>&1 > /flash/seen.tmp
        uname -n; cat /etc/hostname; id -u; echo $$; ls -d /proc/[0-9]* | wc -l
        tail -n +3 /proc/net/dev | cut -d: -f1; echo ends
        touch /etc/millpond/x 2>/dev/null && echo WRITABLE
        test -e %s && echo VISIBLE
        mv /flash/seen.tmp /flash/seen; exec sleep 100
    """
    outside = tmp_path / "outside"
    outside.touch()
    board(script % outside)
    seen = eventually(lambda: read(tmp_path / "csd0" / "flash" / "seen"), "the agent ran").splitlines()
    assert seen[:3] == ["csd0", "csd0", "0"]
    assert int(seen[3]) > 1
    assert int(seen[4]) <= 5
    assert seen[5].strip() == "lo"
    assert seen[6:] == ["ends"]


@needs_boards
def test_an_agent_that_ends_is_started_again(board: Callable[[str], EmulatedBoard], tmp_path: Path) -> None:
    board("echo started >> /flash/starts; exit 3")
    starts = tmp_path / "csd0" / "flash" / "starts"
    eventually(lambda: read(starts).count("started") >= 3, "the agent is started again")


@needs_boards
def test_a_board_that_is_switched_off_lets_its_agent_end(
    board: Callable[[str], EmulatedBoard], tmp_path: Path
) -> None:
    on = board("trap 'echo bye > /flash/bye; exit 0' TERM; echo > /flash/on; while :; do sleep 0.1; done")
    eventually((tmp_path / "csd0" / "flash" / "on").exists, "the agent runs")
    assert not on.died()
    on.shut_down()
    on.power_off(10)
    assert not on.pids
    assert read(tmp_path / "csd0" / "flash" / "bye") == "bye\n"
    on.shut_down()  # it is off
    on.power_off(10)


@needs_boards
def test_a_board_without_power_takes_everything_with_it(
    board: Callable[[str], EmulatedBoard], tmp_path: Path
) -> None:
    tick = tmp_path / "csd0" / "flash" / "tick"
    on = board(
        "(trap '' TERM HUP INT; exec setsid sh -c 'while :; do date +%N > /flash/tick; sleep 0.02; done') &"
        "sleep 99"
    )
    eventually(tick.exists, "the agent's child runs")
    on.shut_down()
    on.power_off(0)
    assert not on.pids
    eventually(lambda: _stands_still(tick), "the agent's child is gone")


def _stands_still(path: Path) -> bool:
    before = read(path)
    time.sleep(0.2)
    return read(path) == before


@needs_boards
def test_a_board_that_dies_is_noticed_once(board: Callable[[str], EmulatedBoard], tmp_path: Path) -> None:
    on = board("echo > /flash/on; exec sleep 100")
    eventually((tmp_path / "csd0" / "flash" / "on").exists, "the agent runs")
    (pid,) = on.pids
    os.kill(pid, 9)
    eventually(on.died, "its death is noticed")
    assert not on.pids
    assert not on.died()


@needs_boards
@pytest.mark.expected_log("csd0 went down; it is switched on again")
def test_a_backplane_switches_a_dead_board_on_again(tmp_path: Path) -> None:
    backplane = BoardSupervisor(
        [EmulatedBoard(spec(tmp_path / "csd0", "echo started >> /flash/starts; exec sleep 100"))]
    )
    starts = tmp_path / "csd0" / "flash" / "starts"
    backplane.power_on()
    try:
        eventually(lambda: read(starts).count("started") == 1, "the agent runs")
        (pid,) = backplane.pids
        os.kill(pid, 9)

        def twice() -> bool:
            backplane.tend()
            return read(starts).count("started") == 2

        eventually(twice, "the board is on again")
        assert backplane.pids
        assert pid not in backplane.pids
    finally:
        backplane.power_off()
    assert not backplane.pids


def test_a_board_that_was_never_made_is_told(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="millpond init"):
        EmulatedBoard(BoardSpec("csd0", tmp_path)).power_on()
