# SPDX-License-Identifier: Apache-2.0
"""Every sample exactly once per epoch, through any batches, losses and resumptions, and none alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as some

from millpond.base.schema import dump, load
from millpond.train.balance.data_plan import (
    DataPlan,
    Pool,
    PoolShare,
    Position,
    Share,
    held_count,
    held_out,
    order,
)
from millpond.train.balance.ranges import Ranges, count, split

WORKERS = 4
RANKS = some.sets(some.integers(0, WORKERS - 1), max_size=WORKERS).map(lambda ranks: tuple(sorted(ranks)))
POOLS = some.lists(some.builds(Pool, some.integers(0, 60), RANKS), max_size=8)
BATCHES = some.lists(some.one_of(some.just(0), some.integers(2, 12)), min_size=WORKERS, max_size=WORKERS)


def fleet(private: Sequence[int], public: Sequence[int], host: int = 0) -> list[Pool]:
    """The host is rank 0 and reads its own and all public pools, device i is rank i + 1."""
    devices = range(1, len(private) + 1)
    own = [Pool(count, (rank,)) for rank, count in zip(devices, private, strict=True)]
    shared = [Pool(count, (rank, 0)) for rank, count in zip(devices, public, strict=True)]
    return [Pool(host, (0,)), *own, *shared]


class Epoch:
    """A plan, where it stands, and what went into steps so far."""

    def __init__(self, pools: Sequence[Pool], workers: int) -> None:
        self.pools, self.plan = pools, DataPlan(pools, workers)
        self.position = self.plan.begin()
        self.taken: list[Counter[int]] = [Counter() for _ in pools]

    def step(self, batches: Sequence[int], losses: int = 0) -> list[Share]:
        before = self.plan.left(self.position)
        self.position, shares = self.plan.deal(self.position, batches)
        for rank, share in enumerate(shares):
            self.check(rank, share, batches[rank], before)
        for rank, share in enumerate(shares):
            if losses >> rank & 1:
                self.position = self.plan.give_back(self.position, share)
            else:
                for part in share.parts:
                    self.taken[part.pool].update(
                        at for start, stop in part.ranges for at in range(start, stop)
                    )
        return shares

    def check(self, rank: int, share: Share, batch: int, before: Sequence[int]) -> None:
        groups = [self.pools[part.pool].group for part in share.parts]
        assert share.size <= batch + (batch > 0) + sum(2 * group for group in groups if group > 1)
        assert all(count(part.ranges) and rank in self.pools[part.pool].readers for part in share.parts)
        assert len({part.pool for part in share.parts}) == len(share.parts)
        if share.size == 1:  # only of a pool that had no more
            assert before[share.parts[0].pool] == 1

    def resume(self) -> None:
        self.position = load(Position, json.loads(json.dumps(dump(self.position))), "checkpoint")

    def finish(self, batches: Sequence[int]) -> list[list[Share]]:
        """The steps until nobody has anything to take."""
        steps = [self.step(batches)]
        while any(share.size for share in steps[-1]):
            steps.append(self.step(batches))
            assert len(steps) < 1000
        return steps[:-1]

    def all_taken(self) -> bool:
        return self.taken == [Counter(range(pool.count)) for pool in self.pools]


@given(POOLS, some.lists(some.tuples(BATCHES, some.integers(0, 15)), max_size=30))
def test_every_sample_counts_once_whatever_happens(
    pools: list[Pool], steps: list[tuple[list[int], int]]
) -> None:
    epoch = Epoch(pools, WORKERS)
    for batches, losses in steps:
        epoch.step(batches, losses)
        epoch.resume()
        left = epoch.plan.left(epoch.position)
        counts = [count + sum(taken.values()) for count, taken in zip(left, epoch.taken, strict=True)]
        assert counts == [pool.count for pool in pools]
    epoch.finish(WORKERS * [5])
    unread = [pool for pool in pools if not pool.readers]
    assert sum(epoch.plan.left(epoch.position)) == sum(pool.count for pool in unread)
    assert unread or epoch.all_taken()


@given(POOLS, BATCHES)
def test_a_batch_is_full_as_long_as_there_are_samples_for_it(pools: list[Pool], batches: list[int]) -> None:
    epoch = Epoch(pools, WORKERS)
    shares = epoch.step(batches)
    left = epoch.plan.left(epoch.position)
    for rank, share in enumerate(shares):
        readable = sum(count for count, pool in zip(left, pools, strict=True) if rank in pool.readers)
        assert not readable or share.size > batches[rank] - WORKERS  # each of the others may need one


@given(some.integers(2, 400), some.lists(some.integers(2, 40), min_size=1, max_size=5))
def test_no_share_is_a_single_sample(count: int, batches: list[int]) -> None:
    together = Epoch([Pool(count, tuple(range(len(batches))))], len(batches))
    alone = Epoch([Pool(count, (rank,)) for rank in range(len(batches))], len(batches))
    for epoch in (together, alone):
        sizes = {share.size for shares in epoch.finish(batches) for share in shares}
        assert 1 not in sizes and epoch.all_taken()


def test_private_samples_are_spread_over_the_epoch() -> None:
    epoch = Epoch([Pool(100, (0,)), Pool(400, (0, 1))], 2)
    steps = epoch.finish([10, 10])
    assert len(steps) == 25
    assert all([count(part.ranges) for part in shares[0].parts] == [4, 6] for shares in steps)


@given(
    some.lists(some.integers(0, 300), min_size=3, max_size=3),
    some.lists(some.integers(0, 300), min_size=3, max_size=3),
    some.integers(0, 300),
    some.lists(some.integers(2, 20), min_size=4, max_size=4),
)
def test_an_epoch_takes_the_fewest_steps(
    private: list[int], public: list[int], host: int, batches: list[int]
) -> None:
    steps = len(Epoch(fleet(private, public, host), 4).finish(batches))
    devices = list(zip(private, public, batches[1:], strict=True))

    def possible(count: int) -> bool:
        rest = sum(max(0, own + shared - count * batch) for own, shared, batch in devices)
        return all(own <= count * batch for own, _, batch in devices) and rest + host <= count * batches[0]

    fewest = next(count for count in range(1000) if possible(count))
    assert fewest - 2 <= steps <= fewest + 2


def test_the_host_takes_what_devices_cannot_finish() -> None:
    pools = fleet([50, 50, 50], [20, 20, 500])
    present = Epoch(pools, 4).step([40, 10, 10, 10])[0]
    assert {part.pool for part in present.parts} == {6}
    absent = Epoch(pools, 4).step([40, 10, 0, 10])[0]
    assert {part.pool for part in absent.parts} == {5, 6}


def test_what_nobody_there_can_read_is_left() -> None:
    epoch = Epoch(fleet([30, 30], [20, 20]), 3)
    epoch.finish([10, 10, 0])
    assert epoch.plan.left(epoch.position) == (0, 0, 30, 0, 0)
    epoch.finish([10, 0, 10])
    assert epoch.all_taken()


def test_what_is_given_back_is_for_all_who_can_read_it() -> None:
    epoch = Epoch(fleet([20], [20]), 2)
    lost = epoch.step([0, 40], losses=2)[1]
    assert lost.size == 40
    assert epoch.step([20, 0])[0] == Share((PoolShare(2, lost.parts[1].ranges),))
    assert epoch.step([20, 20]) == [Share(), Share((PoolShare(1, lost.parts[0].ranges),))]


def test_an_order_follows_from_all_of_its_arguments() -> None:
    keys = [(1, 0, "csd0", False), (2, 0, "csd0", False), (1, 1, "csd0", False), (1, 0, "csd1", False)]
    keys.append((1, 0, "csd0", True))
    orders = [order(50, *key).tolist() for key in keys]
    assert all(sorted(found) == list(range(50)) for found in orders)
    assert len(set(map(tuple, orders))) == 5 and orders[0] == order(50, *keys[0]).tolist()
    assert order(10, 1, 2, "csd0", False).tolist() == [5, 8, 9, 7, 6, 2, 1, 0, 4, 3]  # on every processor


@given(some.lists(some.tuples(some.integers(0, 99), some.integers(1, 9)), max_size=6), some.integers(0, 60))
def test_ranges_are_split_at_any_position(pairs: list[tuple[int, int]], wanted: int) -> None:
    ranges = tuple((start, start + length) for start, length in pairs)
    first, rest = split(ranges, wanted)
    assert count(first) == min(wanted, count(ranges)) and count(first) + count(rest) == count(ranges)
    positions = [at for start, stop in (*first, *rest) for at in range(start, stop)]
    assert positions == [at for start, stop in ranges for at in range(start, stop)]


def whole_groups(ranges: Ranges, samples: int, group: int) -> bool:
    """Whether ranges are of whole groups, of which the last has the rest."""
    ends = {*range(0, max(1, samples // group) * group, group), samples}
    return all(start in ends - {samples} and stop in ends for start, stop in ranges)


@given(
    some.lists(some.tuples(some.integers(0, 60), some.integers(0, 40)), min_size=1, max_size=3),
    some.integers(2, 12),
    some.lists(some.tuples(BATCHES, some.integers(0, 15))),
)
def test_shares_of_groups_are_whole(
    counts: list[tuple[int, int]], group: int, steps: list[tuple[list[int], int]]
) -> None:
    """Devices have samples in groups and public ones, which rank 0 reads too. Batches are as spread."""
    private = [Pool(count, (rank,), group) for rank, (count, _) in enumerate(counts, 1)]
    public = [Pool(count, (rank, 0)) for rank, (_, count) in enumerate(counts, 1) if count]
    epoch = Epoch([*private, *public], 4)
    for batches, losses in [*steps, *(([9, 9, 9, 9], 0) for _ in range(60))]:
        spread = epoch.plan.spread(epoch.position, batches, 25)
        for share in epoch.step(spread, losses):
            for part in share.parts:
                pool = epoch.pools[part.pool]
                assert pool.group == 1 or whole_groups(part.ranges, pool.count, group)
        epoch.resume()
    assert epoch.all_taken()


def test_public_samples_fill_a_batch_of_groups() -> None:
    epoch = Epoch([Pool(100, (0,), 8), Pool(400, (0, 1))], 2)
    sizes = [shares[0].size for shares in epoch.finish([10, 10])]
    assert len(sizes) <= 26 and set(sizes[:-1]) <= {10, 11, 12}


def test_batches_of_groups_alone_sum_to_what_is_wanted() -> None:
    plan = DataPlan([Pool(800, (rank,), 8) for rank in range(5)], 5)
    batches = plan.spread(plan.begin(), 5 * [40], 100)
    assert sum(batches) in range(96, 105) and {batch % 8 for batch in batches} == {0}
    assert plan.spread(plan.begin(), 5 * [20], 100) == 5 * [16]  # no more than they can
    assert plan.spread(plan.begin(), 5 * [5], 100) == 5 * [8]  # but a group


def test_groups_are_the_same_in_all_epochs_and_jobs() -> None:
    found = {
        frozenset(order(50, seed, epoch, "csd0", False, 8)[start : start + 8 if start < 40 else 50].tolist())
        for seed in range(3)
        for epoch in range(3)
        for start in range(0, 41, 8)
    }
    assert len(found) == 6 and sorted(map(len, found)) == [8, 8, 8, 8, 8, 10]
    orders = {tuple(order(50, 0, epoch, "csd0", False, 8).tolist()) for epoch in range(5)}
    assert len(orders) == 5 and len({order[40:] for order in orders}) == 1
    assert sorted(order(48, 0, 0, "csd0", False, 8).tolist()) == list(range(48))
    found_here = order(20, 1, 2, "csd0", False, 8).tolist()
    assert found_here[:8] == [15, 9, 1, 7, 18, 14, 4, 10]  # on every processor


def groups_of(found: Sequence[int], group: int) -> set[frozenset[int]]:
    """Return the groups of an order; the last one has the rest, too."""
    last = (len(found) // group - 1) * group
    return {frozenset(found[start : start + group]) for start in range(0, last, group)} | {
        frozenset(found[last:])
    }


@given(
    some.integers(1, 60),
    some.integers(1, 9),
    some.floats(0.01, 0.99),
    some.tuples(some.integers(0, 5), some.integers(0, 5)),
)
def test_samples_that_are_held_out_are_the_same_whole_groups_always_and_are_never_dealt(
    samples: int, group: int, share: float, job: tuple[int, int]
) -> None:
    """So the difference of two scores, or of a score and an update, tells of groups as well."""
    held = held_count(samples, share, group)
    assert held_count(samples, 0.0, group) == 0 and held % group == 0
    assert held_out(50, "csd0", 25).tolist() != held_out(50, "csd1", 25).tolist()
    if samples < 2 * group:
        assert held == 0
        return
    assert group <= held <= samples - group
    assert abs(held - share * samples) <= group or held in (group, (samples // group - 1) * group)
    out = held_out(samples, "csd0", held).tolist()
    own = order(samples, *job, "csd0", False, group, held).tolist()
    assert sorted(out + own) == list(range(samples))
    more = held_out(samples, "csd0", min(held + group, (samples // group) * group)).tolist()
    assert more[:held] == out
    if group > 1:  # the groups are those of jobs that hold out nothing
        assert groups_of(own, group) <= groups_of(order(samples, 0, 0, "csd0", False, group).tolist(), group)


def test_a_large_epoch_ends_for_all_at_about_the_same_time() -> None:
    epoch = Epoch(fleet(36 * [700], 36 * [700]), 37)
    steps = epoch.finish([180, *36 * [15]])
    assert epoch.all_taken()
    assert all(sum(share.size for share in shares) >= 180 + 36 * 15 for shares in steps[:-2])


@given(some.lists(some.integers(0, 200), min_size=3, max_size=3), some.integers(0, 300), some.integers(6, 60))
def test_spread_batches_keep_everyones_samples_to_the_end(private: list[int], public: int, most: int) -> None:
    """Whoever has many samples has large batches, as far as it can, and all are done in as few steps."""
    pools = [Pool(count, (rank,)) for rank, count in enumerate(private)] + [Pool(public, (0, 1, 2))]
    plan, able = DataPlan(pools, 3), [20, 20, 20]
    position, steps = plan.begin(), 0
    fewest = max(sum(plan.left(position)) / most, *(count / 20 for count in private))
    while any(plan.left(position)):
        batches = plan.spread(position, able, most)
        assert all(0 <= batch <= 20 for batch in batches)
        assert sum(batches) <= most
        position, shares = plan.deal(position, batches)
        assert any(share.size for share in shares)
        steps += 1
    assert steps <= 1.25 * fewest + 3
