# SPDX-License-Identifier: Apache-2.0
"""Edge: extended attributes of files on a device."""

from __future__ import annotations

import errno
from collections.abc import Callable

from millpond.base.errors import ProtocolError
from millpond.fs.client.cache.inode import CachedInode
from millpond.fs.client.cache.invalidation import Invalidation
from millpond.fs.client.session import Session, now
from millpond.fs.proto import extended as x
from millpond.fs.proto.file_ops import AttributesAre
from millpond.fs.vfs.inode_api import Buffer, Node
from millpond.fs.vfs.path_api import os_error
from millpond.fs.vfs.xattr_names import MAX_LIST, MAX_VALUE, user_name
from millpond.wire.messages import Message


class RemoteExtended:
    """ExtendedFs of the files of a device. That a file has none is cached with its other attributes."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def _file(self, node: Node) -> CachedInode:
        file = self._session.inodes.file(node)
        file.seen = True
        return file

    def _is_bare(self, file: CachedInode) -> bool:
        with self._session.lock:
            known, self._session.inodes.wants_bare = file.attributes, True
            return known is not None and known.bare and self._session.inodes.ttl(file, now()) > 0

    def get(self, node: Node, name: bytes) -> bytes:
        """Return the value of an extended attribute."""
        user_name(name)
        file = self._file(node)
        if self._is_bare(file):
            raise os_error(errno.ENODATA)
        with self._session.call() as call:
            _, value = call.ask(
                lambda: x.GetXattr(call.remote(file), name), x.XattrIs, idempotent=True, limit=MAX_VALUE
            )
            return bytes(value)

    def names(self, node: Node) -> tuple[bytes, ...]:
        """Return the names of a file's extended attributes."""
        file = self._file(node)
        if self._is_bare(file):
            return ()
        with self._session.call() as call:
            reply, packed = call.ask(
                lambda: x.ListXattrs(call.remote(file)), x.XattrsAre, idempotent=True, limit=MAX_LIST
            )
            try:
                names = x.unpack_names(packed)
            except ProtocolError as error:
                raise os_error(errno.EIO) from error
        with self._session.lock:
            self._session.inodes.learn(file, reply.file.attributes, reply.file.granted, since=call.since)
        return names

    def set(self, node: Node, name: bytes, value: bytes, flags: int) -> None:
        """Set an extended attribute."""
        user_name(name)
        if len(value) > MAX_VALUE:
            raise os_error(errno.E2BIG)

        def request(remote: int) -> Message:
            return x.SetXattr(remote, name, flags)

        self._change(self._file(node), request, value, idempotent=not flags)

    def remove(self, node: Node, name: bytes) -> None:
        """Remove an extended attribute."""
        user_name(name)
        self._change(self._file(node), lambda remote: x.RemoveXattr(remote, name))

    def _change(
        self,
        file: CachedInode,
        request: Callable[[int], Message],
        value: Buffer = b"",
        *,
        idempotent: bool = False,
    ) -> None:
        change = Invalidation(
            self._session.inodes, self._session.lock, lambda _file: None, (file,), data_only=True
        )
        with change, self._session.call() as call:
            reply, _ = call.ask(
                lambda: request(call.remote(file)), AttributesAre, idempotent=idempotent, payload=value
            )
        change.learn_reply(file, reply)
