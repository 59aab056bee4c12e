# SPDX-License-Identifier: Apache-2.0
"""Records that are read back after a cut are judged correctly: lost, kept, absent, torn or garbled."""

from __future__ import annotations

import errno

import pytest

from .readback import CLASSES, PAGE, Fate, Findings, judge
from .records import (
    History,
    How,
    Record,
    Span,
    Write,
    count_acknowledged,
    count_names_acknowledged,
    note_acknowledged,
    note_write,
)

OLD, NEW, OTHER = (Record(1, number, 3 * PAGE) for number in (1, 2, 3))


def place(record: Record, offset: int = 0) -> Write:
    return Write(record, How.PLACED, "file", offset)


def judged(writes: list[Write], acknowledged: set[Record], data: bytes | None) -> Findings:
    def read(_path: str) -> bytes:
        if data is None:
            raise FileNotFoundError
        return data

    return judge(History({"file": writes}, acknowledged), read)


def fates(findings: Findings) -> list[Fate]:
    return [fate for fate, _ in findings.fates.elements()]


def test_what_was_acknowledged_and_is_there_is_no_finding() -> None:
    findings = judged([place(OLD), place(NEW, 3 * PAGE)], {OLD, NEW}, OLD.pack() + NEW.pack())
    assert findings == Findings()


@pytest.mark.parametrize("data", [None, b"", bytes(OLD.size), OLD.pack()[:-1], OTHER.pack()])
def test_what_was_acknowledged_and_is_not_there_is_lost(data: bytes | None) -> None:
    assert set(judged([place(OLD)], {OLD}, data).lost) == {OLD}


@pytest.mark.parametrize(
    ("data", "fate"),
    [
        (None, Fate.ABSENT),
        (bytes(NEW.size), Fate.ABSENT),
        (NEW.pack(), Fate.KEPT),
        (NEW.pack()[:PAGE], Fate.TORN),
        (NEW.pack()[: PAGE + 7], Fate.TORN),
        (bytes(PAGE) + NEW.pack()[PAGE:], Fate.TORN),
        (NEW.pack()[:PAGE] + b"x" * 2 * PAGE, Fate.GARBLED),
        (OTHER.pack(), Fate.GARBLED),
    ],
)
def test_what_was_not_acknowledged_may_be_there_or_not(data: bytes | None, fate: Fate) -> None:
    findings = judged([place(NEW)], set(), data)
    assert (fates(findings), findings.lost) == ([fate], {})
    assert bool(findings.garbled) == (fate is Fate.GARBLED)


@pytest.mark.parametrize(
    ("data", "fate", "lost"),
    [
        (OLD.pack(), Fate.ABSENT, False),
        (NEW.pack(), Fate.KEPT, False),
        (NEW.pack()[:PAGE] + OLD.pack()[PAGE:], Fate.TORN, False),
        (NEW.pack()[: PAGE + 7] + OLD.pack()[PAGE + 7 :], Fate.TORN, False),
        (NEW.pack()[:PAGE] + bytes(2 * PAGE), Fate.GARBLED, True),
        (NEW.pack()[:PAGE], Fate.GARBLED, True),
        (OTHER.pack(), Fate.GARBLED, True),
    ],
)
def test_a_record_that_is_being_replaced_may_be_torn_with_the_new_one_alone(
    data: bytes, fate: Fate, lost: bool
) -> None:
    findings = judged([place(OLD), place(NEW)], {OLD}, data)
    assert (fates(findings), set(findings.lost)) == ([fate], {OLD} if lost else set())


def test_a_record_that_vanished_while_it_was_replaced_is_lost() -> None:
    findings = judged([place(OLD), place(NEW)], {OLD}, None)
    assert set(findings.lost) == {OLD}


def test_what_cannot_be_read_is_lost() -> None:
    def read(_path: str) -> bytes:
        raise OSError(errno.EIO, "it is broken")

    findings = judge(History({"file": [place(OLD), place(NEW, 3 * PAGE)]}, {OLD}), read)
    assert findings.lost == {OLD: "file can't be read: it is broken"}


def test_one_that_comes_back_after_its_successor_was_acknowledged_is_a_loss() -> None:
    assert set(judged([place(OLD), place(NEW)], {OLD, NEW}, OLD.pack()).lost) == {NEW}


@pytest.mark.parametrize(
    ("data", "lost", "found"),
    [
        (OLD.pack(), False, [Fate.ABSENT]),
        (NEW.pack(), False, [Fate.KEPT]),
        (None, True, []),
        (NEW.pack()[:PAGE] + OLD.pack()[PAGE:], True, [Fate.GARBLED]),
    ],
)
def test_what_takes_a_name_is_whole(data: bytes | None, lost: bool, found: list[Fate]) -> None:
    writes = [Write(record, How.RENAMED, "file") for record in (OLD, NEW)]
    findings = judged(writes, {OLD}, data)
    assert (set(findings.lost), fates(findings)) == ({OLD} if lost else set(), found)


@pytest.mark.parametrize(
    ("data", "is_lost", "fate"),
    [
        (None, True, Fate.ABSENT),
        (b"", False, Fate.ABSENT),
        (NEW.pack(), False, Fate.KEPT),
        (NEW.pack()[:PAGE], False, Fate.TORN),
        (OTHER.pack(), False, Fate.GARBLED),
        (NEW.pack() + b"more", False, Fate.GARBLED),
    ],
)
def test_a_synced_name_is_there_whatever_is_in_it(data: bytes | None, is_lost: bool, fate: Fate) -> None:
    write = Write(NEW, How.NAMED, "file")
    findings = judged([write], {NEW}, data)
    assert (set(findings.lost), bool(findings.garbled)) == ({NEW} if is_lost else set(), fate is Fate.GARBLED)
    assert not judged([write], set(), None).lost


def test_an_empty_file_is_there_or_not() -> None:
    write = Write(Record(1, 1, 0), How.NAMED, "file")
    assert judged([write], {write.record}, b"") == judged([write], set(), None) == Findings()
    assert judged([write], {write.record}, None).lost
    assert judged([write], set(), b"x").garbled


def test_what_was_removed_does_not_come_back_once_that_is_acknowledged() -> None:
    writes = [place(OLD), Write(NEW, How.REMOVED, "file")]
    assert judged(writes, {OLD, NEW}, None) == Findings()
    assert set(judged(writes, {OLD, NEW}, OLD.pack()).lost) == {NEW}
    for data in (None, OLD.pack()):
        assert judged(writes, {OLD}, data) == Findings()
    assert set(judged(writes, {OLD}, b"").lost) == {OLD}


def test_appended_records_lie_in_any_order_but_once() -> None:
    writes = [Write(record, How.APPENDED, "file") for record in (OLD, NEW, OTHER)]
    ends_in_other = NEW.pack() + OLD.pack() + OTHER.pack()[:PAGE]
    assert fates(judged(writes, {OLD, NEW}, ends_in_other)) == [Fate.TORN]
    assert set(judged(writes, {OLD, NEW}, NEW.pack() * 2 + OLD.pack()).lost) == {NEW}
    assert set(judged(writes, {OLD, NEW}, NEW.pack()).lost) == {OLD}
    assert judged(writes, {OLD, NEW}, NEW.pack() + b"stray" + OLD.pack()).garbled


def test_the_rest_of_a_torn_record_is_known_without_its_head() -> None:
    writes = [Write(record, How.APPENDED, "file") for record in (OLD, NEW)]
    findings = judged(writes, {OLD}, OLD.pack() + bytes(PAGE) + NEW.pack()[PAGE:])
    assert (fates(findings), findings.garbled) == ([Fate.TORN], [])


def test_notes_tell_what_must_be_there() -> None:
    notes = "".join(
        [
            note_write(place(OLD)),
            note_acknowledged(1.0, [1]),
            note_write(place(NEW)),
            note_acknowledged(2.0, [2]),
            note_write(Write(OTHER, How.PLACED, "removed")),
            note_write(Write(Record(1, 4, 0), How.REMOVED, "removed")),
            note_acknowledged(3.0, [3])[:-1],
        ]
    )
    history = History()
    history.add(1, notes, Span(1.5, 2.5))
    removed = [Write(OTHER, How.PLACED, "removed"), Write(Record(1, 4, 0), How.REMOVED, "removed")]
    assert history == History({"file": [place(OLD), place(NEW)], "removed": removed}, {OLD})
    assert count_acknowledged(note_acknowledged(1.0, [1, 2])) == 2
    named = note_write(Write(NEW, How.NAMED, "file"))
    assert count_names_acknowledged(named + note_acknowledged(3.0, [1, NEW.sequence])) == 1


def test_classes_are_told_by_pages_and_requests() -> None:
    sizes = {PAGE: 0, 2 * PAGE: 1, 1 << 20: 2, (1 << 20) + 1: 3}
    for size, number in sizes.items():
        findings = judged([place(Record(1, 1, size))], set(), None)
        assert list(findings.fates) == [(Fate.ABSENT, CLASSES[number])]
