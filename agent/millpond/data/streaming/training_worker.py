# SPDX-License-Identifier: Apache-2.0
"""Entry: a job's worker whose public samples lie on another device. It has no network: its parent gives it
connections to the data service of that device, and to no other place.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence

from millpond.data.streaming.by_index import IndexedStream
from millpond.data.streaming.client import StreamSource
from millpond.linux.sockets import receive_descriptors
from millpond.train.job.spec import WorkSpec
from millpond.train.protocol import Folder
from millpond.train.worker import process

PATIENCE = 10.0
"""Seconds without a service after which a worker says so, and is prepared again: with another service, if
that one has died.
"""
_MEMORY = 256 << 20
_BATCH = 32
"""The samples for which the size of chunks is chosen: the batch is not known when a stream is opened."""
_ASK = b"?"


class _Streams:
    """Opens folders by the connections that are given on a socket."""

    def __init__(self, descriptor: int) -> None:
        self._sock = socket.socket(fileno=descriptor)
        self._sock.set_inheritable(False)

    def connect(self) -> socket.socket:
        """Return a new connection to the data service. Raises OSError."""
        self._sock.send(_ASK)
        (descriptor,) = receive_descriptors(self._sock, 1)
        return socket.socket(fileno=descriptor)

    def open(self, work: WorkSpec, folder: Folder) -> IndexedStream:
        """Return the samples of a folder. Raises RemoteError."""
        source = StreamSource(
            self.connect, folder.path, patience=PATIENCE, format=work.format, classes=work.classes
        )
        return IndexedStream(source, _MEMORY, 0, _BATCH, None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the worker; return the exit code."""
    return process.main(arguments, lambda descriptor: _Streams(descriptor).open)


if __name__ == "__main__":
    sys.exit(main())
