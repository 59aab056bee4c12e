# SPDX-License-Identifier: Apache-2.0
"""Edge (sockets, threads): connections to one data set of a data service, for a process without network.

The process asks for one, and gets one end of a pair of sockets; its bytes are relayed. So they pass the gate
of the process that relays, and which data set is opened, with which secret, is not the asker's to choose.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from pathlib import PurePosixPath

from millpond.base.deadline import Deadline
from millpond.base.errors import MillpondError
from millpond.data.streaming.protocol.messages import OpenData
from millpond.fs.store.layout import PUBLIC
from millpond.linux.sockets import send_descriptors
from millpond.train.job.spec import WorkSpec
from millpond.train.protocol import DataServicePlace, Folder
from millpond.wire.channel import Channel, Outlet
from millpond.wire.messages import Kind

log = logging.getLogger(__name__)
_SECONDS = 20.0
_CHUNK = 1 << 18
_TICK = 0.1
_MOST = 4  # connections that are being made or ended at once
Outlets = Callable[[], Outlet | None]
"""Makes what sees all bytes that are sent to the service on a connection."""


class StreamRelay:
    """Relays connections to the data service at ``place``, where each opens the data set of ``wish``. The
    process asks at the other end of ``asked``, which the caller passes on and closes. It has one connection
    at a time.
    """

    def __init__(self, place: tuple[str, int], wish: OpenData, outlets: Outlets) -> None:
        self._place, self._wish, self._outlets = place, wish, outlets
        self._ours, self.asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock, self._places = threading.Lock(), threading.BoundedSemaphore(_MOST)
        self._ends: list[socket.socket] = []
        self._closed = False
        self._thread = threading.Thread(target=self._answer, name="streams of a worker", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the connections."""
        with self._lock:
            self._closed = True
            _shut_down(self._ours, *self._ends)
        self.asked.close()
        self._thread.join()
        self._ours.close()

    def _answer(self) -> None:
        """Give the process a connection each time that it asks, until its end."""
        with contextlib.suppress(OSError):
            while self._ours.recv(1) and self._has_place():
                near, far = socket.socketpair()
                with far:
                    send_descriptors(self._ours, [far.fileno()])
                self._begin(near)
        with self._lock:
            _shut_down(*self._ends)

    def _has_place(self) -> bool:
        """Wait until there may be one more connection. False once the relay is closed."""
        while not self._closed:
            if self._places.acquire(timeout=_TICK):
                return True
        return False

    def _begin(self, near: socket.socket) -> None:
        """Relay one more connection, which ends the one before."""
        with self._lock:
            _shut_down(*self._ends)
            self._ends = [near]
            if self._closed:
                near.close()
                self._places.release()
                return
        threading.Thread(target=self._relay, args=(near,), name="stream", daemon=True).start()

    def _relay(self, near: socket.socket) -> None:
        try:
            with near, socket.create_connection(self._place, _SECONDS) as service:
                with self._lock:
                    if self._closed or near not in self._ends:
                        return
                    self._ends.append(service)
                outlet = self._outlets()
                Channel(near, "a worker").expect(OpenData, Deadline.after(_SECONDS))
                Channel(service, "a data service", outlet=outlet).send(self._wish, Deadline.after(_SECONDS))
                self._copy_both(near, service, outlet)
        except (MillpondError, OSError) as error:  # the process asks again
            log.info("a stream has ended: %s", error)
        finally:
            self._places.release()

    def _copy_both(self, near: socket.socket, service: socket.socket, outlet: Outlet | None) -> None:
        for each in (near, service):
            each.settimeout(None)
        back = threading.Thread(target=_copy, args=(service, near, None), name="stream", daemon=True)
        back.start()
        _copy(near, service, outlet)
        back.join()


def relay_of(place: DataServicePlace, folder: Folder, work: WorkSpec, outlets: Outlets) -> StreamRelay:
    """Return the relay of a job's worker to the data service at ``place``, which opens a streamed folder."""
    name = PurePosixPath(folder.path).relative_to(PUBLIC).as_posix()
    wish = OpenData(name, place.secret, format=work.format, classes=work.classes)
    return StreamRelay((place.address, place.port), wish, outlets)


def _copy(source: socket.socket, sink: socket.socket, outlet: Outlet | None) -> None:
    """Copy bytes to the end of either side, and end both."""
    buffer = memoryview(bytearray(_CHUNK))
    try:
        while count := source.recv_into(buffer):
            if outlet:
                outlet.passing(Kind.VOLUME, buffer[:count], payload=True)
            sink.sendall(buffer[:count])
    except (MillpondError, OSError) as error:  # MillpondError: a canary was found
        log.info("a stream has ended: %s", error)
    finally:
        _shut_down(source, sink)


def _shut_down(*ends: socket.socket) -> None:
    for each in ends:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
