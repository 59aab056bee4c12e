# SPDX-License-Identifier: Apache-2.0
"""Pure: judges the records that are read back after a cut: lost, kept, absent, torn or garbled.

An acknowledged record must be there, byte for byte, unless its writer put another in its place or removed
its file, which must not be there once that is acknowledged. Another one is kept, absent (what was there
before still is, or nothing), or torn: there in part, and beside it what was there before. Anything else is
garbled. Of a file of which only the name was synced that must be there.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from .records import History, How, Record, Write, next_record

PAGE = 4096
_CLASSES = ((128 << 10, "up to 128 KiB"), (1 << 20, "up to 1 MiB"))
CLASSES = ("in one page", *(name for _, name in _CLASSES), "over 1 MiB")

Read = Callable[[str], bytes]
"""What a file holds. Raises OSError, FileNotFoundError if there is none."""


class Fate(enum.Enum):
    """What became of a record that was not acknowledged."""

    KEPT = "kept"
    ABSENT = "absent"
    TORN = "torn"
    GARBLED = "garbled"


@dataclass(slots=True)
class Findings:
    """The acknowledged records that are lost or garbled, with what was seen; the others' fates by size."""

    lost: dict[Record, str] = field(default_factory=dict)
    garbled: list[str] = field(default_factory=list)
    fates: Counter[tuple[Fate, str]] = field(default_factory=Counter)

    def add(self, write: Write, fate: Fate) -> None:
        """Count one that was not acknowledged."""
        self.fates[fate, class_of(write)] += 1
        if fate is Fate.GARBLED:
            self.garbled.append(f"{write.path} at {write.offset}: {write.record}")


def class_of(write: Write) -> str:
    """The class of its size."""
    size = write.record.size
    if write.how is How.PLACED and write.offset // PAGE == (write.offset + size - 1) // PAGE:
        return CLASSES[0]
    return next((name for most, name in _CLASSES if size <= most), CLASSES[-1])


def judge(history: History, read: Read) -> Findings:
    """Read back all that was written, and what was removed."""
    findings = Findings()
    for path, writes in history.files.items():
        try:
            data = read(path)
        except FileNotFoundError:
            data = None
        except OSError as error:
            _add_unreadable(history, writes, error, findings)
            continue
        if writes[-1].how is How.REMOVED:
            _judge_removed(history, writes, data, findings)
        else:
            _judge_file(history, writes, data, findings)
    return findings


def _judge_removed(history: History, writes: Sequence[Write], data: bytes | None, findings: Findings) -> None:
    """What is there though nobody knows whether it was removed is as it was before."""
    removed = writes[-1].record in history.acknowledged
    if removed and data is not None:
        findings.lost[writes[-1].record] = f"back: {writes[-1].path} was removed, and has {len(data)} bytes"
    elif data is not None:
        _judge_file(history, writes[:-1], data, findings)


def _judge_file(history: History, writes: Sequence[Write], data: bytes | None, findings: Findings) -> None:
    if writes[0].how is How.APPENDED:
        _judge_appended(history, writes, data or b"", findings)
    elif writes[0].how is How.RENAMED:
        _judge_renamed(history, writes, data, findings)
    elif writes[0].how is How.NAMED:
        _judge_named(history, writes[0], data, findings)
    else:
        for rivals in _by_place(writes):
            _judge_place(history, rivals, data, findings)


def _judge_named(history: History, write: Write, data: bytes | None, findings: Findings) -> None:
    """That its name was acknowledged promises nothing of what is in it."""
    if data is None and write.record in history.acknowledged:
        findings.lost[write.record] = f"absent: the name {write.path}, whose directory was synced"
        return
    if write.record.size:
        _judge_place(History(), [write], data, findings)
    if data is not None and len(data) > write.record.size:
        findings.garbled.append(f"{write.path} has {len(data)} bytes, more than were written")


def _add_unreadable(history: History, writes: Sequence[Write], error: OSError, findings: Findings) -> None:
    for rivals in _by_place(writes):
        if before := _split(history, rivals)[0]:
            findings.lost[before.record] = f"{before.path} can't be read: {error.strerror}"


def _by_place(writes: Sequence[Write]) -> Iterator[Sequence[Write]]:
    places: dict[int, list[Write]] = {}
    for write in writes:
        places.setdefault(write.offset, []).append(write)
    yield from places.values()


def _split(history: History, writes: Sequence[Write]) -> tuple[Write | None, Sequence[Write]]:
    """The last one that was acknowledged, and what came after it."""
    for number in range(len(writes) - 1, -1, -1):
        if writes[number].record in history.acknowledged:
            return writes[number], writes[number + 1 :]
    return None, writes


def _judge_place(history: History, writes: Sequence[Write], data: bytes | None, findings: Findings) -> None:
    """Records of one size that were put in the same place one after the other."""
    before, after = _split(history, writes)
    offset, size = writes[0].offset, writes[0].record.size
    have = (data or b"")[offset : offset + size]
    old = before.record.pack() if before else b""
    if before and have == old:
        _add_last(after, Fate.ABSENT, findings)
        return
    news = [write.record.pack() for write in reversed(after)]
    if have in news:
        findings.add(after[-1 - news.index(have)], Fate.KEPT)
        return
    fate = _fate(have, offset, news, old)
    if before and (fate is not Fate.TORN or not after):
        findings.lost[before.record] = _seen(before, have, fate, data)
    if not before or fate is not Fate.ABSENT:
        _add_last(after, fate, findings)


def _add_last(writes: Sequence[Write], fate: Fate, findings: Findings) -> None:
    if writes:
        findings.add(writes[-1], fate)


def _fate(have: bytes, offset: int, news: Sequence[bytes], old: bytes) -> Fate:
    """Of a place that holds neither the old nor one of the new records as a whole."""
    if not any(have):
        return Fate.ABSENT
    size = len(old or news[0])
    candidates = [*news, old or bytes(size)]
    if not old:  # nothing was there: nothing may be there still, or the file end before
        have = have.ljust(size, b"\0")
    start = 0
    while start < size:
        end = min(size, start + PAGE - (offset + start) % PAGE)
        if not _fits(have[start:end], [one[start:end] for one in candidates]):
            return Fate.GARBLED
        start = end
    return Fate.TORN


def _fits(have: bytes, pieces: Sequence[bytes]) -> bool:
    """Whether a page holds what one of the writes put there, or the beginning of it and behind that another:
    where the kernel cuts a write into requests it may end in the middle of a page.
    """
    if have in pieces:
        return True
    begun = [_alike(have, piece) for piece in pieces]
    return any(have[most:] == piece[most:] for most in begun if most for piece in pieces)


def _alike(one: bytes, other: bytes) -> int:
    """How many bytes they begin with alike."""
    both = enumerate(zip(one, other, strict=False))
    return next((place for place, (mine, its) in both if mine != its), min(len(one), len(other)))


def _seen(write: Write, have: bytes, fate: Fate, data: bytes | None) -> str:
    file = "which is not there" if data is None else f"which has {len(data)} bytes"
    what = fate.value if len(have) == write.record.size or fate is Fate.GARBLED else "absent"
    return f"{what}: {write.record.size} bytes at {write.offset} in {write.path}, {file}"


def _judge_renamed(history: History, writes: Sequence[Write], data: bytes | None, findings: Findings) -> None:
    """Each was synced before it got its name: whichever is there must be whole."""
    before, after = _split(history, writes)
    kept = next((write for write in after if write.record.pack() == data), None)
    if kept:
        findings.add(kept, Fate.KEPT)
        return
    stands = data == before.record.pack() if before else data is None
    if stands:
        _add_last(after, Fate.ABSENT, findings)
        return
    older = data is None or any(write.record.pack() == data for write in writes)
    if before:
        findings.lost[before.record] = (
            f"{'absent' if older else 'garbled'}: renamed to {before.path}, which "
            f"{'is not there' if data is None else 'is an earlier one' if older else 'is none of its kind'}"
        )
    if not older:
        _add_last(after, Fate.GARBLED, findings)


def _judge_appended(history: History, writes: Sequence[Write], data: bytes, findings: Findings) -> None:
    """In any order, each once."""
    known = {write.record: write for write in writes}
    times, torn = _scan(data, known, history.acknowledged, findings)
    for record, write in known.items():
        if record in history.acknowledged:
            if times[record] != 1:
                findings.lost[record] = f"appended to {write.path}: there {times[record]} times"
        elif times[record] > 1:
            findings.add(write, Fate.GARBLED)
        elif record not in torn:
            findings.add(write, Fate.KEPT if times[record] else Fate.ABSENT)


def _scan(
    data: bytes, known: dict[Record, Write], acknowledged: set[Record], findings: Findings
) -> tuple[Counter[Record], set[Record]]:
    """How often each is there, and which are torn; what belongs to none is garbled."""
    times, torn = Counter[Record](), set[Record]()
    place = 0
    while place < len(data):
        start, record = next_record(data, place)
        if any(data[place:start]):
            _add_stray(
                data[place:start], [known[one] for one in known if one not in acknowledged], torn, findings
            )
        place = start + 1 if record else start
        if record not in known:
            continue
        body, have = record.pack(), data[start : start + record.size]
        if have == body:
            times[record] += 1
            place = start + record.size
        elif record not in acknowledged and _fate(have, start, [body], b"") is Fate.TORN:
            findings.add(known[record], Fate.TORN)
            torn.add(record)
            place = start + record.size
    return times, torn


def _add_stray(stray: bytes, unsure: Sequence[Write], torn: set[Record], findings: Findings) -> None:
    """Bytes that no head announces: the rest of a torn record, or nobody's."""
    part = stray.strip(b"\0")
    for write in unsure:
        if part in write.record.pack():
            findings.add(write, Fate.TORN)
            torn.add(write.record)
            return
    findings.garbled.append(f"{len(stray)} bytes that nobody wrote between appended records")
