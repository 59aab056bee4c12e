# SPDX-License-Identifier: Apache-2.0
"""Pure: messages between the device's own mount and the delegation manager, over a Unix socket."""

from __future__ import annotations

from millpond.wire.messages import Message, message


@message("fs.lock.begin")
class BeginChange(Message):
    """Begin a write intent, or extend the one that has begun: ``directories`` are changed by one intent at a
    time, ``inodes`` are other files. Answered by ChangeBegun once no client holds a delegation of them; by
    ChangeRefused.
    """

    directories: tuple[int, ...]
    inodes: tuple[int, ...]


@message("fs.lock.end")
class EndChange(Message):
    """End the write intent, whether the change was done or not. Not answered."""


@message("fs.lock.present")
class DevicePresent(Message):
    """Register the device's mount, and the inodes that its kernel writes by passthrough, as long as this
    connection lasts. Answered by PresenceAccepted.
    """

    inodes: tuple[int, ...]


@message("fs.lock.recall_writer")
class RecallWriter(Message):
    """Recall a host's write delegation of a file that the shared bitmap marks. Answered by ChangeBegun once
    the host has sent what it has gathered; by ChangeRefused.
    """

    inode: int


@message("fs.lock.await_locks")
class AwaitLocks(Message):
    """Wait until the hosts have reclaimed their file locks from an earlier manager. Answered as RecallWriter;
    by WaitForLeases if they have not, and it is to be said ``at_once``.
    """

    at_once: bool = False


@message("fs.lock.write")
class BeginWriting(Message):
    """Register that the kernel is to write a file by passthrough, under a write intent; with ``force`` even
    if a client has it open. Answered by WritingBegun.
    """

    inode: int
    force: bool = False


@message("fs.lock.written")
class EndWriting(Message):
    """Report that the kernel has closed a file that it wrote by passthrough. Not answered."""

    inode: int


@message("fs.lock.begun")
class ChangeBegun(Message):
    """No client holds a conflicting delegation any more."""


@message("fs.lock.arrived")
class PresenceAccepted(Message):
    """The mount is registered. One byte follows, and with it the descriptor of the SharedBitmap."""


@message("fs.lock.wait")
class WaitForLeases(Message):
    """Nothing has begun: hosts would have to be waited for first."""


@message("fs.lock.refused")
class ChangeRefused(Message):
    """Nothing has begun; ``errno`` is the reason."""

    errno: int


@message("fs.lock.writing")
class WritingBegun(Message):
    """Whether passthrough is allowed; if not, a client has the file open and caches it."""

    passthrough: bool
