# SPDX-License-Identifier: Apache-2.0
"""The leases of an epoch, beside what ``test_protocol`` shows: late commits, their sizes, states, orders."""

from __future__ import annotations

import numpy as np
import pytest

from millpond.base.errors import LocalError
from millpond.data.streaming.protocol.epoch_order import epoch_order
from millpond.data.streaming.protocol.leases import EpochLeases, EpochState
from millpond.train.balance.data_plan import order
from millpond.train.balance.ranges import count


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
