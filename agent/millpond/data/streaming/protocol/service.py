# SPDX-License-Identifier: Apache-2.0
"""Pure: the service's side of its connections: runs, their consumers, and what to read and send next.

The edge feeds messages in and sends what comes out; nothing here waits or reads a clock.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from millpond.base.errors import LocalError, ProtocolError
from millpond.data.streaming.protocol import messages
from millpond.data.streaming.protocol.credit import ByteCredit
from millpond.data.streaming.protocol.epoch_order import epoch_order, samples_at
from millpond.data.streaming.protocol.leases import EpochLeases, EpochState, state_of
from millpond.data.streaming.protocol.messages import LEASED
from millpond.train.balance.curve import Ints
from millpond.train.balance.ranges import Ranges, split
from millpond.wire.messages import Message

_SMALLEST = 8
"""Leases at the end of an epoch are no smaller than this part of a chunk."""
_TURNS = 64
LARGEST_CHUNK = 64 << 20
"""Bytes of a chunk, whatever its consumer has room for."""


@dataclass(frozen=True, slots=True)
class ChunkReading:
    """Samples to be read and sent in one chunk: those at ``ranges`` of an epoch, or of a fetch."""

    number: int
    epoch: int
    ranges: Ranges
    indices: Ints


class StreamRun:
    """Epochs over one data set whose positions are leased to the consumers of the run."""

    def __init__(
        self, shards: Sequence[int], seed: int, window: int, state: EpochState, grace: float
    ) -> None:
        self.leases = EpochLeases(sum(shards), state, grace)
        self._shards, self._seed, self._window = shards, seed, window
        self.fingerprint = fingerprint(shards)
        self._order: tuple[int, Ints] = (-1, np.empty(0, np.int64))
        self.turns: dict[str, int] = {}
        self._entered, self._entries = 0, dict[str, int]()

    def enter(self, consumer: str) -> int:
        """Return the number of a connection of a consumer; only the last one is good."""
        self._entered += 1
        self._entries[consumer] = self._entered
        return self._entered

    def leave(self, consumer: str) -> None:
        """Forget a consumer that has ended: no connection of it is good."""
        self._entries.pop(consumer, None)
        self.leases.leave(consumer)

    def lose(self, consumer: str, now: float) -> None:
        """Note that the last connection of a consumer has ended."""
        del self._entries[consumer]
        self.leases.lose(consumer, now)

    def is_current(self, consumer: str, entry: int) -> bool:
        """Return whether it is the last connection of the consumer."""
        return self._entries.get(consumer) == entry

    def begin(self, epoch: int, turn: str) -> int:
        """Return the epoch that a consumer takes part in, see BeginEpoch."""
        if turn in self.turns:
            return self.turns[turn]
        leases = self.leases
        if leases.done and (epoch < 0 or epoch > leases.epoch):
            leases.next_epoch()
        if epoch > leases.epoch and leases.left == leases.samples:  # nothing of it was leased yet
            leases.state = EpochState(epoch, samples=leases.samples)
        found = leases.epoch if epoch < 0 else epoch
        if epoch < 0 and not leases.left and not leases.done:
            found += 1  # of this one there is nothing to take
        if turn:
            self.turns[turn] = found
            for old in list(self.turns)[:-_TURNS]:
                del self.turns[old]
        return found

    @property
    def is_empty(self) -> bool:
        """Whether all consumers have left, or were lost for longer than the grace period."""
        return not self._entries and not self.leases.by_consumer

    def reach(self, epoch: int) -> bool:
        """Return whether positions of the epoch are leased now; begin it if the one before it is done."""
        if self.leases.epoch < epoch and self.leases.done:
            self.leases.next_epoch()
        return self.leases.epoch == epoch

    def rest(self) -> None:
        """Forget what can be computed again, if no consumer is there."""
        if self.leases.is_deserted:
            self._order = (-1, np.empty(0, np.int64))

    def indices(self, ranges: Ranges) -> Ints:
        """Return the samples at positions of the present epoch."""
        epoch = self.leases.epoch
        if self._order[0] != epoch:
            self._order = (epoch, epoch_order(self._shards, self._seed, epoch, self._window))
        return samples_at(self._order[1], ranges)


@dataclass(frozen=True, slots=True)
class KeptRun:
    """Keep of a run what outlives its service: its state, what each consumer had leased, the epochs of turns,
    and the fingerprint of its data set.
    """

    state: EpochState
    leases: dict[str, Ranges]
    turns: dict[str, int] = field(default_factory=dict)
    fingerprint: str = ""


def fingerprint(shards: Sequence[int]) -> str:
    """Return what tells a data set from what it was before, by the samples of its shards."""
    return hashlib.blake2b(repr(tuple(shards)).encode(), digest_size=8).hexdigest()


class KnownRuns(Protocol):
    """Kept runs, by key."""

    def get(self, key: str, /) -> KeptRun | None:
        """Return a run, None if it is not known. Raises LocalError."""


class Runs:
    """The runs of a service, by data set and name. A run whose consumers begin at another state is another
    run, so that no sample comes again that a saved state says is done. ``kept`` are those that no consumer is
    in, or of a service before this one, which ended before ``now``: their consumers count as lost since then.
    """

    def __init__(self, grace: float, kept: KnownRuns, now: float) -> None:
        self._grace, self._kept, self._now = grace, kept, now
        self._runs: dict[str, StreamRun] = {}

    def join(self, data: str, shards: Sequence[int], wish: messages.JoinRun) -> tuple[str, StreamRun, bool]:
        """Return the key of the run that a consumer joins, the run, and whether nothing was known of it.
        Raises LocalError for a state, or a run, of another data set.
        """
        samples = sum(shards)
        state = EpochState(wish.epoch, wish.cursor, wish.returned, wish.samples)
        state_of(state, samples)
        text = repr((data, wish.run, wish.seed, wish.window, state))
        key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        run = self._runs.get(key)
        before = None if run else self._kept.get(key)
        known = run or before
        if known and known.fingerprint != fingerprint(shards):
            text = f"the data set '{data}' has changed since the run '{wish.run}' began"
            raise LocalError(f"{text}: it has {samples} samples now; begin a run of another name")
        self._runs[key] = run or self._restored(before or KeptRun(state, {}), shards, wish)
        return key, self._runs[key], known is None

    def _restored(self, before: KeptRun, shards: Sequence[int], wish: messages.JoinRun) -> StreamRun:
        run = StreamRun(shards, wish.seed, wish.window, before.state, self._grace)
        for consumer, ranges in before.leases.items():
            run.leases.restore(consumer, ranges, self._now)
        run.turns |= before.turns
        return run

    def kept(self, key: str) -> KeptRun | None:
        """Return what of a run has to outlive the service; None if it is forgotten here."""
        if not (run := self._runs.get(key)):
            return None
        return KeptRun(run.leases.state, dict(run.leases.by_consumer), dict(run.turns), run.fingerprint)

    def expire(self, now: float) -> bool:
        """Take back what lost consumers hold for too long, and forget runs in which there is none: they can
        go on as they are kept. Returns whether anything was taken back.
        """
        found = [run.leases.expire(now) for run in self._runs.values()]  # of all: any() would stop at one
        self._runs = {key: run for key, run in self._runs.items() if not run.is_empty}
        return any(found)


class Service:
    """One connection of a consumer. The edge calls ``receive`` for each message; ``reading`` tells it what to
    read next, whose bytes go out as soon as ``credit`` has room for them, and ``news`` what else to send.
    """

    def __init__(self, runs: Runs, data: str, shards: Sequence[int], sample_bytes: int) -> None:
        self._runs, self._data, self._shards = runs, data, shards
        self._each = max(1.0, float(sample_bytes))
        self.credit = ByteCredit()
        self.window, self._chunk = 0, 1
        self._under_way = 0  # samples
        self._fetches: deque[tuple[int, Ints]] = deque()
        self.run: StreamRun | None = None
        self.key = ""
        self._consumer, self._entry, self._epoch, self._ended = "", 0, -1, -1
        self._drained = False

    def receive(self, message: Message) -> list[Message]:
        """Take in a message. Returns the answers. Raises ProtocolError, and LocalError for what cannot be."""
        if isinstance(message, messages.GrantCredit):
            if message.chunk < 1:
                raise ProtocolError(f"a chunk of {message.chunk} samples is none")
            self.credit.grant(message.size)
            self.window, self._chunk = message.window, message.chunk
            return []
        if isinstance(message, messages.FetchSamples):
            self._fetch(message.number, message.indices)
            return []
        if isinstance(message, messages.JoinRun):
            return [self._join(message)]
        return self._of_run(message)

    def _fetch(self, number: int, data: bytes) -> None:
        if number < 0 or len(data) % 8 or not 0 < len(data) // 8 <= messages.MOST_FETCHED:
            raise ProtocolError("a fetch has no number, or too many samples")
        indices: Ints = np.frombuffer(data, np.int64)
        samples = sum(self._shards)
        if indices.min() < 0 or indices.max() >= samples:
            raise ProtocolError(f"a sample is wanted that is not one of {samples}")
        waiting = sum(len(each) for _, each in self._fetches)
        if len(self._fetches) >= messages.MOST_FETCHES or waiting + len(indices) > messages.MOST_WAITING:
            raise ProtocolError(f"{len(self._fetches)} fetches of {waiting} samples wait already")
        self._fetches.append((number, indices))

    def _join(self, wish: messages.JoinRun) -> messages.RunJoined:
        self.key, self.run, fresh = self._runs.join(self._data, self._shards, wish)
        self._consumer, self._entry = wish.consumer, self.run.enter(wish.consumer)
        leases = self.run.leases
        same = wish.now == leases.epoch
        refused = leases.commit(wish.consumer, wish.done) if same else 0
        held = leases.join(wish.consumer, wish.still if same else ())
        return messages.RunJoined(leases.epoch, held, refused, fresh)

    def _of_run(self, message: Message) -> list[Message]:
        if self.run is None:
            raise ProtocolError(f"'{type(message).NAME}' before a run was joined")
        leases = self.run.leases
        if isinstance(message, messages.BeginEpoch):
            self._epoch, self._drained = self.run.begin(message.epoch, message.turn), False
            return [messages.EpochBegun(self._epoch)]
        if isinstance(message, messages.CommitPositions):
            if message.epoch == leases.epoch and self._speaks_for(message.consumer):
                name = message.consumer or self._consumer
                leases.commit(name, message.done)
                leases.give_back(name, message.back)
            return []
        if isinstance(message, messages.LeaveRun):
            if self._speaks_for(message.consumer):
                self.run.leave(message.consumer or self._consumer)
            return []
        if isinstance(message, messages.AskRunState):
            saved = leases.saved
            return [messages.RunState(saved.epoch, saved.cursor, saved.returned, saved.samples)]
        raise ProtocolError(f"'{type(message).NAME}' is not for a data service")

    def _speaks_for(self, consumer: str) -> bool:
        """Return whether this connection may speak for a consumer: if for itself, as its last connection."""
        return bool(consumer) or (self.run is not None and self.run.is_current(self._consumer, self._entry))

    def news(self) -> list[Message]:
        """Return what the consumer has to know by now, once: that its epoch is all leased, or at its end."""
        if self.run is None or self._epoch <= self._ended:
            return []
        leases = self.run.leases
        if (
            self._epoch > leases.epoch and leases.left
        ):  # it came back when no other consumer was left to take it
            self._epoch = leases.epoch
            return [messages.EpochBegun(self._epoch)]
        if self._epoch > leases.epoch:
            return []
        if self._epoch == leases.epoch and not leases.done:
            if leases.left or self._under_way or self._drained:
                return []
            self._drained = True
            return [messages.EpochDrained(self._epoch)]
        self._ended = self._epoch
        return [messages.EpochEnded(self._epoch)]

    def reading(self) -> ChunkReading | None:
        """Return what to read next; None while nothing is wanted, or credit is short."""
        room = self.credit.room - self._under_way * self._each
        affordable = min(int(room / self._each), int(LARGEST_CHUNK / self._each) + 1)
        if not self._under_way and self.credit.room >= self.window > 0:
            affordable = max(1, affordable)  # a large sample has all of the window
        if self._fetches:
            return self._next_fetched(affordable)
        if affordable < self._chunk and (self._under_way or self.credit.room < self.window):
            return None
        return self._next_leased(min(self._chunk, affordable))

    def _next_fetched(self, affordable: int) -> ChunkReading | None:
        number, indices = self._fetches[0]
        if affordable < 1:
            return None
        found, rest = indices[:affordable], indices[affordable:]
        self._fetches[0] = (number, rest)
        if not len(rest):
            self._fetches.popleft()
        return self._begun(ChunkReading(number, -1, (), found))

    def _next_leased(self, wanted: int) -> ChunkReading | None:
        if self.run is None or wanted < 1 or self._epoch < 0 or not self.run.reach(self._epoch):
            return None
        if not self.run.is_current(self._consumer, self._entry):
            return None
        ranges = self.run.leases.lease(self._consumer, wanted, max(1, self._chunk // _SMALLEST))
        if not ranges:
            return None
        self._drained = False
        return self._begun(ChunkReading(LEASED, self._epoch, ranges, self.run.indices(ranges)))

    def _begun(self, reading: ChunkReading) -> ChunkReading:
        self._under_way += len(reading.indices)
        return reading

    def sent(self, reading: ChunkReading, size: int) -> None:
        """Note that what was to be read has gone out, ``size`` bytes, for which there was room."""
        samples = len(reading.indices)
        self._under_way -= samples
        self.credit.spend(size)
        self._each = max(1.0, 0.5 * self._each + 0.5 * size / samples)

    def lost(self, now: float) -> None:
        """Note that the connection has ended."""
        if self.run and self.run.is_current(self._consumer, self._entry):
            self.run.lose(self._consumer, now)
            self.run.rest()


def halves(reading: ChunkReading) -> tuple[ChunkReading, ChunkReading]:
    """Divide what makes too large a chunk. Raises LocalError for a single sample."""
    middle = len(reading.indices) // 2
    if not middle:
        raise LocalError("a sample is larger than all that its consumer takes at once")
    first, rest = split(reading.ranges, middle)
    parts = (first, reading.indices[:middle]), (rest, reading.indices[middle:])
    one, other = (ChunkReading(reading.number, reading.epoch, ranges, indices) for ranges, indices in parts)
    return one, other
