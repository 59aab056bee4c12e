# SPDX-License-Identifier: Apache-2.0
"""Edge (threads): the places of a port's connections, by what each has shown of itself.

A connection is silent, then has spoken, then is authenticated. Each state has places of its own. Where a
stranger's state has no free place, its oldest one goes; authenticated connections keep theirs. A
connection is shut out only by as many newer ones as there are places, if these come before it has shown its
certificate.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self

from millpond.base.errors import RemoteError


class ConnectionPlaces:
    """Places for ``strangers`` that are silent, as many that have spoken, ``known`` connections, and others
    that are only ``relayed``, by each handler's thread. Thread-safe.
    """

    def __init__(self, strangers: int, known: int, relayed: int = 0) -> None:
        self._strangers, self._known, self._relayed = strangers, known, relayed
        self._lock = threading.Lock()
        self._silent: list[ConnectionPlace] = []
        self._spoken: list[ConnectionPlace] = []
        """Places of strangers, the oldest first."""
        self._authenticated = 0

    @property
    def left(self) -> int:
        """The number of free places for authenticated connections."""
        return self._known - self._authenticated

    def enter(self, connection: socket.socket) -> ConnectionPlace:
        """Give a new connection a place, that of the oldest silent one if there is no other."""
        with self._lock:
            place = ConnectionPlace(self, connection.dup())
            self._add(place, self._silent)
        return place

    def move(self, place: ConnectionPlace) -> None:
        """Move a place to those that have spoken, unless it was lost."""
        with self._lock:
            if place in self._silent:
                self._silent.remove(place)
                self._add(place, self._spoken)

    def authenticate(self, place: ConnectionPlace) -> None:
        """Move a place to the authenticated ones. Raises RemoteError if it was lost or these are full."""
        with self._lock:
            if place.was_lost:
                raise RemoteError("a connection lost its place to newer ones before it was authenticated")
            if self._authenticated >= self._known:
                raise RemoteError(f"{self._known} connections are in use: one more was refused")
            self._remove(place)
            self._authenticated += 1

    def relay(self) -> None:
        """Move an authenticated connection to the relayed ones. Raises RemoteError if these are full."""
        with self._lock:
            if not self._relayed:
                raise RemoteError("too many connections are relayed: one more was refused")
            self._relayed -= 1
            self._authenticated -= 1

    def leave(self, place: ConnectionPlace, *, authenticated: bool, relayed: bool) -> None:
        """Free a place."""
        with self._lock:
            if relayed:
                self._relayed += 1
            elif authenticated:
                self._authenticated -= 1
            else:
                self._remove(place)

    def _add(self, place: ConnectionPlace, places: list[ConnectionPlace]) -> None:
        if len(places) >= self._strangers:
            oldest = places[0]
            oldest.was_lost = True
            with contextlib.suppress(OSError):
                oldest.connection.shutdown(socket.SHUT_RDWR)
            self._remove(oldest)
        places.append(place)

    def _remove(self, place: ConnectionPlace) -> None:
        for places in (self._silent, self._spoken):
            if place in places:
                places.remove(place)
        place.connection.close()


class ConnectionPlace:
    """The place of one connection, as a context manager that frees it. ``connection`` is a duplicate, which
    shuts the connection down whatever has become of the original.
    """

    def __init__(self, places: ConnectionPlaces, connection: socket.socket) -> None:
        self._places, self.connection = places, connection
        self._is_authenticated = self._is_relayed = False
        self.was_lost = False
        """Whether a newer connection has taken the place."""

    def spoke(self) -> None:
        """Note that the connection has sent its first byte."""
        self._places.move(self)

    def authenticated(self) -> None:
        """Note that the connection has proved what it is; further calls do nothing. Raises RemoteError."""
        if not self._is_authenticated:
            self._places.authenticate(self)
            self._is_authenticated = True

    def relayed(self) -> None:
        """Note that the authenticated connection is only relayed from now on, and takes none of the other
        places. Raises RemoteError.
        """
        self._places.relay()
        self._is_relayed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._places.leave(self, authenticated=self._is_authenticated, relayed=self._is_relayed)
