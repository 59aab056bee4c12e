# SPDX-License-Identifier: Apache-2.0
"""Edge (sockets): transforms in other processes, which a data service does not trust.

A process gets samples and returns changed ones. Sizes are checked before memory is taken, shapes and types
before anything is sent on. A process that has died, hangs or sends an invalid answer is replaced by another:
the stream that waited for it fails, and no other. Streams that are read at the same time have a process each.
"""

from __future__ import annotations

import functools
import socket
import threading
from collections.abc import Callable

from millpond.base.deadline import Deadline
from millpond.base.errors import (
    ConnectionLost,
    DeadlineExceeded,
    LocalError,
    ProtocolError,
    Refused,
    RemoteError,
)
from millpond.base.text import printable
from millpond.data.streaming.protocol.messages import MOST_HEAD
from millpond.data.streaming.protocol.service import LARGEST_CHUNK
from millpond.data.streaming.served_set import ReadSamples, Transform, TransformerLost
from millpond.data.streaming.transforms.messages import PROCESSES, ApplyTransform, TransformedSamples
from millpond.train.data.columns import Packed, unpack
from millpond.wire.channel import Channel
from millpond.wire.framing import Limits
from millpond.wire.messages import Ok

TRANSFORM_SECONDS = 50.0
"""How long a transform may take for ``PART`` samples."""
PART = 32
"""Samples that are sent to the process at once."""
Restart = Callable[[int], tuple[str, socket.socket | None]]
"""Ends the process of that number, if there is one, and starts another. Returns the reason for the end of the
former, and the connection to the latter; without a connection the reason why none has started."""


class RemoteTransforms:
    """The transforms of processes that ``restart`` starts, by name; thread-safe. A process has ``seconds``
    for each part of a chunk.
    """

    def __init__(self, restart: Restart, seconds: float = TRANSFORM_SECONDS) -> None:
        self._all = [_Transformer(functools.partial(restart, number), seconds) for number in range(PROCESSES)]
        self._free = list(self._all)
        self._freed = threading.Condition()

    def __call__(self, name: str) -> Transform:
        """Return a transform. Raises LocalError if there is none of that name, or no process."""
        self._transformed(name, ReadSamples((), 0))
        return functools.partial(self._transformed, name)

    def close(self) -> None:
        """End the connections, at which the processes end."""
        for _ in self._all:
            self._taken().close()

    def _transformed(self, name: str, samples: ReadSamples) -> Packed:
        process = self._taken()
        try:
            return process.transformed(name, samples)
        finally:
            with self._freed:
                self._free.append(process)
                self._freed.notify()

    def _taken(self) -> _Transformer:
        """Wait for a process that nobody uses: one that runs, if there is such."""
        with self._freed:
            self._freed.wait_for(lambda: self._free)
            chosen = max(self._free, key=lambda each: each.runs)
            self._free.remove(chosen)
            return chosen


class _Transformer:
    """One process, which does one thing at a time."""

    def __init__(self, restart: Callable[[], tuple[str, socket.socket | None]], seconds: float) -> None:
        self._restart, self._seconds = restart, seconds
        self._channel: Channel | None = None

    @property
    def runs(self) -> bool:
        """Whether there is a process, as far as is known."""
        return self._channel is not None

    def close(self) -> None:
        """End the connection, at which the process ends."""
        if self._channel:
            self._channel.close()
        self._channel = None

    def transformed(self, name: str, samples: ReadSamples) -> Packed:
        """Return the chunk of changed samples. Raises LocalError."""
        channel = self._running()
        try:
            return self._asked(channel, name, samples)
        except Refused as error:  # by the process, which goes on
            raise LocalError(error.text) from None
        except RemoteError as error:
            told = (_fault(name, error, self._seconds), self._replace())
            raise TransformerLost(": ".join(filter(None, told))) from None

    def _running(self) -> Channel:
        if self._channel is None:
            reason = self._replace()
            if self._channel is None:
                raise LocalError(f"no transform can be applied: {reason}")
        return self._channel

    def _replace(self) -> str:
        """End the process, if there is one, and start another. Returns what Restart does."""
        if self._channel:
            self._channel.close()
        reason, sock = self._restart()
        limits = Limits(MOST_HEAD, LARGEST_CHUNK)
        self._channel = Channel(sock, "the process of the transforms", limits=limits) if sock else None
        return printable(reason)

    def _asked(self, channel: Channel, name: str, samples: ReadSamples) -> Packed:
        """Return a chunk of changed samples. Raises RemoteError."""
        last = max(0, samples.count - 1) // PART * PART
        for start in range(0, last + 1, PART):
            deadline = Deadline.after(self._seconds)
            part = samples.packed(start, start + PART)
            request = ApplyTransform(name, part.head, samples.decode, start == 0, start == last)
            channel.send(request, deadline, b"".join(part.pieces))
            if start < last:
                channel.expect(Ok, deadline)
        return _received(channel, samples.count, deadline)


def _received(channel: Channel, samples: int, deadline: Deadline) -> Packed:
    answer = channel.expect(TransformedSamples, deadline, None)
    if answer.size > LARGEST_CHUNK and not channel.payload_left:
        return Packed(b"", (), answer.size)  # too large to be sent, so that it is read again in halves
    payload = memoryview(channel.receive_payload(LARGEST_CHUNK, deadline))
    found = len(unpack(answer.head, payload))
    if found != samples:
        raise ProtocolError(f"{found} samples came back of {samples}")
    return Packed(answer.head, (payload,), len(payload))


def _fault(name: str, error: RemoteError, seconds: float) -> str:
    if isinstance(error, DeadlineExceeded):
        return f"the transform '{name}' hangs: it took more than {seconds:g} s for {PART} samples"
    if isinstance(error, ConnectionLost):
        return f"the process of the transform '{name}' has ended"
    return f"the process of the transform '{name}' sent an invalid answer"
