# SPDX-License-Identifier: Apache-2.0
"""Edge (a socket, threads): one connection of a data service: what comes in, and chunks that are read ahead.

Two threads use the socket, one in each direction, each by a descriptor of its own. All their calls have
deadlines, so that the socket never blocks in one because of the other.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future

from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, LocalError, MillpondError
from millpond.data.streaming.protocol.messages import DataChunk, FetchSamples, GrantCredit, ServiceAlive
from millpond.data.streaming.protocol.service import LARGEST_CHUNK, ChunkReading, Service, halves
from millpond.data.streaming.served_set import ServedSet, in_words
from millpond.train.data.columns import Packed
from millpond.wire.channel import Channel
from millpond.wire.messages import Failure, Message

log = logging.getLogger(__name__)

_AHEAD = 3
"""Chunks that are read, or being read, before they can be sent."""
_IDLE_SECONDS = 86400.0
READ_SECONDS = 120.0
"""How long a chunk may take to be read, before its consumer is told that the flash does not answer."""
_SECONDS = 600.0
"""A consumer may compute for as long before it takes more; keep-alives find those that are gone."""
Advanced = Callable[[Service, bool], None]


class ConsumerConnection:
    """Serves one consumer, by a channel for each direction. ``advanced`` is called with ``lock`` held when a
    run's state may have changed. The consumer hears something every ``keep_alive`` seconds.
    """

    def __init__(
        self,
        channel: Channel,
        sending: Channel,
        service: Service,
        data: ServedSet,
        pool: Executor,
        lock: threading.RLock,
        advanced: Advanced,
        keep_alive: float,
    ) -> None:
        self._receiving, self._sending = channel, sending
        self._service, self._data, self._pool = service, data, pool
        self._lock, self._changed = lock, threading.Condition(lock)
        self._advanced, self._keep_alive = advanced, keep_alive
        self._answers: deque[Message] = deque()
        self._ahead: deque[tuple[ChunkReading, Future[Packed]]] = deque()
        self._awaited: Future[Packed] | None = None
        self._awaited_since = 0.0
        self._closed = False

    def wake(self) -> None:
        """Have the sending thread look again; the lock is held."""
        self._changed.notify_all()

    def close(self) -> None:
        """End the connection."""
        self._closed = True
        self._receiving.shut_down()
        self.wake()

    def run(self) -> None:
        """Serve until the connection ends. Raises ProtocolError and LocalError for what cannot be served."""
        sender = threading.Thread(target=self._send_all, name="data sender", daemon=True)
        sender.start()
        try:
            while not self._closed:
                head = self._receiving.receive(Deadline.after(_IDLE_SECONDS))
                with self._lock:
                    self._answers += self._service.receive(head.message)
                    if isinstance(head.message, GrantCredit | FetchSamples):
                        self.wake()
                    else:
                        self._advanced(self._service, True)
        except ConnectionLost:
            pass
        except MillpondError as error:
            self._refuse(error)
        finally:
            with self._lock:
                self.close()
            sender.join()
            self._sending.close()

    def _refuse(self, error: MillpondError) -> None:
        with self._lock:
            self._answers.append(Failure("data", str(error)))
            self.wake()
            self._changed.wait_for(lambda: self._closed or not self._answers, 5.0)

    def _send_all(self) -> None:
        try:
            while self._send_next():
                pass
        except ConnectionLost:  # or the service ends: its consumer connects again
            pass
        except MillpondError as error:
            self._say(Failure("data", str(error)))
        except Exception as error:
            log.exception("data service: internal error")
            self._say(Failure("internal", f"the data service has failed: {in_words(error)}"))
        finally:
            self._receiving.shut_down()

    def _say(self, failure: Failure) -> None:
        with contextlib.suppress(MillpondError):
            self._sending.send(failure, Deadline.after(5.0))

    def _send_next(self) -> bool:
        """Send what is next, at the latest that the service is there. Returns False at the end."""
        due = Deadline.after(self._keep_alive)
        with self._changed:
            while True:
                if self._closed:
                    return False
                messages, chunk = self._next()
                if messages or chunk:
                    break
                if due.passed:
                    messages = [ServiceAlive()]
                    break
                self._changed.wait(self._keep_alive)
        for message in messages:
            self._sending.send(message, Deadline.after(_SECONDS))
        if chunk:
            reading, packed = chunk
            message = DataChunk(reading.number, reading.epoch, reading.ranges, packed.head)
            self._sending.send(message, Deadline.after(_SECONDS), b"".join(packed.pieces))
        return True

    def _next(self) -> tuple[list[Message], tuple[ChunkReading, Packed] | None]:
        """Return messages to send, or a chunk for which there is credit; begin to read others."""
        self._read_ahead()
        found = list(self._answers)
        self._answers.clear()
        if found:
            self.wake()
        chunk = self._first_read()
        if chunk is None:
            found += self._service.news()
        return found, chunk

    def _read_ahead(self) -> None:
        while len(self._ahead) < _AHEAD and (reading := self._service.reading()):
            self._advanced(self._service, False)  # kept before the consumer hears of it
            self._ahead.append((reading, self._begun(reading)))

    def _begun(self, reading: ChunkReading) -> Future[Packed]:
        try:
            future = self._pool.submit(self._data.read, reading.indices)
        except RuntimeError:  # the pool takes nothing any more
            raise ConnectionLost("the data service is about to end") from None
        future.add_done_callback(self._was_read)
        return future

    def _was_read(self, _future: Future[Packed]) -> None:
        with self._lock:
            self.wake()

    def _require_progress(self, future: Future[Packed]) -> None:
        """Raise LocalError if a chunk has been waited for so long that its flash, or a transform, hangs."""
        now = time.monotonic()
        if self._awaited is not future:
            self._awaited, self._awaited_since = future, now
        elif now > self._awaited_since + READ_SECONDS:
            raise LocalError(
                f"samples have not been read within {READ_SECONDS:g} s: the flash does not answer"
            )

    def _first_read(self) -> tuple[ChunkReading, Packed] | None:
        """Return the next chunk if it is read and has credit; one that is too large is read in halves."""
        if not self._ahead:
            return None
        reading, future = self._ahead[0]
        if not future.done():
            self._require_progress(future)
            return None
        packed = future.result()
        if packed.size > min(self._service.window, LARGEST_CHUNK):
            self._ahead.popleft()
            self._ahead.extendleft((each, self._begun(each)) for each in reversed(halves(reading)))
            return None
        if packed.size > self._service.credit.room:
            return None
        self._ahead.popleft()
        self._service.sent(reading, packed.size)
        return reading, packed
