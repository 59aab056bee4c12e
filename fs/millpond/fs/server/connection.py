# SPDX-License-Identifier: Apache-2.0
"""Edge: serves a volume to one client over one connection: a session slot, the callback channel, or a status
query.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import deque
from collections.abc import Iterator

from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, LimitExceeded, MillpondError, ProtocolError, RemoteError
from millpond.fs.coherence.manager import DelegationManager
from millpond.fs.proto import file_ops as p
from millpond.fs.proto.bulk_copy import UNANSWERED, StoreFiles
from millpond.fs.proto.extended import SetXattr
from millpond.fs.proto.status import GetStatus
from millpond.fs.server.sessions import ClientSession, SessionSlot, SessionTable
from millpond.fs.server.status import status
from millpond.fs.vfs.inode_api import ROOT
from millpond.fs.vfs.path_api import MAX_TRANSFER
from millpond.wire.channel import Channel, FileSlice
from millpond.wire.framing import Head
from millpond.wire.messages import Failure

_TRANSFER_SECONDS = 60.0
_CALLS_PER_LEASE = 4
_MOST_PAYLOADS, _KEPT_PAYLOADS = 128, 4
"""Of 1 MiB each: a host may have thousands of connections, and a device little memory."""
_WITH_PAYLOAD = (p.Write, StoreFiles, SetXattr)


class PayloadBuffers:
    """Memory for ``most`` payloads at once, of all connections together; the others wait. A few buffers are
    used again.
    """

    def __init__(self, most: int) -> None:
        self._places, self._free = threading.BoundedSemaphore(most), deque[bytearray](maxlen=_KEPT_PAYLOADS)

    @contextlib.contextmanager
    def buffer(self, size: int) -> Iterator[memoryview]:
        """Yield a buffer of so many bytes, at most MAX_TRANSFER."""
        if not size:
            yield memoryview(bytearray())
            return
        with self._places:
            try:
                taken = self._free.pop()
            except IndexError:
                taken = bytearray(MAX_TRANSFER)
            try:
                yield memoryview(taken)[:size]
            finally:
                self._free.append(taken)


_payloads = PayloadBuffers(_MOST_PAYLOADS)


def serve(
    channel: Channel,
    sessions: SessionTable,
    *,
    idle: float | None = None,
    transfer: float = _TRANSFER_SECONDS,
) -> RemoteError | None:
    """Serve one connection of a client until it ends.

    ``idle`` is how many seconds a client may be silent once it has sent its first message, ``transfer`` how
    many that message, a payload or a reply may take. Returns the error that ended the connection, None if the
    client closed it between two requests.
    """
    channel.eager = True
    try:
        first = channel.receive(Deadline.after(transfer if idle is None else idle))
        channel.receive_payload(0, Deadline.after(transfer))
        if isinstance(first.message, p.Attend):
            _serve_callbacks(channel, sessions, first.message)
        elif isinstance(first.message, GetStatus):
            channel.send(status(sessions, count=first.message.count), Deadline.after(transfer))
        elif isinstance(first.message, p.SessionHello):
            _answer_all(channel, sessions, first.message, idle, transfer)
        else:
            raise ProtocolError(f"{channel.peer} began with '{first.message.NAME}'")
    except RemoteError as error:
        if isinstance(error, ProtocolError):
            _refuse(channel, error)
        return None if isinstance(error, ConnectionLost) and channel.closed_cleanly else error
    finally:
        channel.close()
    return None


def _answer_all(
    channel: Channel, sessions: SessionTable, hello: p.SessionHello, idle: float | None, transfer: float
) -> None:
    client, slot = sessions.attach(hello, channel)
    try:
        lease, owner = sessions.delegations.lease, sessions.tree.new_owner
        inode = sessions.tree.inode(ROOT)
        welcome = p.SessionWelcome(
            client.verifier, slot.performed, ROOT, lease, owner, sessions.storage, root_inode=inode
        )
        channel.send(welcome, Deadline.after(transfer))
        head = channel.receive(Deadline.after(idle))
        while not isinstance(head.message, p.Goodbye):
            _answer(channel, slot, head, transfer)
            head = channel.receive(Deadline.after(idle))
        sessions.end(client)
        channel.send(p.Done(), Deadline.after(transfer))
    finally:
        sessions.detach(client, slot, channel)


def _answer(channel: Channel, slot: SessionSlot, head: Head, seconds: float) -> None:
    deadline = Deadline.after(seconds)
    if head.payload_size and not isinstance(head.message, _WITH_PAYLOAD):
        raise ProtocolError(f"{channel.peer} sent {head.payload_size} bytes behind '{head.message.NAME}'")
    if head.payload_size > MAX_TRANSFER:
        raise LimitExceeded(
            f"{channel.peer} sent {head.payload_size} bytes; at most {MAX_TRANSFER} are accepted"
        )
    with _payloads.buffer(head.payload_size) as payload:
        channel.receive_into(payload, deadline)
        try:
            reply, body = slot.perform(channel, head.message, payload)
        except OSError as error:
            reply, body = p.Error(error.errno or errno.EIO), b""
    if isinstance(head.message, UNANSWERED):
        return
    try:
        channel.send(reply, Deadline.after(seconds), body)  # the flash may have taken longer
    finally:
        if isinstance(body, FileSlice):
            os.close(body.descriptor)


def _serve_callbacks(channel: Channel, sessions: SessionTable, attend: p.Attend) -> None:
    """Send recalls to a client until its callback connection ends."""
    client, delegations = sessions.find(attend.client), sessions.delegations
    if client is None:
        channel.send(p.Error(errno.ESTALE), Deadline.after(_TRANSFER_SECONDS))
        return
    with client.attending:
        client.callback_channel = channel
    delegations.begin_lease(
        client.holder, lambda: client.callback_channel is not None and client.callback_channel.peer_has_closed
    )
    try:
        _recall(channel, client, delegations, at_once=True)
        while sessions.find(attend.client) is client and client.callback_channel is channel:
            _recall(channel, client, delegations)
    finally:
        with client.attending:
            if client.callback_channel is channel:
                client.handlers.locks.drop()
                if channel.peer_has_closed:
                    delegations.expire(client.holder)


def _recall(
    channel: Channel, client: ClientSession, delegations: DelegationManager, *, at_once: bool = False
) -> None:
    """Send the next recall, or after a while an empty one: each answer renews the lease."""
    inodes, upto = delegations.next_recall(
        client.holder, 0 if at_once else delegations.lease / _CALLS_PER_LEASE
    )
    answer = channel.call(p.Recall(tuple(inodes), upto), p.Recalled, Deadline.after(delegations.lease))
    delegations.renew_lease(client.holder)
    delegations.return_delegations(client.holder, inodes, upto, frozenset(answer.open))


def _refuse(channel: Channel, error: ProtocolError) -> None:
    with contextlib.suppress(MillpondError):  # the connection ends in any case
        channel.send(Failure("protocol", str(error)), Deadline.after(1.0))
