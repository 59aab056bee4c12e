"""Pure: what a client and the server of a volume say to each other, one request and one reply at a time.

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
    """First on a connection: go on with ``lane`` of the client, or begin it. Both are 16 bytes that nobody
    else can guess. A client may have several lanes, each a conversation of its own, over the same files. One
    that is not ``patient`` is answered Pending where others would have to give up a lock first. Answered by
    Welcome.
    """

    client: bytes
    lane: bytes
    patient: bool = True


@message("fs.attend", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Attend(Message):
    """First on a connection: from now on the server asks here, at once for the first time, and the client
    answers. Answered by Error, ESTALE, if the server does not know the client.
    """

    client: bytes


@message("fs.recall", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Recall(Message):
    """Keep no longer what was granted of these files by grants up to ``upto``. No files: nothing, but both
    know that the other lives. Answered by Recalled.
    """

    inodes: tuple[int, ...]
    upto: int


@message("fs.recalled", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Recalled(Message):
    """It is no longer kept. Those of the files that the client has opened without a word, to keep what it
    reads, and has not named before.
    """

    open: tuple[int, ...]


@message("fs.again", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Again(Message):
    """Answered as the lane's last request was, if that had no payload."""


@message("fs.goodbye", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Goodbye(Message):
    """The client ends with this connection. Answered by Done."""


@message("fs.walk", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Walk(Message):
    """Look up one name after the other, from ``start`` on. Answered by FoundIs; behind it the whole of a
    regular file that has at most ``contents`` bytes, if it is granted.
    """

    start: int
    names: tuple[bytes, ...]
    contents: int = 0


@message("fs.forget", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Forget(Message):
    """The client has forgotten these files, however often it found them. Not answered."""

    nodes: tuple[int, ...]


@message("fs.getattr", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class GetAttributes(Message):
    """Answered by AttributesAre."""

    node: int


@message("fs.setattr", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class SetAttributes(Message):
    """None is to be kept. Times in nanoseconds since 1970, those named in ``now`` are the present one.
    Answered by AttributesAre.
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
    """Answered by Entries."""

    node: int


@message("fs.readlink", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class ReadLink(Message):
    """Answered by Link."""

    node: int


@message("fs.mknod", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class MakeNode(Message):
    """Answered by FoundIs. ``rdev`` is a device file's device."""

    parent: int
    name: bytes
    mode: int
    owner: Owner | None = None
    rdev: int = 0


@message("fs.mkdir", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class MakeDirectory(Message):
    """Answered by FoundIs."""

    parent: int
    name: bytes
    mode: int
    owner: Owner | None = None


@message("fs.symlink", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class MakeSymlink(Message):
    """Answered by FoundIs."""

    parent: int
    name: bytes
    target: bytes
    owner: Owner | None = None


@message("fs.link", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class MakeLink(Message):
    """Answered by FoundIs."""

    node: int
    parent: int
    name: bytes


@message("fs.unlink", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Unlink(Message):
    """Answered by Changed."""

    parent: int
    name: bytes


@message("fs.rmdir", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class RemoveDirectory(Message):
    """Answered by Changed."""

    parent: int
    name: bytes


@message("fs.rename", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Rename(Message):
    """``flags`` as of renameat2(2). Answered by Changed."""

    parent: int
    name: bytes
    new_parent: int
    new_name: bytes
    flags: int = 0


@message("fs.create", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Create(Message):
    """Answered by Opened; by Error ESTALE if there is one by now and O_EXCL is not given. ``keeps`` as in
    Open.
    """

    parent: int
    name: bytes
    flags: int
    mode: int
    owner: Owner | None = None
    keeps: bool = False


@message("fs.open", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Open(Message):
    """Answered by Opened. ``keeps``: the client wants to keep what it reads."""

    node: int
    flags: int
    keeps: bool = False


@message("fs.read", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Read(Message):
    """Answered by Data. ``shared``: what is read is to be kept."""

    handle: int
    size: int
    offset: int
    shared: bool = False


@message("fs.readfile", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class ReadFile(Message):
    """As Read with ``shared``, of a file that the client has open without a word. Answered by Data."""

    node: int
    size: int
    offset: int


@message("fs.write", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Write(Message):
    """The payload is the data, which goes to the file's end if ``append``; answered by Written. If it was
    ``kept_back`` by the client's kernel, and others have changed the file since the lease was over: EIO.
    What is ``told`` is so first, as by Tell; nothing is written if that fails.
    """

    handle: int
    offset: int
    append: bool = False
    kept_back: bool = False
    told: tuple[NameUpdate, ...] = ()


@message("fs.fsync", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Sync(Message):
    """Answered by Done."""

    handle: int
    data_only: bool


@message("fs.fsyncdir", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class SyncDirectory(Message):
    """Answered by Done."""

    node: int


@message("fs.fallocate", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Allocate(Message):
    """As fallocate(2). Answered by AttributesAre."""

    handle: int
    mode: int
    offset: int
    length: int


@message("fs.lseek", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Seek(Message):
    """Where data or a hole begins, as lseek(2). Answered by OffsetIs."""

    handle: int
    offset: int
    whence: int


@message("fs.release", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Release(Message):
    """The client has closed an open file. Not answered."""

    handle: int


@message("fs.closed", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Closed(Message):
    """A file that Recalled may have named is open no more. Not answered."""

    inode: int


@message("fs.statfs", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class GetStatistics(Message):
    """Answered by StatisticsAre."""


@message("fs.welcome", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class SessionWelcome(Message):
    """``memory`` is another number, but never 0, if the server has forgotten what it knew of the client;
    ``performed`` is how many of the lane's requests were performed, not counting Hello, Again and Goodbye.
    ``root`` is the volume's node; locks are leased for ``lease`` seconds.
    """

    memory: int
    performed: int
    root: int
    lease: float


@message("fs.pending", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Pending(Message):
    """Not done: others would have to give up a lock first. To be asked for over a patient lane."""


@message("fs.done", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Done(Message):
    """It is done, and on the device's file system."""


@message("fs.error", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Error(Message):
    """It failed, as ``errno`` says; ENOENT by ``granted``, as in FoundIs, may be kept of a name."""

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
    """A file. ``granted`` is the number of the grant by which its attributes, ``name_granted`` of that by
    which its name may be kept; 0 for none. ``readable``: the server may read it, a regular file. If it was
    made, how the ``directory`` is since then.
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
    """It is done. How the directories are since then, in the request's order; none if nobody knows."""

    directories: tuple[AttributesAre, ...] = ()


@message("fs.entries", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Entries(Message):
    """The payload is a directory's listing, as of ``listing``; ``granted`` as in FoundIs."""

    granted: int = 0


@message("fs.link.target", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Link(Message):
    """Where a symbolic link points."""

    target: bytes


@message("fs.opened", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Opened(Message):
    """``direct``: what is read may not be kept, as long as it is open. ``found`` is what was created."""

    handle: int
    direct: bool = False
    found: FoundIs | None = None


@message("fs.data", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Data(Message):
    """The payload is what was read; ``granted`` as in FoundIs. ``unseen``: it is not granted, since the
    device's kernel writes the file.
    """

    granted: int = 0
    unseen: bool = False


@message("fs.offset", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class OffsetIs(Message):
    """Where a seek has come to."""

    offset: int


@message("fs.written", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class Written(Message):
    """How many bytes were written, and how the file is since then, if that is known."""

    count: int
    file: AttributesAre | None = None


@message("fs.statistics", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class StatisticsAre(Message):
    """How full the volume is."""

    statistics: Statistics


UNANSWERED = (Forget, Release, Closed)
"""What is sent before some other request, whose reply says that these were performed, too."""


def known_errno(number: int) -> int:
    """The errno that a peer named, or EIO if there is no such errno here."""
    return number if number in errno.errorcode else errno.EIO
