# SPDX-License-Identifier: Apache-2.0
"""Edge: a connection to the host daemon over its Unix socket, and through it to a device's volume."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Self, TypeVar

from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, LocalError, Refused, RemoteError, VersionMismatch
from millpond.host.api.connection import CLOSED, ENDED, GetVolume, VolumeTicket
from millpond.host.fleet import directory as fleet
from millpond.host.fleet.directory import Fleet
from millpond.linux import sockets
from millpond.wire.channel import Buffer, Channel, FileSlice
from millpond.wire.control_messages import Attach
from millpond.wire.framing import Limits
from millpond.wire.messages import Failure, Message, Ok

R = TypeVar("R", bound=Message)
ANSWER_SECONDS = 30.0


def connected(served: Fleet) -> socket.socket:
    """Return a connection to a fleet's daemon. Raises LocalError where none runs."""
    try:
        return sockets.connect(served.socket)
    except (FileNotFoundError, ConnectionRefusedError):
        raise LocalError(
            f"no host daemon runs for {served.directory}: "
            "start one with 'millpond emulate' or 'millpond host'"
        ) from None
    except OSError as error:
        raise LocalError(f"{served.socket}: {error.strerror}") from None


def _other_version(error: VersionMismatch) -> LocalError:
    numbers = f"its protocol is {error.theirs}, that of this command {error.ours}"
    older = "it was started before an update: restart it" if error.theirs < error.ours else "update this one"
    return LocalError(f"the host daemon is of another version than this command ({numbers}): {older}")


class DaemonConnection:
    """A connection to the daemon of a fleet, for what concerns volumes alone. Raises LocalError where none
    runs.
    """

    LIMITS = Limits(head=1 << 20, payload=0)

    def __init__(
        self, directory: Path, authority: Path | None = None, *, seconds: float = ANSWER_SECONDS
    ) -> None:
        """Connect to the daemon of the fleet in ``directory``, whose ``authority`` may be in another one; an
        answer may take so many ``seconds``.
        """
        self.fleet: Fleet = fleet.read(directory, authority)
        self._seconds = seconds
        sock = connected(self.fleet)
        self._daemon = sockets.peer_pid(sock)
        self._channel = Channel(sock, "the host daemon", limits=self.LIMITS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection, from any thread: one that waits for an answer gets ConnectionLost."""
        self._channel.close()

    def _call(
        self, request: Message, reply: type[R], deadline: Deadline, payload: Buffer | FileSlice = b""
    ) -> R:
        """Return the daemon's answer; a refusal keeps its text, without the daemon's name before it."""
        with self._told_truly():
            return self._channel.call(request, reply, deadline, payload)

    @contextlib.contextmanager
    def _told_truly(self, ended: str = ENDED) -> Iterator[None]:
        """Raise what has become of the daemon for a connection that is lost inside the context: it has said
        why, it runs and has ended this connection alone, or it has ``ended``.
        """
        try:
            yield
        except VersionMismatch as error:
            raise _other_version(error) from None
        except Refused as error:
            raise Refused("", error.code, error.text) from None
        except ConnectionLost:
            self._raise_last_word()
            raise ConnectionLost(CLOSED if self._is_served() else ended) from None

    def _raise_last_word(self) -> None:
        """Raise what the daemon has said before it closed the connection, in the middle of a request."""
        try:
            head = self._channel.receive(Deadline.after(1.0))
        except VersionMismatch as error:
            raise _other_version(error) from None
        except (RemoteError, RuntimeError):
            return
        if isinstance(head.message, Failure):
            raise Refused("", head.message.code, head.message.text)

    def _is_served(self) -> bool:
        """Return whether the same daemon still answers, and no other one that was started in its place."""
        try:
            with sockets.connect(self.fleet.socket, timeout=1.0) as sock:
                return sockets.peer_pid(sock) == self._daemon
        except TimeoutError:
            return True
        except OSError:
            return False

    @property
    def _deadline(self) -> Deadline:
        return Deadline.after(self._seconds)

    def volume(self, device: str, deadline: Deadline) -> Channel:
        """Return an attached connection to the device's volume."""
        grant = self._call(GetVolume(device), VolumeTicket, deadline)
        sock = self._receive_socket()
        if grant.tls:
            from millpond.wire import tls

            sock = tls.connect(sock, self.fleet.identity.context(server=False), device, deadline)
        channel = Channel(sock, device)
        channel.call(Attach(grant.token), Ok, deadline)
        return channel

    def _receive_socket(self) -> socket.socket:
        return socket.socket(fileno=self._receive_descriptor())

    def _receive_descriptor(self) -> int:
        self._channel.sock.settimeout(ANSWER_SECONDS)
        return sockets.receive_descriptors(self._channel.sock, 1)[0]
