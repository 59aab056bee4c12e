# SPDX-License-Identifier: Apache-2.0
"""The ledger: each position is committed exactly once, whoever joins, dies, or changes the size of leases."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from millpond.base.errors import LocalError
from millpond.data.streaming.protocol.epoch_order import epoch_order
from millpond.data.streaming.protocol.ledger import EpochLedger, LedgerState, merged, without
from millpond.train.balance.data_plan import order
from millpond.train.balance.ranges import Ranges, count

SAMPLES = 97
NAMES = ("a", "b", "c")
ACTIONS = ("lease", "commit", "commit part", "leave", "lose", "join", "give back", "restart")

actions = some.lists(
    some.tuples(some.sampled_from(ACTIONS), some.sampled_from(NAMES), some.integers(1, 40)), max_size=80
)


def positions(ranges: Ranges) -> list[int]:
    return [each for start, stop in ranges for each in range(start, stop)]


class Play:
    """A ledger with consumers that do what they are told, and what each has committed."""

    def __init__(self) -> None:
        self.ledger = EpochLedger(SAMPLES, grace=5.0)
        self.holds: dict[str, Ranges] = {}
        self.committed: Counter[int] = Counter()
        self.now = 0.0

    def act(self, action: str, name: str, size: int) -> None:
        self.now += size / 10
        gone = self.ledger.expire(self.now)
        self.holds = {each: without(held, gone) for each, held in self.holds.items()}
        if action == "restart":  # another server, other consumers: what is saved is enough
            self.ledger, self.holds = EpochLedger(SAMPLES, self.ledger.saved, grace=5.0), {}
        elif action == "join":
            self.holds[name] = self.ledger.join(name)
        elif action == "leave" or (action == "lose" and size % 2):
            self.ledger.leave(name)
            self.holds.pop(name, None)
        elif action == "lose":
            self.ledger.lose(name, self.now)
        elif name in self.ledger.leases:
            self.work(action, name, size)

    def work(self, action: str, name: str, size: int) -> None:
        if action == "lease":
            self.holds[name] = merged((*self.holds[name], *self.ledger.lease(name, size)))
            return
        held = self.holds[name]
        part = held if action == "commit" else tuple((at, at + 1) for at in positions(held)[:size])
        if action == "give back":
            self.ledger.give_back(name, part)
        else:
            assert self.ledger.commit(name, part) == 0
            self.committed.update(positions(part))
        self.holds[name] = without(held, part)

    def finish(self) -> None:
        for name in self.ledger.leases:
            self.ledger.leave(name)
        self.ledger.join("last")
        while found := self.ledger.lease("last", 10):
            assert self.ledger.commit("last", found) == 0
            self.committed.update(positions(found))
        assert self.ledger.done


@given(actions)
def test_each_position_is_committed_exactly_once(found: list[tuple[str, str, int]]) -> None:
    play = Play()
    for each in found:
        play.act(*each)
        held = [position for ranges in play.ledger.leases.values() for position in positions(ranges)]
        assert len(held) == len(set(held)) and not set(held) & set(play.committed)
    play.finish()
    assert play.committed == Counter(range(SAMPLES))


def test_what_was_taken_back_no_longer_counts() -> None:
    ledger = EpochLedger(10, grace=1.0)
    ledger.join("slow")
    found = ledger.lease("slow", 4)
    ledger.lose("slow", 0.0)
    assert ledger.expire(0.5) == () and ledger.expire(1.0) == found
    ledger.join("other")
    assert ledger.lease("other", 4) == found
    assert ledger.commit("slow", found) == count(found)
    assert ledger.commit("other", found) == 0


def test_what_was_taken_back_counts_if_nobody_has_got_it() -> None:
    ledger = EpochLedger(10, grace=1.0)
    ledger.join("slow")
    found = ledger.lease("slow", 4)
    ledger.lose("slow", 0.0)
    ledger.expire(1.0)
    assert ledger.commit("slow", found) == 0
    assert ledger.left == 10 - count(found)


def test_a_consumer_that_comes_back_keeps_what_it_still_has() -> None:
    ledger = EpochLedger(10)
    ledger.join("a")
    assert ledger.lease("a", 5, least=5) == ((0, 5),)
    ledger.lose("a", 0.0)
    assert ledger.join("a", ((3, 5), (8, 9))) == ((3, 5),)
    assert ledger.lease("a", 3, least=3) == ((0, 3),)


def test_leases_become_small_at_the_end() -> None:
    ledger = EpochLedger(1000)
    for name in NAMES:
        ledger.join(name)
    sizes = []
    while found := ledger.lease("a", 100, least=4):
        sizes.append(count(found))
    assert sizes[0] == 100 and sizes == sorted(sizes, reverse=True) and sizes[-2] == 4


def test_an_epoch_begins_when_the_last_is_done() -> None:
    ledger = EpochLedger(4)
    ledger.join("a")
    found = ledger.lease("a", 4, least=4)
    with pytest.raises(LocalError, match="epoch 0 is not done"):
        ledger.next_epoch()
    ledger.commit("a", found)
    ledger.next_epoch()
    assert (ledger.epoch, ledger.left) == (1, 4)


@pytest.mark.parametrize(
    "state",
    [
        LedgerState(cursor=11),
        LedgerState(epoch=-1),
        LedgerState(cursor=5, returned=((0, 6),)),
        LedgerState(cursor=5, returned=((2, 3), (1, 2))),
        LedgerState(cursor=5, returned=((0, 3), (2, 4))),
        LedgerState(cursor=5, returned=((-1, 3),)),
    ],
)
def test_a_state_that_does_not_fit_is_refused(state: LedgerState) -> None:
    with pytest.raises(LocalError, match="not one of 10 samples"):
        EpochLedger(10, state)


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
