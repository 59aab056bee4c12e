# SPDX-License-Identifier: Apache-2.0
"""Edge (a socket, a thread, clock): a consumer of a data service: it receives while others compute.

A lost connection is made again, with pauses that grow; what the consumer had counts on. The caller's thread
waits for samples and for nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from millpond.base.deadline import Deadline
from millpond.base.errors import (
    ConnectionLost,
    DeadlineExceeded,
    LocalError,
    MillpondError,
    ProtocolError,
    Refused,
    RemoteError,
)
from millpond.base.text import printable
from millpond.data.streaming.protocol.consumer import RunWish, StreamConsumer, Told
from millpond.data.streaming.protocol.inbox import Piece
from millpond.data.streaming.protocol.leases import EpochState
from millpond.data.streaming.protocol.messages import (
    MOST_HEAD,
    At,
    DataChunk,
    DataOpened,
    OpenData,
    ServiceAlive,
)
from millpond.data.streaming.protocol.tuner import StreamTuner
from millpond.train.balance.curve import Ints
from millpond.train.balance.ranges import Ranges
from millpond.train.data.columns import ReceivedSamples, joined, unpack
from millpond.wire.channel import Channel
from millpond.wire.framing import Limits
from millpond.wire.messages import Failure

log = logging.getLogger(__name__)
_CALL_SECONDS = 20.0
_PAUSES = (0.05, 2.0)
_LARGEST = 1 << 30
_PART = 256 << 10  # of a payload, each within the silence that makes a connection count as lost
"""Bytes of a payload of which all must come before the service counts as silent."""

Connect = Callable[[], socket.socket]


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """Connects to an address when it is called, in whatever process."""

    host: str
    port: int

    def __call__(self) -> socket.socket:
        """Connect. Raises OSError."""
        return socket.create_connection((self.host, self.port), _CALL_SECONDS)


Pieces = list[Piece[ReceivedSamples]]
Taken = tuple[int, Ranges, Pieces]
"""Epoch, positions and pieces of samples."""


@dataclass(frozen=True, slots=True)
class StreamSource:
    """Where a data set comes from: how to connect, its name, where it is decoded and what it holds, see
    OpenData. A service that is away for ``patience`` seconds is an error; a connection on which nothing comes
    for ``silence`` seconds is lost.
    """

    connect: Connect
    name: str
    secret: str = ""
    at: At = "worker"
    transform: str = ""
    patience: float = 60.0
    silence: float = 20.0
    format: Literal["", "npy", "idx", "images"] = ""
    classes: tuple[str, ...] = ()

    @property
    def wish(self) -> OpenData:
        """The message that opens the data set."""
        return OpenData(self.name, self.secret, self.at, self.transform, self.format, self.classes)


class StreamClient:
    """A consumer with ``wish``, or one that only fetches. ``tuner`` chooses the size of chunks and the bytes
    on the way; a ``quiet`` one takes no samples. A context manager.
    """

    def __init__(
        self, source: StreamSource, wish: RunWish | None, tuner: StreamTuner, *, quiet: bool = False
    ) -> None:
        self._source, self._tuner = source, tuner
        window, chunk = 0 if quiet else tuner.choice.window, tuner.choice.chunk
        self._consumer: StreamConsumer[ReceivedSamples] = StreamConsumer(wish, window, chunk)
        self._last: float | None = None
        self._was_connected = False
        self._changed = threading.Condition()
        self._receiving: Channel | None = None
        self._channel: Channel | None = None
        self._error: MillpondError | None = None
        self._closed = False
        self.opened: DataOpened | None = None
        self.waited = 0.0
        """Seconds that callers waited for samples."""
        self._thread = threading.Thread(target=self._run, name="data stream", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the connection; what was taken and not finished goes to other consumers after a while."""
        with self._changed:
            self._closed = True
            if self._receiving:
                self._receiving.shut_down()
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> StreamClient:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def description(self) -> DataOpened:
        """Return what the service says of the data set. Raises RemoteError."""
        with self._changed:
            self._wait(lambda: self.opened is not None)
            assert self.opened
            return self.opened

    def begin(self, epoch: int = -1, turn: str = "") -> None:
        """Take part in an epoch, see BeginEpoch."""
        with self._told():
            self._consumer.begin(epoch, turn)

    def take(self, wanted: int, *, to_end: bool = True) -> Taken:
        """Return the epoch, positions and pieces of ``wanted`` samples, of fewer at the end of an epoch, of
        none when it has ended; if not ``to_end``, of none already when all samples are leased. Raises
        RemoteError.
        """
        found: Pieces = []
        left, consumer = wanted, self._consumer
        with self._changed:
            before = consumer.working
            while left:
                pieces = consumer.take(left)
                self._flush()
                found += pieces
                left -= sum(piece.stop - piece.start for piece in pieces)
                if not left or consumer.ended or (consumer.drained and (found or not to_end)):
                    break
                self._wait_for_samples(until_drained=bool(found) or not to_end)
            return consumer.epoch, consumer.working[len(before) :], found

    def _wait_for_samples(self, *, until_drained: bool) -> None:
        consumer = self._consumer
        self._wait(lambda: consumer.bytes > 0 or consumer.ended or (until_drained and consumer.drained))

    def finish_step(self, samples: int | None = None) -> None:
        """Tell the service that all steps with taken samples, or with the first of them, are done."""
        with self._told():
            self._consumer.finish_step(samples)

    def finish(self, consumer: str, epoch: int, ranges: Ranges) -> None:
        """Tell the service that steps with another consumer's samples are done."""
        with self._told():
            self._consumer.finish(consumer, epoch, ranges)

    def leave(self, consumer: str = "") -> None:
        """Tell the service that a consumer has ended, this one if empty."""
        with self._told():
            self._consumer.leave(consumer)

    def tell(self, messages: Sequence[Told]) -> None:
        """Tell the service what an earlier client's ``settle`` has returned."""
        with self._told():
            self._consumer.tell(messages)

    def settle(self) -> list[Told]:
        """Wait until the service knows of all that was told to it. Returns what it may not know: it says
        nothing for as long as its source is patient, or a connection that is lost is not back at once.
        """
        with self._told():
            self._consumer.ask_state()
        with self._changed:
            self._changed.wait_for(lambda: self._answered or not self._channel, self._source.patience)
            self._changed.wait_for(lambda: self._answered, _PAUSES[1])
            return [] if self._consumer.state else self._consumer.untold()

    @property
    def _answered(self) -> bool:
        return self._consumer.state is not None or self._error is not None

    def state(self) -> EpochState:
        """Return the state of the run that any number of consumers can go on from. Raises RemoteError."""
        with self._told():
            self._consumer.ask_state()
        with self._changed:
            self._wait(lambda: self._consumer.state is not None)
            found = self._consumer.state
            assert found
            return EpochState(found.epoch, found.cursor, found.returned, found.samples)

    def fetch(self, indices: Sequence[int] | Ints) -> int:
        """Ask for samples by their indices. Returns the number of the fetch."""
        with self._told():
            return self._consumer.fetch(indices)

    def drop(self, number: int) -> None:
        """Forget a fetch."""
        with self._changed:
            self._consumer.fetches.drop(number)

    def fetched(self, places: Sequence[tuple[int, int]]) -> list[Piece[ReceivedSamples]]:
        """Return samples by fetch and place in it, when these fetches are whole. Raises RemoteError."""
        fetches, numbers = self._consumer.fetches, {number for number, _ in places}
        with self._changed:
            self._wait(lambda: all(fetches.whole(number) for number in numbers))
            return fetches.pieces(places)

    def observe(self, samples: int, seconds: float) -> None:
        """Note that a step with these samples took so long, waiting for them not counted."""
        with self._told():
            self._tuner.observe_step(samples, seconds)
            if self._consumer.window:
                self._consumer.retune(self._tuner.choice.chunk, self._tuner.choice.window)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        with self._changed:
            yield
            self._flush()

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Wait, with the lock held. Raises the error of the connection."""
        began = time.monotonic()
        self._changed.wait_for(lambda: ready() or self._error or self._closed)
        self.waited += time.monotonic() - began
        if not ready():
            raise self._error or LocalError("the stream is closed")

    def _flush(self) -> None:
        """Send what the consumer has to say, with the lock held; a lost connection is the receiver's."""
        if self._channel is None:
            return
        messages, self._consumer.outgoing = self._consumer.outgoing, []
        try:
            for message in messages:
                self._channel.send(message, Deadline.after(_CALL_SECONDS))
        except RemoteError:
            self._channel.shut_down()

    def _run(self) -> None:
        pause, lost = _PAUSES[0], time.monotonic()
        while not self._closed:
            try:
                self._converse()
            except (Refused, ProtocolError, LocalError) as error:
                self._fail(error)
                return
            except (OSError, ConnectionLost, DeadlineExceeded) as error:
                if self._was_connected:
                    pause, lost = _PAUSES[0], time.monotonic()
                if time.monotonic() - lost > self._source.patience:
                    self._fail(RemoteError(f"the data service is away: {error}"))
                    return
            except RemoteError as error:
                self._fail(error)
                return
            except Exception as error:
                log.exception("the stream of data: internal error")
                self._fail(LocalError(f"the stream of data has failed: {error}"))
                return
            with self._changed:
                self._changed.wait_for(lambda: self._closed, pause)
            pause = min(2 * pause, _PAUSES[1])

    def _fail(self, error: MillpondError) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _converse(self) -> None:
        """Connect, and receive until the connection ends. Raises OSError, MillpondError."""
        self._was_connected = False
        source, began = self._source, time.monotonic()
        with source.connect() as sock:
            seconds = time.monotonic() - began
            receiving = Channel(sock, "the data service", limits=Limits(MOST_HEAD, _LARGEST))
            with self._changed:
                self._receiving = receiving  # for close
                if self._closed:
                    return
            deadline = Deadline.after(max(source.patience, _CALL_SECONDS))
            opened = receiving.call(source.wish, DataOpened, deadline)
            with Channel(sock.dup(), "the data service") as sending:
                self._begin(sending, opened, seconds)
                try:
                    while True:
                        self._receive(receiving)
                finally:
                    with self._changed:
                        self._channel = None
                        self._changed.notify_all()

    def _begin(self, sending: Channel, opened: DataOpened, seconds: float) -> None:
        with self._told():
            if self.opened and self.opened != opened:
                raise RemoteError("the data set is another one since the connection was lost")
            if self._closed:
                raise ConnectionLost("the stream is closed")
            if self.opened is None:
                self._tuner.opened(sum(opened.shards), opened.sample_bytes, seconds)
                if self._consumer.window:
                    self._consumer.retune(self._tuner.choice.chunk, self._tuner.choice.window)
            self.opened, self._channel = opened, sending
            self._consumer.connected()
            self._changed.notify_all()

    def _receive(self, channel: Channel) -> None:
        head = channel.receive(Deadline.after(self._source.silence))
        message = head.message
        if isinstance(message, Failure):
            raise Refused("the data service", printable(message.code), printable(message.text))
        samples = None
        if isinstance(message, DataChunk):
            with self._changed:
                self._consumer.check_credit(head.payload_size)  # before there is room for it
            payload = np.empty(head.payload_size, np.uint8).data
            for start in range(0, len(payload), _PART):
                channel.receive_next(payload[start : start + _PART], Deadline.after(self._source.silence))
            samples = unpack(message.head, payload)
        self._was_connected = True  # a whole message has come, so trying again may get on
        with self._told():
            if samples is not None:
                self._observe(len(samples), head.payload_size)
            if not isinstance(message, ServiceAlive):
                self._consumer.receive(message, samples, head.payload_size)
            self._changed.notify_all()

    def _observe(self, samples: int, size: int) -> None:
        """Tell the tuner of a chunk. Its time counts if credit was left when it and the one before came."""
        now, starved = time.monotonic(), self._consumer.starved
        self._tuner.observe_chunk(samples, size, now - self._last if starved and self._last else None)
        self._last = now if starved else None


def batch_of(pieces: Sequence[Piece[ReceivedSamples]], decode: Callable[[Any], Any]) -> Any:
    """Return the samples of pieces as one decoded batch: a view of what was received if they are in one."""
    return decode(
        joined([each for piece in pieces for each in piece.samples.batches(piece.start, piece.stop)])
    )
