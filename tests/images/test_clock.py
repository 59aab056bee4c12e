# SPDX-License-Identifier: Apache-2.0
"""The clock of a board without a battery: the host sets it, never before a time that is known to be over."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from millpond.base.errors import LocalError
from millpond.host.fleet.authority import Authority
from millpond.images.build import recipe
from millpond.images.build.recipe import RECIPE
from millpond.images.ondevice import clock
from millpond.images.ondevice.clock import Places

IMAGE, TODAY = 1_790_000_000.0, 1_795_000_000.0
UP = 500.0


@pytest.fixture
def board(tmp_path: Path) -> Places:
    """A board without a clock of its own; the agent has just heard the host's time."""
    places = Places(tmp_path / "epoch", tmp_path / "saved", tmp_path / "told", tmp_path / "since_epoch")
    places.image.touch()
    os.utime(places.image, (IMAGE, IMAGE))
    places.told.write_text(f"{TODAY} {UP}\n")
    return places


def test_the_host_sets_a_clock_that_is_wrong(board: Places) -> None:
    """A board without a battery had the time of its image until it was given another image."""
    assert clock.wanted(board, IMAGE, UP) == TODAY
    assert clock.wanted(board, IMAGE, UP + 7.5) == TODAY + 7.5
    assert clock.wanted(board, TODAY + 3600, UP) == TODAY
    assert clock.wanted(board, TODAY + 29, UP) is None
    assert clock.wanted(board, TODAY - 29, UP) is None


def test_a_right_clock_of_the_boards_own_is_left(board: Places) -> None:
    board.rtc.write_text(f"{IMAGE + 5:.0f}\n")
    assert clock.wanted(board, IMAGE, UP) is None
    clock.save(board, TODAY)
    assert not board.saved.exists()  # if it is wrong once, this is not for ever
    for dead in ("0\n", f"{IMAGE - 5:.0f}\n", "", "?"):
        board.rtc.write_text(dead)
        assert clock.wanted(board, IMAGE, UP) == TODAY


def test_no_host_sets_a_clock_to_what_is_over(board: Places) -> None:
    board.told.write_text(f"{IMAGE - 60} {UP}\n")
    with pytest.raises(LocalError, match="is over"):
        clock.wanted(board, IMAGE, UP)
    clock.save(board, TODAY)
    for told in (IMAGE + 60, TODAY - 60):
        board.told.write_text(f"{told} {UP}\n")
        with pytest.raises(LocalError, match=r"the host says that it is 20\d\d-.* is over"):
            clock.wanted(board, TODAY + 60, UP)


def test_a_clock_that_is_ahead_of_all_certificates_is_none(
    board: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: a board whose own clock said 2100 found each certificate expired, and met no host again."""
    late, put = 4_102_444_800.0, list[float]()
    board = replace(board, authority=tmp_path / "ca.pem")
    board.authority.write_bytes(Authority.make("farm").pem)
    board.rtc.write_text(f"{late:.0f}\n")
    monkeypatch.setattr(time, "time", lambda: late)
    monkeypatch.setattr(time, "clock_settime", lambda _clock, when: put.append(when))
    clock.start(board)
    assert put == [IMAGE]  # from where it meets its host
    assert clock.wanted(board, IMAGE, UP) == TODAY
    clock.save(board, late)
    assert not board.saved.exists()
    clock.save(board, TODAY)
    clock.start(board)
    assert put == [IMAGE, TODAY]
    board.told.write_text(f"{late} {UP}\n")
    with pytest.raises(LocalError, match=r"the host says that it is 2100-01-01 .*, but no certificate"):
        clock.wanted(board, IMAGE, UP)
    board.saved.write_text(f"{late}\n")  # by an earlier version
    assert clock.floor(board) == IMAGE


@pytest.mark.parametrize("authority", [b"", b"nonsense", None])
def test_a_board_whose_fleet_is_unknown_keeps_its_clock(
    board: Places, tmp_path: Path, authority: bytes | None
) -> None:
    board = replace(board, authority=tmp_path / "ca.pem")
    if authority is not None:
        board.authority.write_bytes(authority)
    board.rtc.write_text("4102444800\n")
    assert clock.has_right_rtc(board)


def test_a_saved_time_only_grows_and_outlives_a_restart(board: Places) -> None:
    clock.save(board, IMAGE - 5)
    assert not board.saved.exists() and clock.floor(board) == IMAGE
    clock.save(board, TODAY)
    clock.save(board, TODAY - 100)
    assert clock.floor(board) == TODAY
    os.utime(board.image, (TODAY + 7, TODAY + 7))  # a later image
    assert clock.floor(board) == TODAY + 7
    board.saved.write_text("torn")
    assert clock.floor(board) == TODAY + 7


@pytest.mark.parametrize(
    "text", ["", "nan", f"{TODAY}", f"{TODAY} {UP + 1}", f"{TODAY} -1", f"{TODAY} nan", "a b"]
)
def test_what_is_no_time_sets_nothing(board: Places, text: str) -> None:
    board.told.write_text(text)
    with pytest.raises(LocalError, match=r"holds no time|is no time of this boot"):
        clock.wanted(board, IMAGE, UP)


@pytest.mark.parametrize("told", ["nan", "inf", "-inf"])
def test_a_time_that_is_no_number_sets_nothing(board: Places, told: str) -> None:
    board.told.write_text(f"{told} {UP}\n")
    with pytest.raises(LocalError):
        clock.wanted(board, IMAGE, UP)


def test_the_image_has_all_units_of_the_clock() -> None:
    units = {path.name for path in (RECIPE / "root/etc/systemd/system").glob("millpond-clock*")}
    enabled = {name for name in recipe.read("root.toml")["enable"] if "clock" in name}
    assert enabled == units - {"millpond-clock-set.service", "millpond-clock-save.service"}
    assert len(enabled) == 3
