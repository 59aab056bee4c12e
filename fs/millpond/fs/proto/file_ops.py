# SPDX-License-Identifier: Apache-2.0
"""Pure: messages of file operations between a client and the server of a volume, one request and one reply at
a time.

Names and paths are bytes, as the kernel has them. A request that fails is answered by Error. Only Write and
Data have a payload of raw bytes.
"""

from __future__ import annotations

import errno

from millpond.fs.vfs.inode_api import SetAttr
from millpond.fs.vfs.path_api import Attributes, Owner, Statistics
from millpond.wire.messages import Kind, Message, message


@message("fs.hello", Kind.VOLUME)
class SessionHello(Message):
    """First message of a connection: resume session slot ``slot`` of the client, or create it. Both names are
    16 random bytes that nobody else can guess. A client may have several slots over the same files; of
    ``spare`` ones there are more than of others, for requests that wait for nobody. One that is new may take
    the place of another, ``instead``, for whose last reply nobody waits any more: the file that it opens is
    closed. Answered by SessionWelcome.
    """

    client: bytes
    slot: bytes
    spare: bool = False
    instead: bytes = b""


@message("fs.attend", Kind.VOLUME)
class Attend(Message):
    """First message of a callback connection (NFSv4.1's backchannel): from now on the server sends Recall
    here, the first one at once, and the client answers. Answered by Error, ESTALE, if the server does not
    know the client.
    """

    client: bytes


@message("fs.recall", Kind.VOLUME)
class Recall(Message):
    """Callback (CB_RECALL): return the delegations of these inodes up to grant ``upto``. Without inodes it
    only renews the lease. Answered by Recalled.
    """

    inodes: tuple[int, ...]
    upto: int


@message("fs.recalled", Kind.VOLUME)
class Recalled(Message):
    """The delegations are returned (DELEGRETURN). ``open``: those of the inodes that the client has open
    locally, cached, and has not reported before.
    """

    open: tuple[int, ...]


@message("fs.again", Kind.VOLUME)
class Again(Message):
    """Repeat the slot's last reply from the reply cache. Answered by that reply, if it had no payload."""


@message("fs.goodbye", Kind.VOLUME)
class Goodbye(Message):
    """End the client's session, and this connection. Answered by Done."""


@message("fs.ping", Kind.VOLUME)
class Ping(Message):
    """Ask whether the server is there. Answered by Done."""


@message("fs.walk", Kind.VOLUME)
class Walk(Message):
    """Look up one name after the other, from ``start`` on. Answered by FoundIs; its payload is the whole of a
    regular file of at most ``contents`` bytes, if a delegation of it is granted. ``again``: for the file's
    node alone, after a restart of the server; what other hosts have gathered of it is not waited for.
    """

    start: int
    names: tuple[bytes, ...]
    contents: int = 0
    again: bool = False


@message("fs.forget", Kind.VOLUME)
class Forget(Message):
    """Drop the client's references to these nodes, whatever its lookup counts were. Not answered."""

    nodes: tuple[int, ...]


@message("fs.getattr", Kind.VOLUME)
class GetAttributes(Message):
    """Get the attributes of a node. Answered by AttributesAre."""

    node: int


@message("fs.setattr", Kind.VOLUME)
class SetAttributes(Message):
    """Set attributes, through an open file's ``handle`` if there is one. Answered by AttributesAre."""

    node: int
    changes: SetAttr
    handle: int | None = None


@message("fs.readlink", Kind.VOLUME)
class ReadLink(Message):
    """Read a symbolic link. Answered by Link."""

    node: int


@message("fs.make", Kind.VOLUME)
class Make(Message):
    """Make a file of the type in ``mode``, or a regular one; ``rdev`` is a device file's number, ``target`` a
    symbolic link's. Answered by FoundIs.
    """

    parent: int
    name: bytes
    mode: int
    owner: Owner | None = None
    rdev: int = 0
    target: bytes = b""


@message("fs.link", Kind.VOLUME)
class MakeLink(Message):
    """Make a hard link. Answered by FoundIs."""

    node: int
    parent: int
    name: bytes


@message("fs.remove", Kind.VOLUME)
class Remove(Message):
    """Remove a name of a file or, if it ``is_directory``, of an empty directory. Answered by Changed."""

    parent: int
    name: bytes
    is_directory: bool = False


@message("fs.rename", Kind.VOLUME)
class Rename(Message):
    """Rename, with ``flags`` as in renameat2(2). Answered by Changed."""

    parent: int
    name: bytes
    new_parent: int
    new_name: bytes
    flags: int = 0


@message("fs.create", Kind.VOLUME)
class Create(Message):
    """Make and open a regular file. Answered by Opened; by Error ESTALE if the name exists by now and O_EXCL
    is not given. ``cached`` as in Open; ``gathers``: the client wants a write delegation of the file.
    """

    parent: int
    name: bytes
    flags: int
    mode: int
    owner: Owner | None = None
    cached: bool = False
    gathers: bool = False


@message("fs.open", Kind.VOLUME)
class Open(Message):
    """Open a file; ``cached``: the client intends to cache what it reads; ``again``: it has it open, so that
    its permissions do not matter. Answered by Opened.
    """

    node: int
    flags: int
    cached: bool = False
    again: bool = False


@message("fs.read", Kind.VOLUME)
class Read(Message):
    """Read a range of an open file; ``want_delegation``: the client caches what it reads; ``at_once``: even
    if none can be granted yet. Answered by Data.
    """

    handle: int
    size: int
    offset: int
    want_delegation: bool = False
    at_once: bool = False


@message("fs.readfile", Kind.VOLUME)
class ReadFile(Message):
    """Read a range of a file that the client has open locally, with a delegation, as Read with
    ``want_delegation``. Answered by Data.
    """

    node: int
    size: int
    offset: int


@message("fs.write", Kind.VOLUME)
class Write(Message):
    """Write the payload, at the file's end if ``append``; answered by Written. ``late``: a program has
    written it before, under a delegation; it gives EIO if others have changed the file since the lease
    expired. The attributes ``then`` are set if all is written. ``last``: the client has no write delegation
    of the file any more. ``reclaim``: it had one by an earlier server, so that no other client caches
    anything of the file.
    """

    handle: int
    offset: int
    append: bool = False
    late: bool = False
    then: SetAttr | None = None
    last: bool = False
    reclaim: bool = False


@message("fs.fsync", Kind.VOLUME)
class Sync(Message):
    """Flush an open file to the flash. Answered by Done."""

    handle: int
    data_only: bool


@message("fs.fsyncdir", Kind.VOLUME)
class SyncDirectory(Message):
    """Flush a directory to the flash. Answered by Done."""

    node: int


@message("fs.fallocate", Kind.VOLUME)
class Allocate(Message):
    """Allocate or free a range, as fallocate(2) does. Answered by AttributesAre."""

    handle: int
    mode: int
    offset: int
    length: int


@message("fs.lseek", Kind.VOLUME)
class Seek(Message):
    """Find where data or a hole begins, as lseek(2) does. Answered by OffsetIs."""

    handle: int
    offset: int
    whence: int


@message("fs.release", Kind.VOLUME)
class Release(Message):
    """Close an open file. Not answered."""

    handle: int


@message("fs.closed", Kind.VOLUME)
class Closed(Message):
    """Report the close of a file that Recalled may have named as open. Not answered."""

    inode: int


@message("fs.statfs", Kind.VOLUME)
class GetStatistics(Message):
    """Get how full the volume is. Answered by StatisticsAre."""


@message("fs.welcome", Kind.VOLUME)
class SessionWelcome(Message):
    """The session is there. ``verifier`` is never 0 and changes when the server has lost this client's state;
    ``performed`` counts the slot's requests that were performed, not counting SessionHello, Again and
    Goodbye. ``root`` is the volume's root node, ``root_inode`` its inode number; delegations are leased for
    ``lease`` seconds. ``owner`` is the owner of new files, None for whoever makes them. ``storage`` is the
    write verifier: while it stays the same, what was written by this server or an earlier one is on the flash
    or on its way there.
    """

    verifier: int
    performed: int
    root: int
    lease: float
    owner: Owner | None = None
    storage: bytes = b""
    root_inode: int = 0


@message("fs.done", Kind.VOLUME)
class Done(Message):
    """The request is done, and its effect is in the device's file system."""


@message("fs.error", Kind.VOLUME)
class Error(Message):
    """The request failed with ``errno``; ENOENT may be cached as a negative entry under grant ``granted``, as
    in FoundIs.
    """

    errno: int
    granted: int = 0


@message("fs.attributes", Kind.VOLUME)
class AttributesAre(Message):
    """The attributes of a file; ``granted`` as in FoundIs."""

    attributes: Attributes
    granted: int = 0


@message("fs.found", Kind.VOLUME)
class FoundIs(Message):
    """A file. ``granted`` numbers the grant under which its attributes may be cached, ``name_granted`` the
    one of its name; 0 for none. ``readable``: a regular file that the server may read. After a create,
    ``directory`` holds the directory's new attributes; ``empty``: it is a directory that had no names when it
    was granted.
    """

    node: int
    attributes: Attributes
    granted: int = 0
    name_granted: int = 0
    readable: bool = False
    directory: AttributesAre | None = None
    empty: bool = False


@message("fs.changed", Kind.VOLUME)
class Changed(Message):
    """The change is done. ``directories`` are the new attributes of the request's directories, in order;
    empty if unknown.
    """

    directories: tuple[AttributesAre, ...] = ()


@message("fs.link.target", Kind.VOLUME)
class Link(Message):
    """The target of a symbolic link."""

    target: bytes


@message("fs.opened", Kind.VOLUME)
class Opened(Message):
    """The file is open. ``direct``: the client must not cache what it reads through this handle. ``found`` is
    the file that was created; ``gathers``: the client has a write delegation of it, under the same grant,
    until it is recalled or this handle is closed.
    """

    handle: int
    direct: bool = False
    found: FoundIs | None = None
    gathers: bool = False


@message("fs.data", Kind.VOLUME)
class Data(Message):
    """The payload is the data; ``granted`` as in FoundIs. ``device_writes``: no delegation is granted, since
    the device's kernel writes the file by passthrough, or may.
    """

    granted: int = 0
    device_writes: bool = False


@message("fs.offset", Kind.VOLUME)
class OffsetIs(Message):
    """The offset that a seek found."""

    offset: int


@message("fs.written", Kind.VOLUME)
class Written(Message):
    """Number of bytes written, and the file's new attributes, if they are known."""

    count: int
    file: AttributesAre | None = None


@message("fs.statistics", Kind.VOLUME)
class StatisticsAre(Message):
    """How full the volume is."""

    statistics: Statistics


UNANSWERED = (Forget, Release, Closed)
"""One-way requests: they precede another request, whose reply confirms that they were performed, too."""


def known_errno(number: int) -> int:
    """Return the errno that a peer sent, or EIO if there is no such errno here."""
    return number if number in errno.errorcode else errno.EIO
