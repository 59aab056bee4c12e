# SPDX-License-Identifier: Apache-2.0
"""Sums that a device has helped to unmask: one set of devices at a state, over restarts."""

from __future__ import annotations

from pathlib import Path

import pytest

from millpond.agent.cohort import told_sums
from millpond.agent.cohort.told_sums import ToldSums
from millpond.base.errors import Refused

ALL, OTHERS = ("csd0", "csd1", "csd2"), ("csd1", "csd2")


def test_a_state_has_sums_of_one_set_of_devices_also_after_a_restart(tmp_path: Path) -> None:
    ToldSums(tmp_path).note(b"first", ALL)
    ToldSums(tmp_path).note(b"first", tuple(reversed(ALL)))  # a repeated exchange
    ToldSums(tmp_path).note(b"second", OTHERS)
    for state, devices in ((b"first", OTHERS), (b"second", ALL)):
        with pytest.raises(Refused, match=r"policy.cohort: at this state a sum of other devices was told"):
            ToldSums(tmp_path).note(state, devices)


def test_a_record_that_a_power_cut_has_torn_is_written_anew(tmp_path: Path) -> None:
    told = ToldSums(tmp_path)
    told.note(b"first", ALL)
    with (tmp_path / "cohort.sums").open("ab") as file:
        file.write(b"torn")
    for state in (b"second", b"third"):
        told.note(state, ALL)
    for state in (b"first", b"second", b"third"):
        with pytest.raises(Refused):
            told.note(state, OTHERS)


def test_what_cannot_be_noted_is_not_told(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"policy\.cohort: cohort\.sums: No such file"):
        ToldSums(tmp_path / "gone").note(b"first", ALL)


def test_the_newest_records_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told_sums, "MOST_RECORDS", 4)
    told = ToldSums(tmp_path)
    for number in range(9):
        told.note(bytes([number]), ALL)
    assert (tmp_path / "cohort.sums").stat().st_size <= 4 * 64
    for number in (7, 8):
        with pytest.raises(Refused):
            told.note(bytes([number]), OTHERS)
