# SPDX-License-Identifier: Apache-2.0
"""Pure: the records that writers leave in a volume's files, and the journal that they keep elsewhere.

A note says what is about to be written or removed, or what an fsync has acknowledged: whoever reads the
notes of a writer that was killed knows what must be there, what may be and what must not.
"""

from __future__ import annotations

import enum
import functools
import random
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

_HEAD = struct.Struct("=4sIII")
_MAGIC = b"\xf1rec"
SMALLEST = _HEAD.size
LARGEST = 3 << 20


@functools.cache
def _noise() -> bytes:
    return random.Random(0).randbytes(2 * LARGEST)


class How(enum.Enum):
    """How a record comes into its file."""

    PLACED = "placed"
    """At an offset, by nobody else: it may replace an earlier one of the same size."""
    RENAMED = "renamed"
    """As all of a file that takes the name of the one before, once that file is synced."""
    APPENDED = "appended"
    """At the end, wherever that is: others append, too."""
    NAMED = "named"
    """As all of a new file of which the directory alone is synced: only its name must be there."""
    REMOVED = "removed"
    """Not at all: its file is taken away, and must not be there again once that is synced."""


@dataclass(frozen=True, slots=True)
class Record:
    """One, by who wrote it and its number there. Its bytes follow from these: to know it whole, they are
    compared with what a file holds, which tells more than a checksum would. One of no bytes stands for what
    is done to a name alone.
    """

    writer: int
    sequence: int
    size: int

    def pack(self) -> bytes:
        """Its bytes, of which no part looks like the same part of another."""
        head = _HEAD.pack(_MAGIC, self.writer, self.sequence, self.size)
        start = (self.writer * 7919 + self.sequence * 104_729) % (len(_noise()) - LARGEST)
        return head + _noise()[start : start + self.size - len(head)] if self.size else b""


def next_record(data: bytes, start: int) -> tuple[int, Record | None]:
    """Where the next record seems to begin, and what its head says; the end, if none does."""
    place = data.find(_MAGIC, start)
    if place < 0 or place + _HEAD.size > len(data):
        return len(data), None
    _, writer, sequence, size = _HEAD.unpack_from(data, place)
    return place, Record(writer, sequence, size)


@dataclass(frozen=True, slots=True)
class Write:
    """A record and where it goes; ``path`` is below the directory that all writers share."""

    record: Record
    how: How
    path: str
    offset: int = 0


def note_write(write: Write) -> str:
    """It is about to be written."""
    record = write.record
    return f"w {record.sequence} {record.size} {write.how.value} {write.offset} {write.path}\n"


def note_acknowledged(when: float, sequences: Iterable[int]) -> str:
    """These are on the flash, said an fsync that had returned then."""
    return f"a {when:.6f} {' '.join(map(str, sequences))}\n"


@dataclass(frozen=True, slots=True)
class Span:
    """The time in which a device has no power. It says nothing then: the kernel here goes on, but what it
    tells whoever just waits for an fsync is no promise, and not always right either, with ext4 alone, too.
    """

    begin: float
    end: float

    def holds(self, when: float) -> bool:
        """Whether that is in it."""
        return self.begin <= when < self.end


@dataclass(frozen=True, slots=True)
class History:
    """What writers noted: their writes by file, each file's in their order, and the records that were
    acknowledged.
    """

    files: dict[str, list[Write]] = field(default_factory=dict)
    acknowledged: set[Record] = field(default_factory=set)

    def add(self, writer: int, notes: str, without_power: Span | None = None) -> None:
        """All notes of one writer; a last line that does not end was never made."""
        known: dict[int, Record] = {}
        for line in notes.splitlines(keepends=True):
            if not line.endswith("\n"):
                break
            word, _, rest = line[:-1].partition(" ")
            if word == "w":
                write = _parse(writer, rest)
                known[write.record.sequence] = write.record
                self.files.setdefault(write.path, []).append(write)
            else:
                when, *numbers = rest.split()
                if without_power is None or not without_power.holds(float(when)):
                    self.acknowledged.update(known[int(number)] for number in numbers)


def _parse(writer: int, text: str) -> Write:
    sequence, size, how, offset, path = text.split(" ", 4)
    return Write(Record(writer, int(sequence), int(size)), How(how), path, int(offset))


def count_acknowledged(notes: str) -> int:
    """How many records a writer was promised."""
    return sum(line.count(" ") - 1 for line in notes.splitlines() if line.startswith("a "))


def count_names_acknowledged(notes: str) -> int:
    """How many of those stand for a name alone."""
    fields = [line.split(" ") for line in notes.splitlines()]
    named = {word[1] for word in fields if word[0] == "w" and word[3:4] == [How.NAMED.value]}
    return sum(len(named.intersection(word[2:])) for word in fields if word[0] == "a")
