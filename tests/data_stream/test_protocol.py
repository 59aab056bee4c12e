# SPDX-License-Identifier: Apache-2.0
"""Service and consumers on a link that delays, cuts and drops: each sample counts once in every epoch.
The leases, states and orders of an epoch.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from millpond.base.errors import LocalError, ProtocolError, RemoteError
from millpond.data.streaming.protocol import messages
from millpond.data.streaming.protocol.consumer import RunWish, StreamConsumer
from millpond.data.streaming.protocol.epoch_order import epoch_order
from millpond.data.streaming.protocol.leases import EpochLeases, EpochState
from millpond.data.streaming.protocol.messages import LEASED, DataChunk
from millpond.data.streaming.protocol.service import ChunkReading, KeptRun, Runs, Service, halves
from millpond.train.balance.data_plan import order
from millpond.train.balance.ranges import Ranges, count
from millpond.wire.messages import Message

SHARDS, WINDOW, GRACE = (30, 31), 400, 5.0
SAMPLES = sum(SHARDS)
ACTIONS = ("deliver", "step", "step", "cut", "kill", "join", "restart", "retune", "wait")
actions = some.lists(some.tuples(some.sampled_from(ACTIONS), some.integers(0, 7)), max_size=120)


def positions(ranges: Ranges) -> list[int]:
    return [each for start, stop in ranges for each in range(start, stop)]


def size_of(indices: np.ndarray) -> int:
    return int((17 + indices * 7 % 40).sum())


@dataclass
class Link:
    """A consumer and the service's end of its connection; messages on the way in both directions."""

    consumer: StreamConsumer[list[int]]
    service: Service
    up: deque[Message] = field(default_factory=deque)
    down: deque[tuple[Message, list[int], int]] = field(default_factory=deque)
    read: deque[ChunkReading] = field(default_factory=deque)

    def pump(self) -> None:
        """Send what either side has to say, and read as an edge does: two chunks at a time."""
        self.up += self.consumer.outgoing
        self.consumer.outgoing.clear()
        while len(self.read) < 2 and (found := self.service.reading()):
            self.read.append(found)
        while self.read:
            reading, size = self.read[0], size_of(self.read[0].indices)
            if size > self.service.window:
                self.read.popleft()
                self.read.extendleft(reversed(halves(reading)))
                continue
            if size > self.service.credit.room:
                break
            self.read.popleft()
            self.service.sent(reading, size)
            chunk = DataChunk(reading.number, reading.epoch, reading.ranges, b"")
            self.down.append((chunk, reading.indices.tolist(), size))
        self.down += [(message, [], 0) for message in self.service.news()]

    def deliver(self, number: int) -> None:
        """Bring ``number`` messages in each direction."""
        for _ in range(number):
            if self.up:
                self.down += [(answer, [], 0) for answer in self.service.receive(self.up.popleft())]
            if self.down:
                self.consumer.receive(*self.down.popleft())
            self.pump()


class World:
    """A service, its consumers, and what has counted by epoch."""

    def __init__(self, window: int = 0) -> None:
        self.now, self.shuffle = 0.0, window
        self.kept: dict[str, KeptRun] = {}
        self.runs = Runs(GRACE, self.kept, self.now)
        self.links: list[Link] = []
        self.names = iter(range(1000))
        self.taken: dict[int, Counter[int]] = {}
        self.join()

    def join(self) -> None:
        wish = RunWish("run", f"consumer {next(self.names)}", 3, self.shuffle)
        consumer: StreamConsumer[list[int]] = StreamConsumer(wish, WINDOW, 4)
        self.connect(consumer)
        self.links[-1].consumer.begin()

    def connect(self, consumer: StreamConsumer[list[int]]) -> None:
        self.links.append(Link(consumer, Service(self.runs, "data", SHARDS, 20)))
        consumer.connected()
        self.links[-1].pump()

    def cut(self, link: Link) -> None:
        self.links.remove(link)
        link.service.lost(self.now)

    def step(self, link: Link, wanted: int) -> None:
        """Finish a step and begin the next, or the next epoch; all that counts is what is finished."""
        consumer = link.consumer
        before = len(consumer.outgoing)
        consumer.finish_step()
        for message in consumer.outgoing[before:]:
            assert isinstance(message, messages.CommitPositions)
            self.taken.setdefault(consumer.epoch, Counter()).update(positions(message.done))
        consumer.take(wanted)
        if consumer.ended and consumer.begun:
            assert not consumer.still
            consumer.begin(consumer.epoch + 1)
        link.pump()

    def act(self, action: str, number: int) -> None:
        self.now += 0.1
        self.act_on_all(action)
        if self.links:
            self.act_on_one(action, number, self.links[number % len(self.links)])

    def act_on_all(self, action: str) -> None:
        if action == "join" and len(self.links) < 4:
            self.join()
        if action == "restart":
            self.keep()
            self.runs = Runs(GRACE, self.kept, self.now)
            for link in list(self.links):
                self.links.remove(link)
                self.connect(link.consumer)
        if action == "wait":  # those that live have come back by then
            for link in self.links:
                link.deliver(60)
            self.now += GRACE
            self.expire()

    def keep(self) -> None:
        self.kept |= {key: kept for key in self.runs._runs if (kept := self.runs.kept(key))}

    def expire(self) -> None:
        """Keep, as an edge does before anything is sent, and forget what can be."""
        self.keep()
        self.runs.expire(self.now)

    def act_on_one(self, action: str, number: int, link: Link) -> None:
        if action == "deliver":
            link.deliver(number)
        elif action == "step":
            self.step(link, number)
        elif action == "cut":
            self.cut(link)
            self.connect(link.consumer)
        elif action == "kill":
            link.deliver(50)  # what its kernel has to send is sent; of the rest nobody knows
            self.cut(link)
        elif action == "retune":
            link.consumer.retune(1 + number, WINDOW // (1 + number % 3))
            link.pump()

    def finish(self, epochs: int) -> None:
        """Let those that are left go on until the epochs are done."""
        if not self.links:
            self.join()
        for _ in range(5000):
            if min(link.consumer.epoch for link in self.links) >= epochs:
                return
            self.now += 1.0
            self.expire()
            for link in self.links:
                link.deliver(5)
                self.step(link, 5)
        raise AssertionError("the epochs do not end")


@settings(max_examples=300)
@given(actions, some.sampled_from([0, 6]))
def test_each_sample_counts_once_in_every_epoch(found: list[tuple[str, int]], window: int) -> None:
    world = World(window)
    for action, number in found:
        world.act(action, number)
    reached = 1 + max([0, *(link.consumer.epoch for link in world.links)])
    world.finish(reached)
    for epoch in range(reached):
        assert world.taken[epoch] == Counter(range(SAMPLES))


def test_a_consumer_gets_the_order_of_the_epoch() -> None:
    world = World()
    link, found = world.links[0], []
    while not link.consumer.ended:
        link.deliver(3)
        link.consumer.finish_step()
        for piece in link.consumer.take(5):
            found += piece.samples[piece.start : piece.stop]
        link.pump()
    run = link.service.run
    assert run and found == run.indices(((0, SAMPLES),)).tolist()


def test_two_consumers_of_one_turn_get_the_same_epoch() -> None:
    world = World()
    run, fresh = world.runs.join("data", SHARDS, messages.JoinRun("run", "x", 3))[1:]
    assert not fresh or run.begin(-1, "pass 1") == 0
    assert run.begin(-1, "pass 1") == 0
    run.leases.join("x")
    run.leases.commit("x", run.leases.lease("x", SAMPLES, SAMPLES))
    assert run.begin(-1, "pass 1") == 0 and run.begin(-1, "pass 2") == 1


def test_a_run_that_all_have_left_is_forgotten_and_goes_on_as_it_is_kept() -> None:
    kept: dict[str, KeptRun] = {}
    runs = Runs(GRACE, kept, 0.0)
    one, lost = joined(runs, "one"), joined(runs, "lost")
    had = leased(one)
    one.receive(messages.CommitPositions(0, had[:1]))
    one.receive(messages.LeaveRun())
    lost.lost(1.0)
    key, now = one.key, 1.0 + GRACE
    runs.expire(now - 0.1)
    found = runs.kept(key)
    assert found, "the other consumer may come back"
    kept[key] = found
    runs.expire(now)
    assert runs.kept(key) is None and not runs._runs
    later = joined(runs, "later")
    assert sum(stop - start for start, stop in leased(later)) == SAMPLES - had[0][1]


def service() -> Service:
    return Service(Runs(GRACE, {}, 0.0), "data", SHARDS, 20)


def test_fetched_samples_come_in_parts_that_fit() -> None:
    one = service()
    one.receive(messages.GrantCredit(100, 100, 10))
    wanted = np.array([3, 1, 2, 60, 5, 6, 7], np.int64)
    one.receive(messages.FetchSamples(7, wanted.tobytes()))
    found: list[int] = []
    while reading := one.reading():
        assert reading.number == 7 and len(reading.indices) <= 5
        found += reading.indices.tolist()
        one.sent(reading, 20 * len(reading.indices))
        one.receive(messages.GrantCredit(20 * len(reading.indices), 100, 10))
    assert found == wanted.tolist()


@pytest.mark.parametrize("size", [1, messages.MOST_FETCHED])
def test_fetches_that_wait_are_bounded(size: int) -> None:
    """A consumer that grants no credit would fill the memory of the service."""
    one, wanted = service(), np.zeros(size, np.int64).tobytes()
    most = min(messages.MOST_FETCHES, messages.MOST_WAITING // size)
    for number in range(most):
        one.receive(messages.FetchSamples(number, wanted))
    with pytest.raises(ProtocolError, match=f"{most} fetches of {most * size} samples wait already"):
        one.receive(messages.FetchSamples(most, wanted))


def test_nothing_is_read_without_credit() -> None:
    one = service()
    one.receive(messages.JoinRun("run", "x", 0))
    one.receive(messages.BeginEpoch())
    assert one.reading() is None
    one.receive(messages.GrantCredit(70, 70, 3))
    first = one.reading()
    assert first and first.number == LEASED and len(first.indices) == 3
    assert one.reading() is None
    one.sent(first, 60)
    assert one.reading() is None
    with pytest.raises(ProtocolError, match="were granted"):
        one.sent(first, 60)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (messages.GrantCredit(-1, 9, 1), "negative"),
        (messages.GrantCredit(1, 1, 0), "a chunk of 0 samples"),
        (messages.FetchSamples(1, np.array([61]).tobytes()), "not one of 61"),
        (messages.FetchSamples(1, np.array([-1]).tobytes()), "not one of 61"),
        (messages.FetchSamples(1, b""), "a fetch has no number"),
        (messages.FetchSamples(1, b"1234567"), "a fetch has no number"),
        (messages.FetchSamples(-1, np.array([1]).tobytes()), "a fetch has no number"),
        (messages.BeginEpoch(), "before a run was joined"),
    ],
)
def test_bad_messages_are_refused(message: Message, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        service().receive(message)


def test_a_single_sample_must_fit() -> None:
    with pytest.raises(LocalError, match="larger than all that its consumer takes"):
        halves(ChunkReading(0, 0, ((0, 1),), np.array([1])))


def test_a_service_that_has_lost_its_state_is_no_silent_new_beginning() -> None:
    consumer: StreamConsumer[list[int]] = StreamConsumer(RunWish("run", "x"), WINDOW)
    consumer.receive(messages.RunJoined(0, (), 0, True))
    with pytest.raises(RemoteError, match="without the state of its runs"):
        consumer.receive(messages.RunJoined(0, (), 0, True))


def test_a_consumer_that_was_away_for_too_long_is_told_what_others_train_on_again() -> None:
    runs = Runs(GRACE, {}, 0.0)
    consumer: StreamConsumer[list[int]] = StreamConsumer(RunWish("run", "one", 3), 10**6, SAMPLES)
    first = Link(consumer, Service(runs, "data", SHARDS, 20))
    consumer.connected()
    consumer.begin()
    first.pump()
    first.deliver(20)
    consumer.take(5)
    consumer.finish_step()  # which the service does not hear
    first.service.lost(0.0)
    runs.expire(GRACE)
    other = joined(runs, "other")
    assert sum(stop - start for start, stop in leased(other)) == SAMPLES
    again = Link(consumer, Service(runs, "data", SHARDS, 20))
    consumer.connected()
    again.pump()
    with pytest.raises(RemoteError, match="5 samples that were done here came to other consumers again"):
        again.deliver(20)


def joined(runs: Runs, name: str, turn: str = "") -> Service:
    """A connection of a consumer that takes part in the epoch under way."""
    found = Service(runs, "data", SHARDS, 20)
    found.receive(messages.JoinRun("run", name, 3))
    found.receive(messages.GrantCredit(10**6, 10**6, SAMPLES))
    found.receive(messages.BeginEpoch(-1, turn or name))
    return found


def leased(service: Service) -> Ranges:
    """Read and send all that the service would."""
    found: list[tuple[int, int]] = []
    while reading := service.reading():
        service.sent(reading, 1)
        found += reading.ranges
    return tuple(found)


def test_a_consumer_hears_when_all_is_leased_and_when_all_is_done() -> None:
    runs = Runs(GRACE, {}, 0.0)
    one, other = joined(runs, "one"), joined(runs, "other")
    had = leased(one)
    assert sum(stop - start for start, stop in had) == SAMPLES
    for each in (one, other):
        assert each.news() == [messages.EpochDrained(0)] and each.news() == []
    one.receive(messages.CommitPositions(0, (), ((0, 5),)))
    assert leased(other) == ((0, 5),)
    assert other.news() == [messages.EpochDrained(0)]
    other.receive(messages.CommitPositions(0, had))  # not its own: those of the one count no less
    one.receive(messages.CommitPositions(0, had))
    other.receive(messages.CommitPositions(0, ((0, 5),)))
    assert one.news() == other.news() == [messages.EpochEnded(0)]


def test_a_new_iteration_takes_the_next_epoch_where_nothing_is_left_and_what_comes_back() -> None:
    runs = Runs(GRACE, {}, 0.0)
    one = joined(runs, "one")
    leased(one)
    late = joined(runs, "late")
    assert late.reading() is None and late.news() == []  # it waits for epoch 1
    one.lost(0.0)
    runs.expire(GRACE)
    assert late.news() == [messages.EpochBegun(0)]
    assert sum(stop - start for start, stop in leased(late)) == SAMPLES


def test_what_was_said_for_others_is_said_again_on_a_new_connection() -> None:
    consumer: StreamConsumer[list[int]] = StreamConsumer(RunWish("run", "trainer"), 0)
    consumer.connected()
    consumer.receive(messages.RunJoined(0, (), 0, True))
    consumer.finish("reader", 0, ((0, 5),))
    consumer.ask_state()
    consumer.leave("reader")
    consumer.connected()
    consumer.receive(messages.RunJoined(0, (), 0, False))
    said = [message for message in consumer.outgoing if not isinstance(message, messages.GrantCredit)]
    finished = messages.CommitPositions(0, ((0, 5),), (), "reader")
    assert said[1:] == [finished, messages.LeaveRun("reader"), messages.AskRunState()]
    consumer.receive(messages.RunState(0, 5, ()))
    consumer.connected()
    consumer.receive(messages.RunJoined(0, (), 0, False))
    assert finished not in consumer.outgoing and messages.LeaveRun("reader") in consumer.outgoing


@pytest.mark.parametrize("named", ["", "one"])
def test_a_consumer_that_has_left_takes_nothing_again(named: str) -> None:
    runs = Runs(GRACE, {}, 0.0)
    one, other = joined(runs, "one"), joined(runs, "other")
    assert leased(one)
    (other if named else one).receive(messages.LeaveRun(named))
    assert not leased(one)
    assert sum(stop - start for start, stop in leased(other)) == SAMPLES


def test_a_consumer_that_another_says_has_ended_gives_back_at_once() -> None:
    runs = Runs(GRACE, {}, 0.0)
    one, trainer = joined(runs, "one"), joined(runs, "trainer")
    assert leased(one)
    trainer.receive(messages.CommitPositions(0, ((0, 3),), (), "one"))
    trainer.receive(messages.LeaveRun("one"))
    assert sum(stop - start for start, stop in leased(trainer)) == SAMPLES - 3


def test_what_was_taken_back_counts_if_nobody_has_got_it() -> None:
    leases = EpochLeases(10, grace=1.0)
    leases.join("slow")
    found = leases.lease("slow", 4)
    leases.lose("slow", 0.0)
    leases.expire(1.0)
    assert leases.commit("slow", found) == 0
    assert leases.left == 10 - count(found)


def test_leases_become_small_at_the_end() -> None:
    leases = EpochLeases(1000)
    for name in ("a", "b", "c"):
        leases.join(name)
    sizes = []
    while found := leases.lease("a", 100, least=4):
        sizes.append(count(found))
    assert sizes[0] == 100 and sizes == sorted(sizes, reverse=True) and sizes[-2] == 4


def test_an_epoch_begins_when_the_last_is_done() -> None:
    leases = EpochLeases(4)
    leases.join("a")
    found = leases.lease("a", 4, least=4)
    with pytest.raises(LocalError, match="epoch 0 is not done"):
        leases.next_epoch()
    leases.commit("a", found)
    leases.next_epoch()
    assert (leases.epoch, leases.left) == (1, 4)


@pytest.mark.parametrize(
    "state",
    [
        EpochState(cursor=11),
        EpochState(epoch=-1),
        EpochState(cursor=5, returned=((0, 6),)),
        EpochState(cursor=5, returned=((2, 3), (1, 2))),
        EpochState(cursor=5, returned=((0, 3), (2, 4))),
        EpochState(cursor=5, returned=((-1, 3),)),
    ],
)
def test_a_state_that_does_not_fit_is_refused(state: EpochState) -> None:
    with pytest.raises(LocalError, match="not one of 10 samples"):
        EpochLeases(10, state)


def test_an_order_is_a_permutation_that_follows_from_seed_and_epoch() -> None:
    shards, window = [40, 25, 35], 10
    for window in (0, 10):
        orders = [epoch_order(shards, seed, epoch, window).tolist() for seed in (0, 1) for epoch in (0, 1)]
        assert all(sorted(each) == list(range(100)) for each in orders)
        assert len({tuple(each) for each in orders}) == 4
        assert epoch_order(shards, 1, 1, window).tolist() == orders[-1]
    assert epoch_order(shards, 3, 4).tolist() == order(100, 3, 4, "0", False).tolist()


def test_a_window_keeps_samples_near_their_place() -> None:
    shards, window = [100] * 10, 30
    found = epoch_order(shards, 0, 0, window)
    firsts = [int(np.flatnonzero(found // 100 == shard).min()) for shard in range(10)]
    assert all(np.ptp(np.flatnonzero(found // 100 == shard)) <= 100 + 2 * window for shard in range(10))
    assert sorted(firsts) != firsts
    with pytest.raises(LocalError, match="negative"):
        epoch_order(shards, 0, 0, -1)
