"""Edge: serves a volume to one client over one connection."""

from __future__ import annotations

import contextlib
import errno

from millpond.fs import protocol as p
from millpond.fs.sessions import Session, Sessions
from millpond.fs.volume import MAX_TRANSFER
from millpond.wire.channel import Channel
from millpond.wire.deadline import Deadline
from millpond.wire.errors import ConnectionLost, MillpondError, ProtocolError, RemoteError
from millpond.wire.frame import Head
from millpond.wire.message import Failure

_TRANSFER_SECONDS = 60.0


def serve(
    channel: Channel, sessions: Sessions, *, idle: float | None = None, transfer: float = _TRANSFER_SECONDS
) -> RemoteError | None:
    """Answer one client's requests until its connection ends.

    ``idle`` is how many seconds a client may say nothing, ``transfer`` how many a payload or a reply may
    take. Returns what ended the conversation, None if the client closed it between two requests.
    """
    session = sessions.nameless(channel)
    try:
        head = channel.receive(Deadline.after(idle))
        if isinstance(head.message, p.Hello):
            session, known = sessions.enter(head.message.session, channel)
            channel.send(p.Welcome(known, session.performed), Deadline.after(transfer))
            head = channel.receive(Deadline.after(idle))
        while not isinstance(head.message, p.Goodbye):
            _answer(channel, session, head, transfer)
            head = channel.receive(Deadline.after(idle))
        sessions.end(session)
        channel.send(p.Done(), Deadline.after(transfer))
    except RemoteError as error:
        if isinstance(error, ProtocolError):
            _refuse(channel, error)
        return None if isinstance(error, ConnectionLost) and channel.closed_cleanly else error
    finally:
        sessions.leave(session, channel)
        channel.close()
    return None


def _answer(channel: Channel, session: Session, head: Head, seconds: float) -> None:
    deadline = Deadline.after(seconds)
    if head.payload_size and not isinstance(head.message, p.Write):
        raise ProtocolError(f"{channel.peer} sent {head.payload_size} bytes behind '{head.message.NAME}'")
    payload = bytes(channel.receive_payload(MAX_TRANSFER, deadline)) if head.payload_size else b""
    try:
        reply, body = session.perform(channel, head.message, payload)
    except OSError as error:
        reply, body = p.Error(error.errno or errno.EIO), b""
    channel.send(reply, deadline, body)


def _refuse(channel: Channel, error: ProtocolError) -> None:
    with contextlib.suppress(MillpondError):  # the connection ends in any case
        channel.send(Failure("protocol", str(error)), Deadline.after(1.0))
