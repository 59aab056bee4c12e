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
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
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
from millpond.data.streaming.transforms.functions import in_process
from millpond.wire.acceptor import Acceptor
from millpond.wire.channel import Channel, Outlet
from millpond.wire.framing import Limits
from millpond.wire.messages import Failure

log = logging.getLogger(__name__)

_OPEN_SECONDS = 20.0
_PLACES = 1024
_MOST_SETS = 256
Transforms = Callable[[str], Transform]
NO_TRANSFORMS: Transforms = in_process({})
Outlets = Callable[[socket.socket], Outlet | None]
"""Makes what sees all bytes that are sent on a connection."""


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """Serve the folders below ``root``, to those that know the ``secret``. ``transforms`` returns a transform
    by name, or raises LocalError. Runs outlive the process in the folder ``state``. A consumer whose
    connection is lost has ``grace`` seconds to come back. Chunks are read by ``readers`` threads, and those
    that are transformed by as many others. A consumer for which there is nothing hears every ``keep_alive``
    seconds that the service is there.
    """

    root: Path
    secret: str = ""
    state: Path | None = None
    transforms: Transforms = NO_TRANSFORMS
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
        self._plain = OpenSets(settings.readers, "data reader")
        self._transformed = OpenSets(settings.readers, "data transformer")
        self._lock = threading.RLock()
        self._connections: set[ConsumerConnection] = set()
        self._kept = KeptRuns(settings.state)
        self._runs = Runs(settings.grace, self._kept, time.monotonic())
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
        for sets in (self._plain, self._transformed):
            sets.pool.shutdown(cancel_futures=True)

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
        sets = self._transformed if wish.transform else self._plain
        data = self._opened(sets, name, folder, wish)
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
            sets.pool,
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

    def _opened(self, sets: OpenSets, name: str, folder: Path, wish: OpenData) -> ServedSet:
        """Return a data set. Raises LocalError."""
        classes = wish.classes if wish.format == "images" else ()

        def made() -> ServedSet:
            transform = self._settings.transforms(wish.transform) if wish.transform else None
            check_links(self._settings.root, folder)
            return open_set(folder, wish.at, transform, wish.format, wish.classes)

        return sets.opened(replace(wish, name=name, secret="", classes=classes), made)


class OpenSets:
    """Data sets of which each of the last ones is opened once, and the threads that read them. Those with
    transforms have sets and threads of their own: a transform that hangs holds up no other stream.
    """

    def __init__(self, readers: int, name: str) -> None:
        self._last = dict[OpenData, Future[ServedSet]]()
        self._lock = threading.Lock()
        self.pool = ThreadPoolExecutor(readers, name)

    def opened(self, key: OpenData, made: Callable[[], ServedSet]) -> ServedSet:
        """Return the set of ``key``, which ``made`` opens if it is not open; those who ask meanwhile get the
        same one, or the same error. Raises what ``made`` does.
        """
        with self._lock:
            known = self._last.pop(key, None)
            found = self._last[key] = known or Future[ServedSet]()
            while len(self._last) > _MOST_SETS:
                del self._last[next(iter(self._last))]  # closed as soon as no connection has it
        if known is None:
            self._make(key, found, made)
        return found.result()

    def _make(self, key: OpenData, found: Future[ServedSet], made: Callable[[], ServedSet]) -> None:
        try:
            found.set_result(made())
        except Exception as error:
            with self._lock:
                if self._last.get(key) is found:  # the next one tries again
                    del self._last[key]
            found.set_exception(error)
            raise
