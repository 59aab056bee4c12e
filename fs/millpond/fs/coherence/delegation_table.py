# SPDX-License-Identifier: Apache-2.0
"""Pure: the delegation table: read delegations per inode, write intents, write delegations of new files.

Any number of clients may hold a read delegation of a file that has no write intent. An operation that changes
a file begins a write intent, recalls the others' delegations, and waits; while the intent lasts, no other
client is granted one. A directory has one intent at a time, so that what a name stands for can be looked up
in between. A file that the device's kernel writes by passthrough, unseen, is delegated to no client. A file
that a client has made may be delegated to it to write, from before anybody else can find it: then no other
may look at it before the client has sent what it has gathered of it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, NewType, Protocol

Inode = int
"""The number by which a file is known everywhere."""
Holder = NewType("Holder", int)
DEVICE: Final = Holder(0)
"""Holder number of the device's own mount, which never holds a delegation."""


class DelegationMarks(Protocol):
    """Publishes marks of inodes."""

    def add(self, inode: int) -> None:
        """Publish a mark."""

    def remove(self, inode: int) -> None:
        """Withdraw a mark."""


@dataclass(eq=False, slots=True)
class WriteIntent:
    """Write intent of one operation, on ``inodes``; those in ``alone`` have no second such intent at a
    time.
    """

    holder: Holder
    alone: set[Inode] = field(default_factory=set)
    inodes: set[Inode] = field(default_factory=set)


@dataclass(slots=True)
class _File:
    """The state of a file that is more than delegated."""

    open: dict[Holder, int] = field(default_factory=dict)
    reported_open: set[Holder] = field(default_factory=set)
    intents: list[WriteIntent] = field(default_factory=list)
    writers: int = 0

    @property
    def idle(self) -> bool:
        return not (self.open or self.reported_open or self.intents or self.writers)


class DelegationTable:
    """Table of delegations and write intents. Grants are numbered for each holder, from 1. ``bitmap``
    publishes the files with a write delegation.
    """

    def __init__(self, bitmap: DelegationMarks) -> None:
        self._bitmap = bitmap
        self._written_by: dict[Inode, Holder] = {}
        self._looked_at: set[Inode] = set()  # with a write delegation that is recalled
        self._files: dict[Inode, _File] = {}
        self._held: dict[Holder, dict[Inode, int]] = {}  # the grants: a host lists millions of files
        self._expired: dict[Holder, dict[Inode, bool]] = {}  # whether others have changed it since
        self._numbers: dict[Holder, int] = {}

    def grant_read(self, holder: Holder, inode: Inode) -> int:
        """Grant a read delegation. Returns the grant's number, 0 if it is refused."""
        file = self._files.get(inode)
        if file is not None and (file.writers or any(c.holder != holder for c in file.intents)):
            return 0
        if inode in self._looked_at or (self._written_by and self.other_writer(holder, inode) is not None):
            return 0
        number = self._numbers[holder] = self._numbers.get(holder, 0) + 1
        self._held.setdefault(holder, {})[inode] = number
        return number

    def grant_write(self, holder: Holder, inode: Inode) -> int:
        """Grant a write delegation of a file that nobody else knows of yet. Returns the grant's number, 0 if
        it is refused.
        """
        number = self.grant_read(holder, inode)
        if number:
            self._written_by[inode] = holder
            self._bitmap.add(inode)
        return number

    def end_write(self, holder: Holder, inode: Inode) -> None:
        """Turn the holder's write delegation, if it has one, into a read delegation."""
        if self._written_by.get(inode) == holder:
            del self._written_by[inode]
            self._looked_at.discard(inode)
            self._bitmap.remove(inode)

    def recall_write(self, inode: Inode) -> None:
        """Grant nothing of a file with a write delegation until that is returned: a newer grant, as with the
        reply to each write, would outlast the recall.
        """
        if inode in self._written_by:
            self._looked_at.add(inode)

    def other_writer(self, holder: Holder, inode: Inode) -> Holder | None:
        """Return the other client that has a write delegation of the file, None if there is none."""
        other = self._written_by.get(inode)
        return None if other == holder else other

    def holds(self, holder: Holder, inode: Inode) -> bool:
        """Return whether the holder has a delegation of the inode, also one that is recalled but not yet
        returned.
        """
        return inode in self._held.get(holder, ())

    def readers(self, inode: Inode) -> Collection[Holder]:
        """Return the holders of read delegations of the inode."""
        return tuple(holder for holder, grants in self._held.items() if inode in grants)

    def is_written(self, inode: Inode) -> bool:
        """Return whether the device's kernel writes the file by passthrough."""
        file = self._files.get(inode)
        return file is not None and file.writers > 0

    def begin(self, change: WriteIntent, inode: Inode, *, alone: bool) -> bool:
        """Add an inode to a write intent. False if it is to be ``alone`` and another such intent holds it."""
        file = self._files.setdefault(inode, _File())
        if alone and any(inode in other.alone for other in file.intents if other is not change):
            return False
        if change not in file.intents:
            file.intents.append(change)
            self._note_stale(inode, change.holder)
        change.inodes.add(inode)
        if alone:
            change.alone.add(inode)
        return True

    def conflicts(self, change: WriteIntent) -> dict[Holder, set[Inode]]:
        """Return the delegations that the intent has to recall: their inodes by holder."""
        found: dict[Holder, set[Inode]] = {}
        for inode in change.inodes:
            for holder in self.readers(inode):
                if holder != change.holder:
                    found.setdefault(holder, set()).add(inode)
        return found

    def end(self, change: WriteIntent) -> None:
        """End a write intent."""
        for inode in change.inodes:
            file = self._files[inode]
            file.intents.remove(change)
            self._discard_if_idle(inode)
        change.inodes.clear()
        change.alone.clear()

    def return_delegation(self, holder: Holder, inode: Inode, upto: int) -> None:
        """Return the holder's delegation of the inode, if it was granted by a number up to ``upto``."""
        if self._held.get(holder, {}).get(inode, 0) <= upto:
            self._drop_read(holder, inode)

    def _drop_read(self, holder: Holder, inode: Inode) -> None:
        self.end_write(holder, inode)
        self._held.get(holder, {}).pop(inode, None)

    def opened(self, holder: Holder, inode: Inode) -> bool:
        """Note that the holder opens a file and caches it. False if it may not, since the device's kernel
        writes the file by passthrough.
        """
        if self.is_written(inode):
            return False
        file = self._files.setdefault(inode, _File())
        file.open[holder] = file.open.get(holder, 0) + 1
        return True

    def closed(self, holder: Holder, inode: Inode) -> None:
        """Note one close of a file that the holder had opened."""
        file = self._files.get(inode)
        if file is None or holder not in file.open:
            return
        file.open[holder] -= 1
        if not file.open[holder]:
            del file.open[holder]
            self._discard_if_idle(inode)

    def report_open(self, holder: Holder, inode: Inode, is_open: bool) -> None:
        """Note whether the holder has a local open of this inode, as its last recall reply or close said."""
        if is_open:
            self._files.setdefault(inode, _File()).reported_open.add(holder)
        elif file := self._files.get(inode):
            file.reported_open.discard(holder)
            self._discard_if_idle(inode)

    def forget(self, holder: Holder, inode: Inode) -> None:
        """Remove all that is known of this holder and inode."""
        if file := self._files.get(inode):
            file.open.pop(holder, None)
            file.reported_open.discard(holder)
            self._discard_if_idle(inode)
        self._drop_read(holder, inode)

    def expire(self, holder: Holder) -> None:
        """Revoke all delegations of a holder whose lease has expired. The client may not know, and serve
        stale data from its cache, until it reconnects.
        """
        expired = self._expired.setdefault(holder, {})
        for inode in self._held.pop(holder, ()):
            file = self._files.get(inode)
            is_stale = file is not None and any(change.holder != holder for change in file.intents)
            expired[inode] = is_stale or expired.get(inode, False)
            self.end_write(holder, inode)

    def _note_stale(self, inode: Inode, but: Holder | None = None) -> None:
        """Note that a file is changed by another than ``but``."""
        for holder, expired in self._expired.items():
            if holder != but and inode in expired:
                expired[inode] = True

    def is_stale(self, holder: Holder, inode: Inode) -> bool:
        """Return whether others have changed the file since the holder's lease expired, or were about to
        then.
        """
        return self._expired.get(holder, {}).get(inode, False)

    def reconnected(self, holder: Holder) -> None:
        """Note that the holder has dropped all that was revoked when its lease expired."""
        self._expired.pop(holder, None)

    def leave(self, holder: Holder) -> None:
        """Remove a client that is gone."""
        self.expire(holder)
        self.reconnected(holder)
        self._numbers.pop(holder, None)
        for inode, file in list(self._files.items()):
            file.open.pop(holder, None)
            file.reported_open.discard(holder)
            self._discard_if_idle(inode)

    def last_grant(self, holder: Holder) -> int:
        """Return the number of the holder's last grant."""
        return self._numbers.get(holder, 0)

    def count(self, holder: Holder) -> int:
        """Return of how many files the client holds a delegation."""
        return len(self._held.get(holder, ()))

    @property
    def written(self) -> int:
        """Number of files that the device's kernel writes by passthrough."""
        return sum(file.writers > 0 for file in self._files.values())

    def begin_writing(self, inode: Inode, *, already: bool = False) -> bool:
        """Note that the device's kernel writes the file by passthrough. False if a client holds a delegation
        of it or has it open, unless the kernel writes it ``already``.
        """
        file = self._files.get(inode, _File())
        if (file.open or file.reported_open or self.readers(inode)) and not already:
            return False
        self._note_stale(inode)
        self._files[inode] = file
        file.writers += 1
        return True

    def end_writing(self, inode: Inode) -> None:
        """Note that one passthrough writer of the file has closed it."""
        if (file := self._files.get(inode)) and file.writers:
            file.writers -= 1
            self._discard_if_idle(inode)

    def _discard_if_idle(self, inode: Inode) -> None:
        if inode in self._files and self._files[inode].idle:
            del self._files[inode]
