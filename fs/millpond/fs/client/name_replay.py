# SPDX-License-Identifier: Apache-2.0
"""Edge: replays names that an earlier server has not had, or not for certain, to the one after it."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Iterator, Sequence

from millpond.base.deadline import Deadline
from millpond.base.errors import RemoteError
from millpond.fs.client.cache.pending_creates import PendingFile
from millpond.fs.client.rpc import is_in_doubt
from millpond.fs.client.rpc_pool import RpcPool
from millpond.fs.proto import async_create as n
from millpond.fs.vfs.inode_api import WouldBlock
from millpond.fs.vfs.path_api import os_error

Outcome = tuple[PendingFile, OSError | None]


def of_earlier_session(rpc: RpcPool, batch: Sequence[PendingFile]) -> Sequence[PendingFile]:
    """Return the files whose preallocated ones the server has lost, with the session: their names come
    first.
    """
    with rpc.lock:
        return [made for made in batch if made.directory.verifier != rpc.inodes.verifier]


def replay(rpc: RpcPool, batch: Sequence[PendingFile], deadline: Deadline) -> Iterator[Outcome]:
    """Have the server make files anew, each with its contents, as they would have been made by their names.
    Yields each, and the error for which it is lost. Raises OSError if the outcome is not known, and
    WouldBlock.
    """
    for _, group in itertools.groupby(batch, lambda made: made.directory.file.node):
        yield from _replay_in_one_directory(rpc, list(group), deadline)


def _replay_in_one_directory(rpc: RpcPool, group: Sequence[PendingFile], deadline: Deadline) -> list[Outcome]:
    try:
        reply = _ask(rpc, group, deadline)
    except OSError as error:
        if is_in_doubt(error):
            raise
        return [(made, error) for made in group]
    with rpc.lock:
        for made, inode in zip(group, reply.inodes, strict=True):
            if inode:
                rpc.inodes.renumber(made.file, inode)
    return [(made, os_error(code) if code else None) for made, code in zip(group, reply.errors, strict=True)]


def _ask(rpc: RpcPool, group: Sequence[PendingFile], deadline: Deadline) -> n.NamesReplayed:
    before = [made.sent for made in group]
    with rpc.call(deadline) as call:

        def request() -> n.ReplayNames:
            before[:] = [made.sent for made in group]  # anew: a server may have had it in between
            message = n.ReplayNames(
                call.remote(group[0].directory.file), tuple(made.replayed() for made in group)
            )
            for made in group:
                made.sent = True
            return message

        data = b"".join(made.contents for made in group)
        try:
            reply, _ = call.ask(request, n.NamesReplayed, idempotent=True, payload=data)
        except WouldBlock:  # the server has done nothing
            for made, sent in zip(group, before, strict=True):
                made.sent = sent
            raise
    if len(reply.inodes) != len(group):
        raise os_error(errno.EIO) from RemoteError(
            "the device's server has made an impossible number of files"
        )
    return reply
