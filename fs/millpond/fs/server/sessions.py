"""Edge (threads, the clock): the clients of a volume, and what each was told last, across their connections.

A client whose connections are lost may come back for a while: its files are as they were, and it hears again
what it did not hear, so that nothing is done twice. Whoever comes with a lane's name has it from then on:
what still arrives over an earlier connection is not done.
"""

from __future__ import annotations

import errno
import os
import threading

from millpond.base.errors import ConnectionLost, ProtocolError
from millpond.fs.coherence.delegation_table import Holder
from millpond.fs.coherence.manager import DelegationManager
from millpond.fs.proto import file_ops as p
from millpond.fs.server.handlers import Reply, RequestHandlers
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.vfs.inode_api import Buffer, WouldBlock, abandoned, may_block
from millpond.wire.channel import Channel
from millpond.wire.messages import Message

_KEEP_SECONDS = 60.0
_MOST = 64
_MOST_LANES = 16
_NAME = 16  # bytes


class SessionSlot:
    """One conversation of a client: the requests of the connection that has it are performed, one at a time.
    ``performed`` counts them.
    """

    def __init__(self, requests: RequestHandlers) -> None:
        self.performed = 0
        self._requests = requests
        self._last: Message | None = None
        self._lock = threading.Lock()
        self._channel: Channel | None = None

    def take(self, channel: Channel) -> None:
        """It belongs to this connection now; an earlier one is of no more use."""
        with self._lock:
            before, self._channel = self._channel, channel
        if before and before is not channel:
            before.shut_down()

    def leave(self, channel: Channel) -> None:
        """It belongs to no connection now, unless it belongs to another."""
        with self._lock:
            if self._channel is channel:
                self._channel = None

    @property
    def away(self) -> bool:
        """Whether it belongs to no connection."""
        return self._channel is None

    def perform(self, channel: Channel, request: Message, payload: Buffer, *, may_wait: bool) -> Reply:
        """Do what the client asks for over ``channel``. Raises OSError for what cannot be told again,
        ProtocolError, and ConnectionLost if the lane has gone on elsewhere.
        """
        with self._lock:
            if self._channel is not channel or self._requests.closed:
                raise ConnectionLost(f"{channel.peer} has come back over another connection")
            if isinstance(request, p.Again):
                return self._again(), b""
            may_block.set(may_wait)
            abandoned.set(lambda: channel.peer_has_closed)
            reply, body = self._perform(request, payload)
            self.performed += 1
            self._last = None if body else reply
            return reply, body

    def _perform(self, request: Message, payload: Buffer) -> Reply:
        try:
            return self._requests.do(request, payload)
        except WouldBlock:
            return p.Pending(), b""
        except OSError as error:
            return p.Error(error.errno or errno.EIO), b""
        except (OverflowError, ValueError):  # a number or a name that no system call takes
            return p.Error(errno.EINVAL), b""

    def _again(self) -> Message:
        if self._last is None:
            raise OSError(errno.EIO, "there is nothing to be told again")
        return self._last


class ClientSession:
    """One client's files and lanes. ``memory`` tells it from the same client once it was forgotten;
    ``caller`` is the connection over which it is told what to give up.
    """

    def __init__(self, name: bytes, tree: BackingFs, master: DelegationManager) -> None:
        self.name, self.memory = name, int.from_bytes(os.urandom(7)) + 1
        self.requests = RequestHandlers(tree, master, name)
        self.lanes: dict[bytes, SessionSlot] = {}
        self.caller: Channel | None = None

    @property
    def holder(self) -> Holder:
        """Of locks."""
        return self.requests.holder

    @property
    def away(self) -> bool:
        """Whether it has no connection."""
        return all(lane.away for lane in self.lanes.values())

    def lane(self, name: bytes, peer: str) -> SessionSlot:
        """The lane with this name. Raises ProtocolError."""
        if name not in self.lanes and len(self.lanes) >= _MOST_LANES:
            raise ProtocolError(f"{peer} would have more than {_MOST_LANES} lanes")
        return self.lanes.setdefault(name, SessionSlot(self.requests))


class SessionTable:
    """All clients of ``tree``. A client is remembered for ``keep`` seconds without a connection. ``sandbox``
    says what else than the tree this process could reach.
    """

    def __init__(
        self, tree: BackingFs, master: DelegationManager | None = None, keep: float = _KEEP_SECONDS
    ) -> None:
        self.master = master or DelegationManager()
        self.tree, self._keep = tree, keep
        self.sandbox = ""
        self._clients: dict[bytes, ClientSession] = {}
        self._timers: dict[bytes, threading.Timer] = {}
        self._lock = threading.Lock()

    def enter(self, hello: p.SessionHello, channel: Channel) -> tuple[ClientSession, SessionSlot]:
        """The client and its lane, both new if they are not known. Raises ProtocolError."""
        for name in (hello.client, hello.lane):
            if len(name) != _NAME:
                raise ProtocolError(f"{channel.peer} sent a name of {len(name)} bytes, not {_NAME}")
        with self._lock:
            if hello.client not in self._clients:
                self._make_room(channel)
                self._clients[hello.client] = ClientSession(hello.client, self.tree, self.master)
            client = self._clients[hello.client]
            lane = client.lane(hello.lane, channel.peer)
            if timer := self._timers.pop(hello.client, None):
                timer.cancel()
        lane.take(channel)  # once its last request is done: nobody else waits for that
        return client, lane

    def clients(self) -> tuple[ClientSession, ...]:
        """All of now."""
        with self._lock:
            return tuple(self._clients.values())

    def known(self, name: bytes) -> ClientSession | None:
        """The client with this name."""
        with self._lock:
            return self._clients.get(name)

    def _make_room(self, channel: Channel) -> None:
        """At most so many, so that nobody can fill the memory with them; the longest away goes first."""
        if len(self._clients) >= _MOST:
            away = (name for name in self._timers if not self.master.may_hold(self._clients[name].holder))
            longest = next(away, None)
            if longest is None:
                raise ProtocolError(f"{channel.peer} would be the {_MOST + 1}th client")
            self._remove(longest).requests.close()

    def leave(self, client: ClientSession, lane: SessionSlot, channel: Channel) -> None:
        """The connection has ended."""
        lane.leave(channel)
        with self._lock:
            if self._clients.get(client.name) is client and client.away and client.name not in self._timers:
                timer = threading.Timer(self._keep, self._expire, [client])
                timer.daemon = True
                self._timers[client.name] = timer
                timer.start()

    def _expire(self, client: ClientSession) -> None:
        with self._lock:
            if self._timers.get(client.name) is not threading.current_thread():
                return  # it came back
            del self._timers[client.name]
            if not client.away:
                return
            del self._clients[client.name]
        client.requests.close()

    def _remove(self, name: bytes) -> ClientSession:
        if timer := self._timers.pop(name, None):
            timer.cancel()
        return self._clients.pop(name)

    def end(self, client: ClientSession) -> None:
        """It says that it is done."""
        with self._lock:
            if self._clients.get(client.name) is not client:
                return
            self._remove(client.name)
        client.requests.close()

    def close(self) -> None:
        """End all."""
        with self._lock:
            clients = [self._remove(name) for name in list(self._clients)]
        for client in clients:
            client.requests.close()
