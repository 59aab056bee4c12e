# SPDX-License-Identifier: Apache-2.0
"""Pure: the message that sends gathered writes to the server."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.fs.proto.async_create import NameUpdate
from millpond.fs.proto.file_ops import SetAttributes
from millpond.wire.messages import Kind, Message, message


@message("fs.gathered", Kind.VOLUME)
@dataclass(frozen=True, slots=True)
class WriteGathered(Message):
    """Write the payload, which was gathered under the client's exclusive delegation ``granted``, 0 for one of
    an earlier server, of the file's directory, whose inode is ``directory``: at ``offset``, or at the file's
    end if ``append``. ``updates`` are applied first, as by FlushNames, and ``attributes`` set last, once all
    is written. Answered by Written, also if the attributes are refused, or Error: ESTALE if the directory is
    not the client's under this delegation any more.
    """

    handle: int
    offset: int
    directory: int
    granted: int
    append: bool = False
    updates: tuple[NameUpdate, ...] = ()
    attributes: SetAttributes | None = None
