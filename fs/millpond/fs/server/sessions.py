# SPDX-License-Identifier: Apache-2.0
"""Edge (threads, the clock): sessions of a volume's clients: slots, each with a reply cache, across
connections.

A client whose connections are lost may come back for a while: its files are still open, and the last reply of
each slot is replayed if it was lost, so that no request is performed twice. The connection that names a slot
last has it: requests that still arrive over an earlier connection are not performed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time

from millpond.base.errors import ConnectionLost, ProtocolError
from millpond.fs.coherence.delegation_table import Holder
from millpond.fs.coherence.manager import DelegationManager
from millpond.fs.proto import file_ops as p
from millpond.fs.server.directories import Reply
from millpond.fs.server.handlers import RequestHandlers
from millpond.fs.server.shared_descriptors import SharedDescriptors
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.vfs.inode_api import Buffer, abandoned
from millpond.wire.channel import Channel
from millpond.wire.messages import Message

_RETENTION_SECONDS = 60.0
_MAX_CLIENTS = 64
_MAX_SLOTS = 128  # a client has one for each request under way, and those that it has abandoned
_SPARE_SLOTS = 32  # more, for readahead and keep-alives, which wait for nobody
_SLOT_SECONDS, _TICK = 60.0, 0.5
_ID_BYTES = 16  # bytes of a client's or slot's name


class SessionSlot:
    """Session slot (NFSv4.1): requests execute one at a time; the last reply is cached for replay.
    ``performed`` counts the requests.
    """

    def __init__(self, requests: RequestHandlers) -> None:
        self.performed = 0
        self._handlers = requests
        self._last: Message | None = None
        self.is_given_up = False
        self._lock = threading.Lock()
        self._channel: Channel | None = None

    def bind(self, channel: Channel) -> None:
        """Bind the slot to this connection; an earlier one is shut down."""
        with self._lock:
            before, self._channel = self._channel, channel
        if before and before is not channel:
            before.shut_down()

    def detach(self, channel: Channel) -> None:
        """Unbind the slot from this connection, if it is still bound to it."""
        with self._lock:
            if self._channel is channel:
                self._channel = None
        if self.is_given_up:  # perhaps meanwhile: looked at without the lock, for which that does not wait
            self.give_up()

    def give_up(self) -> None:
        """Close the file that the last request has opened, or will have: nobody waits for the reply."""
        self.is_given_up = True
        if self._lock.acquire(blocking=False):  # else it is under way, and its connection is detached then
            try:
                self._close_unwanted()
            finally:
                self._lock.release()

    def _close_unwanted(self) -> None:
        if self.is_given_up and isinstance(self._last, p.Opened):
            opened, self._last = self._last, None
            with contextlib.suppress(OSError):  # the client has gone
                self._handlers.do(p.Release(opened.handle), b"")

    @property
    def disconnected(self) -> bool:
        """Whether the slot is bound to no connection."""
        return self._channel is None

    @property
    def is_abandoned(self) -> bool:
        """Whether the client has hung up; a last request may yet be performed."""
        channel = self._channel
        return channel is None or channel.peer_has_closed

    @property
    def is_evictable(self) -> bool:
        """Whether the slot is bound to no connection and performs nothing."""
        return self.disconnected and not self._lock.locked()

    def perform(self, channel: Channel, request: Message, payload: Buffer) -> Reply:
        """Perform a request that came over ``channel``. Raises OSError if there is no reply to replay,
        ProtocolError, and ConnectionLost if the slot is bound to another connection by now.
        """
        with self._lock:
            if self._channel is not channel or self._handlers.closed:
                raise ConnectionLost(f"{channel.peer} has come back over another connection")
            if isinstance(request, p.Again):
                return self._replay(), b""
            abandoned.set(lambda: channel.peer_has_closed)
            reply, body = self._perform(request, payload)
            self.performed += 1
            self._last = None if body else reply
            return reply, body

    def _perform(self, request: Message, payload: Buffer) -> Reply:
        try:
            return self._handlers.do(request, payload)
        except OSError as error:
            return p.Error(error.errno or errno.EIO), b""
        except (OverflowError, ValueError):  # a number or a name that no system call takes
            return p.Error(errno.EINVAL), b""

    def _replay(self) -> Message:
        if self._last is None:
            raise OSError(errno.EIO, "there is no reply to replay")
        return self._last


class ClientSession:
    """One client's state and slots. ``verifier`` changes when a client of this name is created anew;
    ``callback_channel`` is the connection over which recalls are sent; it changes under ``attending``.
    """

    def __init__(self, name: bytes, shared: SharedDescriptors, delegations: DelegationManager) -> None:
        self.name, self.verifier = name, int.from_bytes(os.urandom(7)) + 1
        self.handlers = RequestHandlers(shared, delegations, name)
        self.slots: dict[bytes, SessionSlot] = {}
        self.callback_channel: Channel | None = None
        self.attending = threading.Lock()
        self._shared = shared
        shared.add(self.handlers, lambda: self.disconnected)

    def close(self) -> None:
        """Close and drop all that the client has."""
        self.handlers.close()
        self._shared.remove(self.handlers)

    @property
    def holder(self) -> Holder:
        """The client's number as a holder of delegations and locks."""
        return self.handlers.holder

    @property
    def disconnected(self) -> bool:
        """Whether no slot has a connection."""
        return all(slot.disconnected for slot in self.slots.values())

    def slot(self, name: bytes, peer: str, most: int) -> SessionSlot | None:
        """Return the slot with this name, new if there is none: in place of the oldest one without a
        connection if there are ``most``, of one that was given up if there is one. A client sees by
        ``performed`` that its slot was evicted. Returns None while those that the client has abandoned
        perform requests. Raises ProtocolError if there are none of these.
        """
        if name not in self.slots and len(self.slots) >= most:
            evictable = [key for key, slot in self.slots.items() if slot.is_evictable]
            evicted = min(evictable, key=lambda key: not self.slots[key].is_given_up, default=None)
            if evicted is None:
                if any(slot.is_abandoned for slot in self.slots.values()):
                    return None
                raise ProtocolError(f"{peer} would have more than {most} slots")
            del self.slots[evicted]
        return self.slots.setdefault(name, SessionSlot(self.handlers))


class SessionTable:
    """Sessions of all clients of ``tree``. A client is remembered for ``retention`` seconds without a
    connection. ``storage`` is the write verifier, by itself another one for each server. ``sandbox`` says
    what else than the tree this process could reach.
    """

    def __init__(
        self,
        tree: BackingFs,
        delegations: DelegationManager | None = None,
        retention: float = _RETENTION_SECONDS,
        storage: bytes = b"",
    ) -> None:
        self.delegations = delegations or DelegationManager()
        self.tree, self._retention = tree, retention
        self._shared = SharedDescriptors(tree)
        self.sandbox = ""
        self.storage = storage or os.urandom(_ID_BYTES)
        self._clients: dict[bytes, ClientSession] = {}
        self._timers: dict[bytes, threading.Timer] = {}
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    def attach(self, hello: p.SessionHello, channel: Channel) -> tuple[ClientSession, SessionSlot]:
        """Bind a connection to the client's slot; both are created if they are not known. Waits while the
        client's other slots perform requests that it has abandoned. Raises ProtocolError and ConnectionLost.
        """
        for name in (hello.client, hello.slot):
            if len(name) != _ID_BYTES:
                raise ProtocolError(f"{channel.peer} sent a name of {len(name)} bytes, not {_ID_BYTES}")
        end = time.monotonic() + _SLOT_SECONDS
        most = _MAX_SLOTS + (_SPARE_SLOTS if hello.spare else 0)
        with self._changed:
            while True:
                client = self._known(hello.client, channel)
                if before := client.slots.get(hello.instead):
                    before.is_given_up = True
                if slot := client.slot(hello.slot, channel.peer, most):
                    break
                if channel.peer_has_closed:
                    raise ConnectionLost(f"{channel.peer} no longer waits for a slot")
                if time.monotonic() > end:
                    raise ProtocolError(f"{channel.peer} has abandoned {len(client.slots)} requests")
                self._changed.wait(_TICK)
            if timer := self._timers.pop(hello.client, None):
                timer.cancel()
        if before and before is not slot:
            before.give_up()
        slot.bind(channel)  # waits for its last request, without the table's lock
        return client, slot

    def _known(self, name: bytes, channel: Channel) -> ClientSession:
        """Return the session of a client, new if it is not known. Raises ProtocolError."""
        if name not in self._clients:
            self._make_room(channel)
            self._clients[name] = ClientSession(name, self._shared, self.delegations)
        return self._clients[name]

    def clients(self) -> tuple[ClientSession, ...]:
        """Return the sessions of all clients."""
        with self._lock:
            return tuple(self._clients.values())

    def find(self, name: bytes) -> ClientSession | None:
        """Return the session of the client with this name, None if it is not known."""
        with self._lock:
            return self._clients.get(name)

    def _make_room(self, channel: Channel) -> None:
        """Keep the number of clients bounded, so that none can fill the memory; the one disconnected longest
        goes first.
        """
        if len(self._clients) >= _MAX_CLIENTS:
            disconnected = (
                name for name in self._timers if not self.delegations.has_lease(self._clients[name].holder)
            )
            longest = next(disconnected, None)
            if longest is None:
                raise ProtocolError(f"{channel.peer} would be the {_MAX_CLIENTS + 1}th client")
            self._remove(longest).close()

    def detach(self, client: ClientSession, slot: SessionSlot, channel: Channel) -> None:
        """Unbind a connection that has ended; a client without any expires after ``retention`` seconds."""
        slot.detach(channel)
        with self._changed:
            self._changed.notify_all()
            if (
                self._clients.get(client.name) is client
                and client.disconnected
                and client.name not in self._timers
            ):
                timer = threading.Timer(self._retention, self._expire, [client])
                timer.daemon = True
                self._timers[client.name] = timer
                timer.start()

    def _expire(self, client: ClientSession) -> None:
        with self._lock:
            if self._timers.get(client.name) is not threading.current_thread():
                return  # the client came back
            del self._timers[client.name]
            if not client.disconnected:
                return
            del self._clients[client.name]
        client.close()

    def _remove(self, name: bytes) -> ClientSession:
        if timer := self._timers.pop(name, None):
            timer.cancel()
        return self._clients.pop(name)

    def end(self, client: ClientSession) -> None:
        """End a session, as the client asked."""
        with self._lock:
            if self._clients.get(client.name) is not client:
                return
            self._remove(client.name)
        client.close()

    def close(self) -> None:
        """End all sessions."""
        with self._lock:
            clients = [self._remove(name) for name in list(self._clients)]
        for client in clients:
            client.close()
