# SPDX-License-Identifier: Apache-2.0
"""Pure: messages between the device's own mount and the delegation manager, over a Unix socket."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.wire.messages import Message, message


@message("fs.lock.begin")
@dataclass(frozen=True, slots=True)
class BeginChange(Message):
    """Begin a write intent, or extend the one that has begun: ``directories`` are changed by one intent at a
    time, ``inodes`` are other files. Answered by ChangeBegun once no client holds a delegation of them; by
    WaitForLeases if a recall is needed and ``may_block`` is false; by ChangeRefused.
    """

    directories: tuple[int, ...]
    inodes: tuple[int, ...]
    may_block: bool


@message("fs.lock.end")
@dataclass(frozen=True, slots=True)
class EndChange(Message):
    """End the write intent, whether the change was done or not. Not answered."""


@message("fs.lock.present")
@dataclass(frozen=True, slots=True)
class DevicePresent(Message):
    """Register the device's mount, and the inodes that its kernel writes by passthrough, as long as this
    connection lasts. Answered by PresenceAccepted.
    """

    inodes: tuple[int, ...]


@message("fs.lock.settle")
@dataclass(frozen=True, slots=True)
class SettleDirectory(Message):
    """Recall the exclusive delegation of a directory that the shared bitmap shows as delegated. Answered by
    ChangeBegun once it is returned; by WaitForLeases if a recall is needed and ``may_block`` is false; by
    ChangeRefused.
    """

    inode: int
    may_block: bool


@message("fs.lock.write")
@dataclass(frozen=True, slots=True)
class BeginWriting(Message):
    """Register that the kernel is to write a file by passthrough, under a write intent; with ``force`` even
    if a client has it open. Answered by WritingBegun.
    """

    inode: int
    force: bool = False


@message("fs.lock.written")
@dataclass(frozen=True, slots=True)
class EndWriting(Message):
    """Report that the kernel has closed a file that it wrote by passthrough. Not answered."""

    inode: int


@message("fs.lock.begun")
@dataclass(frozen=True, slots=True)
class ChangeBegun(Message):
    """No client holds a conflicting delegation any more."""


@message("fs.lock.arrived")
@dataclass(frozen=True, slots=True)
class PresenceAccepted(Message):
    """The mount is registered. One byte follows, and with it the descriptor of the SharedBitmap."""


@message("fs.lock.wait")
@dataclass(frozen=True, slots=True)
class WaitForLeases(Message):
    """Nothing has begun: a delegation would have to be recalled first."""


@message("fs.lock.refused")
@dataclass(frozen=True, slots=True)
class ChangeRefused(Message):
    """Nothing has begun; ``errno`` is the reason."""

    errno: int


@message("fs.lock.writing")
@dataclass(frozen=True, slots=True)
class WritingBegun(Message):
    """Whether passthrough is allowed; if not, a client has the file open and caches it."""

    passthrough: bool
