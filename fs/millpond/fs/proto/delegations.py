"""Pure: what the device's own mount and the lock master say to each other, on the device."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.wire.messages import Message, message


@message("fs.lock.begin")
@dataclass(frozen=True, slots=True)
class BeginChange(Message):
    """A change begins, or the one that has begun is of these, too: of directories, by nobody else at the same
    time, and of other files. Answered by Begun once nobody keeps them; by Wait if it is not ``patient`` and
    somebody does, or by Refused.
    """

    directories: tuple[int, ...]
    inodes: tuple[int, ...]
    patient: bool


@message("fs.lock.end")
@dataclass(frozen=True, slots=True)
class EndChange(Message):
    """The change is done, or will not be. Not answered."""


@message("fs.lock.present")
@dataclass(frozen=True, slots=True)
class DevicePresent(Message):
    """The mount is there, and its kernel writes these files itself, as long as this connection lasts, on
    which all of them are told. Answered by Arrived.
    """

    inodes: tuple[int, ...]


@message("fs.lock.settle")
@dataclass(frozen=True, slots=True)
class SettleDirectory(Message):
    """The mount is about to look at a directory that has a mark. Answered by Begun once nobody has it
    exclusively; by Wait if it is not ``patient`` and somebody does, or by Refused.
    """

    inode: int
    patient: bool


@message("fs.lock.write")
@dataclass(frozen=True, slots=True)
class BeginWriting(Message):
    """The kernel is to write a file itself, of which a change has begun; ``anyway``, whoever has it open.
    Answered by Writing.
    """

    inode: int
    anyway: bool = False


@message("fs.lock.written")
@dataclass(frozen=True, slots=True)
class EndWriting(Message):
    """The kernel has closed such a file. Not answered."""

    inode: int


@message("fs.lock.begun")
@dataclass(frozen=True, slots=True)
class ChangeBegun(Message):
    """Nobody else keeps them."""


@message("fs.lock.arrived")
@dataclass(frozen=True, slots=True)
class PresenceAccepted(Message):
    """It is known. One byte follows, and with it the descriptor of the marks of ``marks``."""


@message("fs.lock.wait")
@dataclass(frozen=True, slots=True)
class WaitForLeases(Message):
    """Nothing has begun: somebody else would have to give up something first."""


@message("fs.lock.refused")
@dataclass(frozen=True, slots=True)
class ChangeRefused(Message):
    """Nothing has begun, as ``errno`` says."""

    errno: int


@message("fs.lock.writing")
@dataclass(frozen=True, slots=True)
class WritingBegun(Message):
    """Whether the kernel may; if not, somebody has the file open and keeps what he reads."""

    by_kernel: bool
