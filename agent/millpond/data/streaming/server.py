# SPDX-License-Identifier: Apache-2.0
"""Edge (sockets, threads, clock): a data service, which serves the data sets below a folder.

Each connection has a thread that receives and one that sends; a pool of threads reads ahead for all of them.
A connection has at most a few chunks read that its consumer has not taken, so that a slow consumer costs
little memory and holds up no other.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, LocalError, MillpondError, RemoteError
from millpond.data.streaming.connection import ConsumerConnection
from millpond.data.streaming.kept_runs import KeptRuns
from millpond.data.streaming.protocol.messages import MOST_HEAD, DataOpened, OpenData
from millpond.data.streaming.protocol.service import Runs, Service
from millpond.data.streaming.served_set import (
    ServedSet,
    Transform,
    check_links,
    folder_of,
    in_words,
    open_set,
)
from millpond.wire.acceptor import Acceptor
from millpond.wire.channel import Channel, Outlet
from millpond.wire.framing import Limits
from millpond.wire.messages import Failure

log = logging.getLogger(__name__)

_OPEN_SECONDS = 20.0
_PLACES = 1024
_MOST_SETS = 256
Outlets = Callable[[socket.socket], Outlet | None]
"""Makes what sees all bytes that are sent on a connection."""


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """Serve the folders below ``root``, to those that know the ``secret``, with ``transforms`` of
    samples by name. Runs outlive the process in the folder ``state``. A consumer whose connection is lost has
    ``grace`` seconds to come back. Chunks are read by ``readers`` threads. A consumer for which there
    is nothing hears every ``keep_alive`` seconds that the service is there.
    """

    root: Path
    secret: str = ""
    state: Path | None = None
    transforms: Mapping[str, Transform] = field(default_factory=dict)
    grace: float = 10.0
    readers: int = 4
    keep_alive: float = 5.0


class DataServer:
    """Serves consumers on the listening socket ``sock`` until it is closed. What is sent on a connection
    passes its outlet, if ``outlets`` makes one. A context manager.
    """

    def __init__(
        self, sock: socket.socket, settings: ServiceSettings, outlets: Outlets = lambda _connection: None
    ) -> None:
        self._settings, self._outlets = settings, outlets
        self._sets: dict[OpenData, ServedSet] = {}
        self._opening = threading.Lock()
        self._lock = threading.RLock()
        self._connections: set[ConsumerConnection] = set()
        self._kept = KeptRuns(settings.state)
        self._runs = Runs(settings.grace, self._kept, time.monotonic())
        self._pool = ThreadPoolExecutor(settings.readers, "data reader")
        self._closed = threading.Event()
        self._acceptor = Acceptor(sock, self._handle, places=_PLACES, name="data service")
        self._expiry = threading.Thread(target=self._expire, name="data leases", daemon=True)
        self._expiry.start()

    def close(self) -> None:
        """End all connections."""
        self._closed.set()
        self._acceptor.close()
        with self._lock:
            for connection in self._connections:
                connection.close()
        self._expiry.join()
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> DataServer:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _expire(self) -> None:
        while not self._closed.wait(min(0.5, self._settings.grace / 4)):
            with self._lock:
                if self._runs.expire(time.monotonic()):
                    self._changed()

    def _handle(self, sock: socket.socket) -> None:
        outlet = self._outlets(sock)
        channel = Channel(sock, "a consumer of data", limits=Limits(MOST_HEAD, 0), outlet=outlet)
        with channel, contextlib.suppress(ConnectionLost):
            try:
                self._serve(channel, sock, outlet)
            except MillpondError as error:
                code = "data" if isinstance(error, LocalError) else "protocol"
                channel.send(Failure(code, str(error)), Deadline.after(_OPEN_SECONDS))
            except Exception as error:  # of a library that opens the files: no other try would mend it
                log.exception("data service: internal error")
                failure = Failure("internal", f"the data service has failed: {in_words(error)}")
                channel.send(failure, Deadline.after(_OPEN_SECONDS))

    def _serve(self, channel: Channel, sock: socket.socket, outlet: Outlet | None) -> None:
        wish = channel.expect(OpenData, Deadline.after(_OPEN_SECONDS))
        if not hmac.compare_digest(wish.secret.encode(), self._settings.secret.encode()):
            raise RemoteError("the secret is not that of this data service")
        name, folder = folder_of(self._settings.root, wish.name)
        data = self._opened(name, folder, wish)
        answer = DataOpened(data.shards, data.sample_bytes, data.decode)
        channel.send(answer, Deadline.after(_OPEN_SECONDS))
        named = f"{name}//{wish.transform}" if wish.transform else name  # no folder has such a name
        service = Service(self._runs, named, data.shards, data.sample_bytes)
        sending = Channel(sock.dup(), channel.peer, outlet=outlet)
        connection = ConsumerConnection(
            channel,
            sending,
            service,
            data,
            self._pool,
            self._lock,
            self._advance,
            self._settings.keep_alive,
        )
        with self._lock:
            self._connections.add(connection)
        try:
            connection.run()
        finally:
            with self._lock:
                self._connections.remove(connection)
                service.lost(time.monotonic())
                self._changed()

    def _advance(self, service: Service, all_: bool) -> None:
        """Keep the state of a run; with the lock held. Wake ``all_`` connections if it may concern them."""
        if found := self._runs.kept(service.key):
            self._kept.keep(service.key, found)
        if all_:
            self._changed()

    def _changed(self) -> None:
        for connection in self._connections:
            connection.wake()

    def _opened(self, name: str, folder: Path, wish: OpenData) -> ServedSet:
        """Return a data set; each of the last ones is opened once. Raises LocalError."""
        classes = wish.classes if wish.format == "images" else ()
        key = replace(wish, name=name, secret="", classes=classes)
        with self._opening:
            if (found := self._sets.pop(key, None)) is None:
                transform = self._transform(wish.transform)
                check_links(self._settings.root, folder)
                found = open_set(folder, wish.at, transform, wish.format, wish.classes)
            self._sets[key] = found  # the last one
            while len(self._sets) > _MOST_SETS:
                del self._sets[next(iter(self._sets))]  # closed as soon as no connection has it
            return found

    def _transform(self, name: str) -> Transform | None:
        if name and name not in self._settings.transforms:
            raise LocalError(f"the data service has no transform '{name}'")
        return self._settings.transforms.get(name)
