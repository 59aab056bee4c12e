# SPDX-License-Identifier: Apache-2.0
"""What an agent notes of its host's time, for a board without a clock of its own."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest

from millpond.agent.control import HostTime
from millpond.images.ondevice import clock
from millpond.images.ondevice.clock import Places

EXPIRY = 2_000_000_000.0


def test_the_board_reads_what_the_agent_has_noted(tmp_path: Path) -> None:
    HostTime(tmp_path).note(1_795_000_000.25, EXPIRY)
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    found = clock.host_time(Places(told=tmp_path / "host-time"), now)
    assert 0 <= found - 1_795_000_000.25 < 60
    assert [path.name for path in tmp_path.iterdir()] == ["host-time"]


@pytest.mark.parametrize("told", [0.0, -1.0, EXPIRY, EXPIRY + 1, math.inf, math.nan])
def test_a_time_at_which_the_host_would_be_nobody_is_not_noted(tmp_path: Path, told: float) -> None:
    """Else a host could set a clock so far ahead that the device trusts nobody any more."""
    noted = HostTime(tmp_path)
    noted.note(told, EXPIRY)
    assert list(tmp_path.iterdir()) == []
    noted.note(EXPIRY - 1, EXPIRY)
    assert (tmp_path / "host-time").exists()


def test_it_is_noted_once_a_day(tmp_path: Path) -> None:
    noted = HostTime(tmp_path)
    noted.note(1000.0, EXPIRY)
    noted.note(2000.0, EXPIRY)
    assert (tmp_path / "host-time").read_text().startswith("1000.0 ")


def test_without_a_directory_of_its_own_it_notes_nothing() -> None:
    HostTime(None).note(1000.0, EXPIRY)
