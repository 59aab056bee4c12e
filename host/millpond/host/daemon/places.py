# SPDX-License-Identifier: Apache-2.0
"""Edge (threads): the places of connections at the daemon's socket, by the user at the other end.

The daemon's own user has places that nobody else takes, others share the rest, each no more than a part.
Where a user has no place left, the connection that has been without a request for longest loses its place;
one that waits for an answer keeps it. So no user shuts others out, nor itself by idle connections.
"""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
from collections import Counter
from collections.abc import Iterator

from millpond.base.errors import Refused

MOST = 256
_PART = 4
"""Each user but the daemon's own has this part of the places that all of them share."""


class UserPlace:
    """The place of one connection."""

    def __init__(self, connection: socket.socket, uid: int) -> None:
        self.connection, self.uid = connection, uid
        self.is_answering = False
        self.lost = False


class UserPlaces:
    """``most`` places for the user ``owner``, and as many for all others. Thread-safe."""

    def __init__(self, owner: int, most: int) -> None:
        self._owner, self.most = owner, most
        self._lock = threading.Lock()
        self._places: list[UserPlace] = []
        """The place whose connection has been without a request for longest comes first."""

    @contextlib.contextmanager
    def enter(self, connection: socket.socket, uid: int) -> Iterator[UserPlace]:
        """Give a new connection a place inside the context. Raises Refused if all its user's are answered."""
        place = UserPlace(connection, self._owner if uid == 0 else uid)
        with self._lock:
            self._make_room(place.uid)
            self._places.append(place)
        try:
            yield place
        finally:
            with self._lock:
                if not place.lost:
                    self._places.remove(place)

    @contextlib.contextmanager
    def answering(self, place: UserPlace) -> Iterator[None]:
        """Keep the place inside the context."""
        with self._lock:
            place.is_answering = True
        try:
            yield
        finally:
            with self._lock:
                place.is_answering = False
                if not place.lost:
                    self._places.remove(place)
                    self._places.append(place)

    def _make_room(self, uid: int) -> None:
        counts = Counter(place.uid for place in self._places)
        if uid == self._owner:
            full, user = counts[uid] >= self.most, uid
        else:
            del counts[self._owner]
            shared = counts.total() >= self.most
            full = shared or counts[uid] >= max(1, self.most // _PART)
            user = max(counts, key=lambda other: counts[other]) if shared else uid
        if not full:
            return
        for place in self._places:
            if place.uid == user and not place.is_answering:
                place.lost = True
                self._places.remove(place)
                with contextlib.suppress(OSError):
                    place.connection.shutdown(socket.SHUT_RDWR)
                return
        raise Refused("", "busy", "the host daemon answers as many commands of yours as it can: try again")


def most_places() -> int:
    """Return the places that the limit of descriptors allows for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(4, min(MOST, soft // 8))
