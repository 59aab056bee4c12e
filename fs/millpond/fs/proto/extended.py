# SPDX-License-Identifier: Apache-2.0
"""Pure: messages about extended attributes of files, and the packing of names."""

from __future__ import annotations

from collections.abc import Sequence

from millpond.base.errors import ProtocolError
from millpond.fs.proto.file_ops import AttributesAre
from millpond.fs.vfs.inode_api import Buffer
from millpond.fs.vfs.xattr_names import MAX_LIST, is_user_name
from millpond.wire.messages import Kind, Message, message


@message("fs.getxattr", Kind.VOLUME)
class GetXattr(Message):
    """Get the value of an extended attribute. Answered by XattrIs."""

    node: int
    name: bytes


@message("fs.setxattr", Kind.VOLUME)
class SetXattr(Message):
    """Set an extended attribute to the payload, with ``flags`` as in setxattr(2). Answered by
    AttributesAre.
    """

    node: int
    name: bytes
    flags: int = 0


@message("fs.listxattr", Kind.VOLUME)
class ListXattrs(Message):
    """List the names of a file's extended attributes. Answered by XattrsAre."""

    node: int


@message("fs.removexattr", Kind.VOLUME)
class RemoveXattr(Message):
    """Remove an extended attribute. Answered by AttributesAre."""

    node: int
    name: bytes


@message("fs.xattr", Kind.VOLUME)
class XattrIs(Message):
    """The payload is the value of an extended attribute."""


@message("fs.xattrs", Kind.VOLUME)
class XattrsAre(Message):
    """The payload is the names of a file's extended attributes, packed by ``pack_names``. That there are none
    is said in ``file``, too, and may be cached with it.
    """

    file: AttributesAre


def pack_names(names: Sequence[bytes]) -> bytes:
    """Pack names of extended attributes, each with a NUL behind it, as listxattr(2) returns them."""
    return b"".join(name + b"\0" for name in names)


def unpack_names(data: Buffer) -> tuple[bytes, ...]:
    """Unpack the payload of ``pack_names``. Raises ProtocolError if it is malformed, too long, or holds a
    name that no file of the public part has.
    """
    if not data:
        return ()
    *names, rest = bytes(data).split(b"\0")
    if rest or len(data) > MAX_LIST or not all(map(is_user_name, names)):
        raise ProtocolError("a list of extended attributes holds what no file has")
    return tuple(names)
