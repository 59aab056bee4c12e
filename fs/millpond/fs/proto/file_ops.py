# SPDX-License-Identifier: Apache-2.0
"""Pure: messages of file operations between a client and the server of a volume, one request and one reply at
a time.

Names and paths are bytes, as the kernel has them. A request that fails is answered by Error. Only Write, Data
and Entries have a payload of raw bytes.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

from millpond.fs.proto.async_create import NameUpdate
from millpond.fs.vfs.path_api import Attributes, Owner, Statistics
from millpond.wire.messages import Kind, Message, message

MAX_LISTING = 64 << 20
"""The most bytes of one directory's listing: some two million names."""


@message("fs.hello", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class SessionHello(Message):
    """First message of a connection: resume session slot ``slot`` of the client, or create it. Both names are
    16 random bytes that nobody else can guess. A client may have several slots over the same files. A slot
    that does not ``may_block`` is answered Pending where a recall would be needed. Answered by
    SessionWelcome.
    """

    client: bytes
    slot: bytes
    may_block: bool = True


@message("fs.attend", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Attend(Message):
    """First message of a callback connection (NFSv4.1's backchannel): from now on the server sends Recall
    here, the first one at once, and the client answers. Answered by Error, ESTALE, if the server does not
    know the client.
    """

    client: bytes


@message("fs.recall", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Recall(Message):
    """Callback (CB_RECALL): return the delegations of these inodes up to grant ``upto``. Without inodes it
    only renews the lease. Answered by Recalled.
    """

    inodes: tuple[int, ...]
    upto: int


@message("fs.recalled", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Recalled(Message):
    """The delegations are returned (DELEGRETURN). ``open``: those of the inodes that the client has open
    locally, cached, and has not reported before.
    """

    open: tuple[int, ...]


@message("fs.again", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Again(Message):
    """Repeat the slot's last reply from the reply cache. Answered by that reply, if it had no payload."""


@message("fs.goodbye", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Goodbye(Message):
    """End the client's session, and this connection. Answered by Done."""


@message("fs.walk", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Walk(Message):
    """Look up one name after the other, from ``start`` on. Answered by FoundIs; its payload is the whole of a
    regular file of at most ``contents`` bytes, if a delegation of it is granted.
    """

    start: int
    names: tuple[bytes, ...]
    contents: int = 0


@message("fs.forget", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Forget(Message):
    """Drop the client's references to these nodes, whatever its lookup counts were. Not answered."""

    nodes: tuple[int, ...]


@message("fs.getattr", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class GetAttributes(Message):
    """Get the attributes of a node. Answered by AttributesAre."""

    node: int


@message("fs.setattr", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class SetAttributes(Message):
    """Set attributes, None to keep one. Times in nanoseconds since 1970; those named in ``now`` are set to
    the present time. Answered by AttributesAre.
    """

    node: int
    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime: int | None = None
    mtime: int | None = None
    now: tuple[str, ...] = ()
    handle: int | None = None


@message("fs.readdir", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class ReadDirectory(Message):
    """List a directory. Answered by Entries."""

    node: int


@message("fs.readlink", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class ReadLink(Message):
    """Read a symbolic link. Answered by Link."""

    node: int


@message("fs.mknod", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class MakeNode(Message):
    """Make a file, FIFO, socket or device file; ``rdev`` is a device file's number. Answered by FoundIs."""

    parent: int
    name: bytes
    mode: int
    owner: Owner | None = None
    rdev: int = 0


@message("fs.mkdir", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class MakeDirectory(Message):
    """Make a directory. Answered by FoundIs."""

    parent: int
    name: bytes
    mode: int
    owner: Owner | None = None


@message("fs.symlink", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class MakeSymlink(Message):
    """Make a symbolic link. Answered by FoundIs."""

    parent: int
    name: bytes
    target: bytes
    owner: Owner | None = None


@message("fs.link", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class MakeLink(Message):
    """Make a hard link. Answered by FoundIs."""

    node: int
    parent: int
    name: bytes


@message("fs.unlink", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Unlink(Message):
    """Remove a name of a file. Answered by Changed."""

    parent: int
    name: bytes


@message("fs.rmdir", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class RemoveDirectory(Message):
    """Remove an empty directory. Answered by Changed."""

    parent: int
    name: bytes


@message("fs.rename", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Rename(Message):
    """Rename, with ``flags`` as in renameat2(2). Answered by Changed."""

    parent: int
    name: bytes
    new_parent: int
    new_name: bytes
    flags: int = 0


@message("fs.create", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Create(Message):
    """Make and open a regular file. Answered by Opened; by Error ESTALE if the name exists by now and O_EXCL
    is not given. ``cached`` as in Open.
    """

    parent: int
    name: bytes
    flags: int
    mode: int
    owner: Owner | None = None
    cached: bool = False


@message("fs.open", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Open(Message):
    """Open a file; ``cached``: the client intends to cache what it reads. Answered by Opened."""

    node: int
    flags: int
    cached: bool = False


@message("fs.read", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Read(Message):
    """Read a range of an open file; ``want_delegation``: the client caches what it reads. Answered by
    Data.
    """

    handle: int
    size: int
    offset: int
    want_delegation: bool = False


@message("fs.readfile", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class ReadFile(Message):
    """Read a range of a file that the client has open locally, with a delegation, as Read with
    ``want_delegation``. Answered by Data.
    """

    node: int
    size: int
    offset: int


@message("fs.write", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Write(Message):
    """Write the payload, at the file's end if ``append``; answered by Written. ``updates`` are applied first,
    as by FlushNames, and nothing is written if that fails. ``page_writeback``: the data comes from the client
    kernel's writeback, and gives EIO if others have changed the file since the lease expired.
    """

    handle: int
    offset: int
    append: bool = False
    page_writeback: bool = False
    updates: tuple[NameUpdate, ...] = ()


@message("fs.fsync", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Sync(Message):
    """Flush an open file to the flash. Answered by Done."""

    handle: int
    data_only: bool


@message("fs.fsyncdir", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class SyncDirectory(Message):
    """Flush a directory to the flash. Answered by Done."""

    node: int


@message("fs.fallocate", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Allocate(Message):
    """Allocate or free a range, as fallocate(2) does. Answered by AttributesAre."""

    handle: int
    mode: int
    offset: int
    length: int


@message("fs.lseek", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Seek(Message):
    """Find where data or a hole begins, as lseek(2) does. Answered by OffsetIs."""

    handle: int
    offset: int
    whence: int


@message("fs.release", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Release(Message):
    """Close an open file. Not answered."""

    handle: int


@message("fs.closed", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Closed(Message):
    """Report the close of a file that Recalled may have named as open. Not answered."""

    inode: int


@message("fs.statfs", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class GetStatistics(Message):
    """Get how full the volume is. Answered by StatisticsAre."""


@message("fs.welcome", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class SessionWelcome(Message):
    """The session is there. ``verifier`` is never 0 and changes when the server has lost this client's state;
    ``performed`` counts the slot's requests that were performed, not counting SessionHello, Again and
    Goodbye. ``root`` is the volume's root node; delegations are leased for ``lease`` seconds.
    """

    verifier: int
    performed: int
    root: int
    lease: float


@message("fs.pending", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Pending(Message):
    """Nothing was done: a delegation would have to be recalled first (NFS4ERR_DELAY). To be sent again over a
    slot that may block.
    """


@message("fs.done", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Done(Message):
    """The request is done, and its effect is in the device's file system."""


@message("fs.error", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Error(Message):
    """The request failed with ``errno``; ENOENT may be cached as a negative entry under grant ``granted``, as
    in FoundIs.
    """

    errno: int
    granted: int = 0


@message("fs.attributes", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class AttributesAre(Message):
    """The attributes of a file; ``granted`` as in FoundIs."""

    attributes: Attributes
    granted: int = 0


@message("fs.found", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class FoundIs(Message):
    """A file. ``granted`` numbers the grant under which its attributes may be cached, ``name_granted`` the
    one of its name; 0 for none. ``readable``: a regular file that the server may read. After a create,
    ``directory`` holds the directory's new attributes.
    """

    node: int
    attributes: Attributes
    granted: int = 0
    name_granted: int = 0
    readable: bool = False
    directory: AttributesAre | None = None


@message("fs.changed", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Changed(Message):
    """The change is done. ``directories`` are the new attributes of the request's directories, in order;
    empty if unknown.
    """

    directories: tuple[AttributesAre, ...] = ()


@message("fs.entries", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Entries(Message):
    """The payload is a directory's listing, packed by ``pack_entries``; ``granted`` as in FoundIs."""

    granted: int = 0


@message("fs.link.target", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Link(Message):
    """The target of a symbolic link."""

    target: bytes


@message("fs.opened", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Opened(Message):
    """The file is open. ``direct``: the client must not cache what it reads through this handle. ``found`` is
    the file that was created.
    """

    handle: int
    direct: bool = False
    found: FoundIs | None = None


@message("fs.data", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Data(Message):
    """The payload is the data; ``granted`` as in FoundIs. ``device_writes``: no delegation is granted, since
    the device's kernel writes the file by passthrough.
    """

    granted: int = 0
    device_writes: bool = False


@message("fs.offset", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class OffsetIs(Message):
    """The offset that a seek found."""

    offset: int


@message("fs.written", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Written(Message):
    """Number of bytes written, and the file's new attributes, if they are known."""

    count: int
    file: AttributesAre | None = None


@message("fs.statistics", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class StatisticsAre(Message):
    """How full the volume is."""

    statistics: Statistics


UNANSWERED = (Forget, Release, Closed)
"""One-way requests: they precede another request, whose reply confirms that they were performed, too."""


def known_errno(number: int) -> int:
    """Return the errno that a peer sent, or EIO if there is no such errno here."""
    return number if number in errno.errorcode else errno.EIO
