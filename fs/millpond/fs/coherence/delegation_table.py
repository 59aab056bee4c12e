"""Pure: the table of locks: who may keep what he knows of a file (protected read), and who changes it now.

A file that nobody changes may be kept by all. Who changes it, with the change announced by ``begin``, waits
until nobody else keeps it; while it lasts, nobody else is granted it anew. A directory is changed by one at
a time, so that what a name stands for can be looked up in between. A file that the device's own kernel
writes, unseen, is granted to nobody. A directory that nobody else keeps or changes may be granted
exclusively: then others must not even look at it before its holder has told what names he has made there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, NewType, Protocol

Inode = NewType("Inode", int)
Holder = NewType("Holder", int)
DEVICE: Final = Holder(0)
"""The device's own mount. It keeps nothing."""


class DelegationMarks(Protocol):
    """Shows others which directories are held exclusively, before they are."""

    def add(self, inode: int) -> None:
        """This one is about to be."""

    def remove(self, inode: int) -> None:
        """It is no longer."""


class NoDelegationMarks:
    """Shows nobody anything."""

    def add(self, inode: int) -> None:
        """Nothing."""

    def remove(self, inode: int) -> None:
        """Nothing."""


@dataclass(eq=False, slots=True)
class WriteIntent:
    """One operation's: of these inodes, those in ``alone`` by no other such change at the same time."""

    holder: Holder
    alone: set[Inode] = field(default_factory=set)
    inodes: set[Inode] = field(default_factory=set)


@dataclass(slots=True)
class _File:
    shares: dict[Holder, int] = field(default_factory=dict)
    open: dict[Holder, int] = field(default_factory=dict)
    said_open: set[Holder] = field(default_factory=set)
    changes: list[WriteIntent] = field(default_factory=list)
    lapsed: dict[Holder, bool] = field(default_factory=dict)
    writers: int = 0

    @property
    def idle(self) -> bool:
        used = self.shares or self.open or self.said_open or self.changes or self.lapsed or self.writers
        return not used


class DelegationTable:
    """Grants are numbered for each holder, from 1. ``marks`` show those that are exclusive."""

    def __init__(self, marks: DelegationMarks | None = None) -> None:
        self._marks: DelegationMarks = marks or NoDelegationMarks()
        self._exclusive: dict[Inode, tuple[Holder, int]] = {}
        self._telling: Counter[Inode] = Counter()
        self._files: dict[Inode, _File] = {}
        self._held: dict[Holder, set[Inode]] = {}
        self._lapsed: dict[Holder, set[Inode]] = {}
        self._numbers: dict[Holder, int] = {}

    def share(self, holder: Holder, inode: Inode) -> int:
        """Grant a protected read; the grant's number, 0 if it is refused."""
        file = self._files.get(inode)
        if file is not None and (file.writers or any(c.holder != holder for c in file.changes)):
            return 0
        if self._exclusive and self.excluded_by(holder, inode) is not None:
            return 0
        number = self._numbers[holder] = self._numbers.get(holder, 0) + 1
        self._files.setdefault(inode, _File()).shares[holder] = number
        self._held.setdefault(holder, set()).add(inode)
        return number

    def take(self, holder: Holder, inode: Inode) -> int:
        """Grant a directory exclusively; the grant's number, 0 if it is refused."""
        file = self._files.get(inode)
        others = file is not None and (file.changes or set(file.shares) - {holder})
        number = 0 if others or self._telling[inode] else self.share(holder, inode)
        if number:
            if inode not in self._exclusive:
                self._marks.add(inode)
            self._exclusive[inode] = holder, number
        return number

    def untake(self, holder: Holder, inode: Inode) -> None:
        """It is the holder's no more than others', who may keep it, too."""
        if self._exclusive.get(inode, (None, 0))[0] == holder:
            del self._exclusive[inode]
            self._marks.remove(inode)

    def has_taken(self, holder: Holder, inode: Inode, number: int) -> bool:
        """Whether it is the holder's exclusively, by this grant."""
        return self._exclusive.get(inode) == (holder, number)

    def excluded_by(self, holder: Holder, inode: Inode) -> Holder | None:
        """Who else has it exclusively."""
        other = self._exclusive.get(inode)
        return None if other is None or other[0] == holder else other[0]

    @property
    def exclusives(self) -> int:
        """How many directories are held exclusively."""
        return len(self._exclusive)

    def begin_telling(self, inodes: Collection[Inode]) -> None:
        """Names that a holder has made in these directories are about to be made here."""
        self._telling.update(inodes)

    def end_telling(self, inodes: Collection[Inode]) -> None:
        """They are, or will not be."""
        self._telling.subtract(inodes)
        self._telling = +self._telling

    def is_told(self, holder: Holder, inodes: Collection[Inode]) -> bool:
        """Whether names are just being made in one of them that is not the holder's."""
        told = self._telling.keys() & set(inodes) if self._telling else ()
        return any(self._exclusive.get(inode, (None, 0))[0] != holder for inode in told)

    def keeps(self, holder: Holder, inode: Inode) -> bool:
        """Whether it is granted to the holder, or recalled but not yet given up."""
        file = self._files.get(inode)
        return file is not None and holder in file.shares

    def is_written(self, inode: Inode) -> bool:
        """Whether the device's kernel writes it."""
        file = self._files.get(inode)
        return file is not None and file.writers > 0

    def is_changing(self, inode: Inode) -> bool:
        """Whether a change of it has begun."""
        file = self._files.get(inode)
        return file is not None and bool(file.changes)

    def begin(self, change: WriteIntent, inode: Inode, *, alone: bool) -> bool:
        """Announce a change. False if it shall be ``alone`` and another one is."""
        file = self._files.setdefault(inode, _File())
        if alone and any(inode in other.alone for other in file.changes if other is not change):
            return False
        if change not in file.changes:
            file.changes.append(change)
            file.lapsed.update((holder, True) for holder in file.lapsed if holder != change.holder)
        change.inodes.add(inode)
        if alone:
            change.alone.add(inode)
        return True

    def in_the_way(self, change: WriteIntent) -> dict[Holder, set[Inode]]:
        """Who keeps what the change is of."""
        found: dict[Holder, set[Inode]] = {}
        for inode in change.inodes:
            for holder in self._files[inode].shares:
                if holder != change.holder:
                    found.setdefault(holder, set()).add(inode)
        return found

    def end(self, change: WriteIntent) -> None:
        """It is done."""
        for inode in change.inodes:
            file = self._files[inode]
            file.changes.remove(change)
            self._tidy(inode)
        change.inodes.clear()
        change.alone.clear()

    def recalled(self, holder: Holder, inode: Inode, upto: int) -> None:
        """The holder keeps it no longer by grants up to this."""
        file = self._files.get(inode)
        if file is not None and file.shares.get(holder, 0) <= upto:
            self._unshare(holder, inode)

    def _unshare(self, holder: Holder, inode: Inode) -> None:
        self.untake(holder, inode)
        self._held.get(holder, set()).discard(inode)
        if file := self._files.get(inode):
            file.shares.pop(holder, None)
            self._tidy(inode)

    def opened(self, holder: Holder, inode: Inode) -> bool:
        """The holder opens it, to keep what it reads; False if it may not, since the device's kernel writes
        the file.
        """
        if self.is_written(inode):
            return False
        file = self._files.setdefault(inode, _File())
        file.open[holder] = file.open.get(holder, 0) + 1
        return True

    def closed(self, holder: Holder, inode: Inode) -> None:
        """The holder has closed it once."""
        file = self._files.get(inode)
        if file is None or holder not in file.open:
            return
        file.open[holder] -= 1
        if not file.open[holder]:
            del file.open[holder]
            self._tidy(inode)

    def says_open(self, holder: Holder, inode: Inode, *, is_open: bool) -> None:
        """Whether the holder has it open without a word, to keep what it reads: what it says last counts."""
        if is_open:
            self._files.setdefault(inode, _File()).said_open.add(holder)
        elif file := self._files.get(inode):
            file.said_open.discard(holder)
            self._tidy(inode)

    def forget(self, holder: Holder, inode: Inode) -> None:
        """The holder knows it no more."""
        if file := self._files.get(inode):
            file.open.pop(holder, None)
            file.said_open.discard(holder)
        self._unshare(holder, inode)

    def lapse(self, holder: Holder) -> None:
        """The holder's lease is over: it keeps nothing by right, but may do so until it has returned."""
        for inode in list(self._held.pop(holder, ())):
            file = self._files[inode]
            is_late = any(change.holder != holder for change in file.changes)
            file.lapsed[holder] = is_late or file.lapsed.get(holder, False)
            self._lapsed.setdefault(holder, set()).add(inode)
            self._unshare(holder, inode)

    def is_late(self, holder: Holder, inode: Inode) -> bool:
        """Whether others have changed it since the holder's lease was over, or were about to then."""
        file = self._files.get(inode)
        return file is not None and file.lapsed.get(holder, False)

    def returned(self, holder: Holder) -> None:
        """The holder has given up all that it kept when its lease was over."""
        for inode in self._lapsed.pop(holder, ()):
            self._files[inode].lapsed.pop(holder, None)
            self._tidy(inode)

    def leave(self, holder: Holder) -> None:
        """The holder is gone."""
        self.lapse(holder)
        self.returned(holder)
        self._numbers.pop(holder, None)
        for inode, file in list(self._files.items()):
            file.open.pop(holder, None)
            file.said_open.discard(holder)
            self._tidy(inode)

    def latest(self, holder: Holder) -> int:
        """The number of the holder's last grant."""
        return self._numbers.get(holder, 0)

    def count(self, holder: Holder) -> int:
        """How many files the holder keeps."""
        return len(self._held.get(holder, ()))

    @property
    def written(self) -> int:
        """How many files the device's kernel writes."""
        return sum(file.writers > 0 for file in self._files.values())

    def begin_writing(self, inode: Inode, *, already: bool = False) -> bool:
        """The device's kernel writes it from now on; False if a holder keeps it, or has it open and will,
        unless the kernel does so ``already``.
        """
        file = self._files.setdefault(inode, _File())
        if (file.open or file.said_open or file.shares) and not already:
            return False
        file.writers += 1
        return True

    def end_writing(self, inode: Inode) -> None:
        """One file less through which the device's kernel writes it."""
        if (file := self._files.get(inode)) and file.writers:
            file.writers -= 1
            self._tidy(inode)

    def _tidy(self, inode: Inode) -> None:
        if inode in self._files and self._files[inode].idle:
            del self._files[inode]
