# SPDX-License-Identifier: Apache-2.0
"""Sessions of masked exchanges: a device opens each once, over restarts."""

from __future__ import annotations

from pathlib import Path

import pytest

from millpond.agent.cohort import opened_sessions
from millpond.agent.cohort.opened_sessions import OpenedSessions
from millpond.base.errors import Refused


def session(number: int) -> bytes:
    return number.to_bytes(16)


def test_a_session_is_opened_once_also_after_a_restart(tmp_path: Path) -> None:
    for number in (7, 9, 8):  # those of two jobs come in any order
        OpenedSessions(tmp_path).note(session(number))
    for number in (7, 8, 9):
        with pytest.raises(Refused, match=r"policy\.cohort: this session was opened before"):
            OpenedSessions(tmp_path).note(session(number))


def test_a_session_is_noted_before_shares_are_given(tmp_path: Path) -> None:
    opened, other = OpenedSessions(tmp_path), OpenedSessions(tmp_path)
    with pytest.raises(Refused, match="no session was opened"):
        opened.wait()
    opened.begin(session(7))
    opened.wait()
    with pytest.raises(Refused, match="this session was opened before"):
        other.begin(session(7))
    with pytest.raises(Refused, match="no session was opened"):
        other.wait()
    with opened_sessions._LOCK:  # nothing is written yet
        opened._noted = opened._noting.submit(opened.note, session(8))
        other._noted = other._noting.submit(other.note, session(8))
    with pytest.raises(Refused, match="this session was opened before"):
        for each in (opened, other):
            each.wait()
    assert (tmp_path / "cohort.sessions").stat().st_size == 2 * 16


def test_no_session_below_the_kept_ones_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opened_sessions, "MOST_KEPT", 4)
    opened = OpenedSessions(tmp_path)
    for number in range(9):
        opened.note(session(number))
    assert (tmp_path / "cohort.sessions").stat().st_size == 4 * 16
    for number in range(9):
        with pytest.raises(Refused):
            opened.note(session(number))
    opened.note(session(9))


def test_a_session_that_cannot_be_noted_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"policy\.cohort: cohort\.sessions: No such file"):
        OpenedSessions(tmp_path / "gone").note(session(1))
    gone = OpenedSessions(tmp_path / "gone")
    gone.begin(session(1))
    with pytest.raises(Refused, match=r"policy\.cohort: cohort\.sessions: No such file"):
        gone.wait()
    with pytest.raises(Refused, match="a session has 16 bytes"):
        OpenedSessions(tmp_path).note(b"short")
