# SPDX-License-Identifier: Apache-2.0
"""The assignment of samples to workers: each once in an epoch, through losses, newcomers and checkpoints."""

from __future__ import annotations

import json
import random
from collections import Counter

import numpy as np
import pytest

from millpond.base import schema
from millpond.host.jobs.training.shards import AHEAD, EpochPosition, Shard, Shards
from millpond.train.balance.ranges import Ranges

PUBLIC = [Shard(f"csd{n}", True, 30 + n) for n in range(3)]
PRIVATE = [Shard(f"csd{n}", False, 50 + 10 * n) for n in range(3)]
FOLDERS = [PUBLIC, *([PRIVATE[n], PUBLIC[n]] for n in range(3))]
"""By rank: the host, which reads all public samples, and three devices."""
TOTAL = sum(shard.count for shard in PUBLIC + PRIVATE)
Dealt = Counter[tuple[Shard, int]]


def team(*ranks: int, epoch: int = 1) -> Shards:
    shards = Shards(4)
    shards.begin(epoch)
    for rank in ranks:
        assert shards.add(rank, FOLDERS[rank]) == ""
    return shards


def named(rank: int, samples: tuple[Ranges, ...]) -> Dealt:
    """Return the shards' positions that these ranges have."""
    found: Dealt = Counter()
    for shard, ranges in zip(FOLDERS[rank], samples, strict=True):
        assert all(0 <= start < stop <= shard.count for start, stop in ranges)
        found.update((shard, index) for start, stop in ranges for index in range(start, stop))
    return found


def step(shards: Shards, batches: list[int], *lost: int) -> Dealt:
    """What is counted of a step in which some are lost."""
    counted: Dealt = Counter()
    for rank, samples in enumerate(shards.deal(batches)):
        if not any(samples):
            continue
        if rank in lost:
            shards.requeue(rank)
        else:
            counted += named(rank, samples)
            shards.commit(rank)
    return counted


def finish(shards: Shards, batches: list[int]) -> Dealt:
    counted: Dealt = Counter()
    while found := step(shards, batches):
        counted += found
    return counted


def through_json(place: EpochPosition) -> EpochPosition:
    return schema.load(EpochPosition, json.loads(json.dumps(schema.dump(place))), "place")


def whole(counted: Dealt) -> bool:
    return len(counted) == counted.total() == TOTAL


def test_each_sample_once_in_each_epoch() -> None:
    shards = team(0, 1, 2, 3)
    assert shards.samples == TOTAL
    for epoch in (1, 2):
        shards.begin(epoch)
        assert shards.epoch == epoch and sum(shards.left.values()) == TOTAL
        counted = finish(shards, [20, 9, 8, 7])
        assert whole(counted) and not shards.left


@pytest.mark.parametrize("seed", range(5))
def test_a_device_that_answers_for_whole_groups_is_asked_for_them(seed: int) -> None:
    chance = random.Random(seed)
    shards = Shards(2)
    shards.begin(1)
    count = chance.randrange(8, 60)
    shards.add(0, [Shard("csd0", False, count, group=8), Shard("csd0", True, 30)])
    shards.add(1, [Shard("csd0", True, 30)])
    dealt = 0
    while any(map(any, shares := shards.deal([chance.choice((0, 2, 5, 11)), 3]))):
        for rank, share in enumerate(shares):
            if any(share):
                private = share[0] if rank == 0 else ()
                assert all(start % 8 == 0 and (stop % 8 == 0 or stop == count) for start, stop in private)
                assert all(start <= count - 8 for start, _ in private)
                dealt += sum(stop - start for ranges in share for start, stop in ranges)
                shards.commit(rank)
    assert dealt + sum(shards.left.values()) == shards.samples


@pytest.mark.parametrize("seed", range(5))
def test_losses_and_resumptions_leave_nothing_out(seed: int) -> None:
    chance = random.Random(seed)
    shards, counted = team(0, 1, 2, 3), Counter[tuple[Shard, int]]()
    for _ in range(12):
        batches = [chance.choice((0, 2, 5, 8)) for _ in range(4)]
        counted += step(shards, batches, *chance.sample(range(4), 2))
        if chance.random() < 0.3:  # all are started anew, in whatever order
            place = through_json(shards.epoch_position)
            assert place == shards.epoch_position
            shards = Shards(4)
            shards.resume(place)
            assert sum(shards.left.values()) == TOTAL - counted.total()
            assert not any(map(any, shards.deal([5, 5, 5, 5])))  # nobody is there to read anything
            for rank in chance.sample(range(4), 4):
                assert shards.add(rank, FOLDERS[rank]) == ""
    counted += finish(shards, [20, 9, 8, 7])
    assert whole(counted)


def test_a_checkpoint_counts_those_at_work_as_lost() -> None:
    shards = team(0, 1, 2, 3)
    done = step(shards, [8, 8, 8, 8])
    at_work = [named(rank, samples) for rank, samples in enumerate(shards.deal([8, 8, 8, 8]))]
    place = through_json(shards.epoch_position)
    for rank in range(4):  # what becomes of them is of no matter to the place
        shards.commit(rank)
    again = team()
    again.resume(place)
    for rank in range(4):
        assert again.add(rank, FOLDERS[rank]) == ""
    after = finish(again, [8, 8, 8, 8])
    assert all(not (share - after) for share in at_work)
    assert whole(done + after)


def test_a_holder_with_another_count_is_refused_and_changes_nothing() -> None:
    shards = team(0, 1)
    place, left = shards.epoch_position, shards.left
    complaint = shards.add(2, [PRIVATE[2], Shard("csd0", True, 29)])
    assert complaint == "it has 29 public samples of csd0; the job was planned with 30"
    assert (shards.epoch_position, shards.left) == (place, left)
    assert shards.add(2, FOLDERS[2]) == ""
    complaint = shards.add(2, [Shard("csd1", False, 60, group=8), PUBLIC[1]])  # another policy than before
    assert complaint == "it has 60 (in groups of 8) private samples of csd1; the job was planned with 60"


def test_of_a_worker_with_another_count_the_other_shards_can_be_taken() -> None:
    """Otherwise a device that counts wrong would keep the host from the samples of all devices."""
    shards = team()
    assert shards.add(1, [PRIVATE[0], Shard("csd0", True, 29)]) == ""
    complaint = shards.add(0, PUBLIC, partly=True)
    assert complaint == "it has 30 public samples of csd0; the job was planned with 29"
    (host, *_) = shards.deal([200, 0, 0, 0])
    assert [sum(stop - start for start, stop in ranges) for ranges in host] == [0, 31, 32]


def test_a_worker_that_joins_in_mid_epoch_changes_no_order_of_others() -> None:
    alone, joined = team(1), team(1)
    for _ in range(3):
        assert step(alone, [0, 8, 0, 0]) == step(joined, [0, 8, 0, 0])
    before = joined.left
    assert joined.add(2, FOLDERS[2]) == ""
    assert joined.left == {**before, PRIVATE[1]: 60, PUBLIC[1]: 31}
    assert list(finish(alone, [0, 8, 0, 0])) == [
        sample for sample in finish(joined, [0, 8, 0, 0]) if sample[0] in FOLDERS[1]
    ]


def test_a_worker_that_returns_goes_on_where_it_was() -> None:
    shards = team(1, 2)
    counted = step(shards, [0, 8, 8, 0])
    assert shards.add(1, FOLDERS[1]) == ""  # a new process with the same samples
    assert shards.samples == sum(h.count for h in FOLDERS[1] + FOLDERS[2])
    counted += finish(shards, [0, 8, 8, 0])
    assert counted.total() == len(counted) == shards.samples


def test_the_samples_that_nobody_takes_are_told() -> None:
    shards = team(0, 1, 2)
    finish(shards, [10, 10, 0, 0])
    assert shards.left == {PRIVATE[1]: 60}
    assert [shard.name for shard in shards.left] == ["private samples of csd1"]
    assert PUBLIC[0].name == "public samples of csd0"


def test_of_nobody_nothing_is_left() -> None:
    shards = Shards(2)
    shards.begin(1)
    assert (shards.samples, shards.left, shards.part_left) == (0, {}, 0.0)
    assert shards.deal([2, 2]) == [(), ()]


def test_spread_makes_batches_smaller_and_keeps_to_who_has_any() -> None:
    shards = team(0, 1, 2, 3)
    found = shards.spread(np.array([40, 20, 20, 0]), 30)
    assert int(found.sum()) == 30 and found[3] == 0 and (found[:3] > 0).all()
    assert shards.spread(np.array([4, 4, 0, 0]), 30).tolist() == [4, 4, 0, 0]


def test_what_is_coming_is_what_is_dealt_next_where_batches_stay() -> None:
    shards = Shards(4)
    shards.begin(1)
    for rank in range(4):
        assert shards.add(rank, [Shard("csd0", True, 100)]) == ""
    told = shards.coming([19, 4, 0, 12])
    assert [shards.deal([19, 4, 0, 12]) for _ in range(AHEAD)] == told
    assert any(map(any, told[2])) and not any(map(any, told[3]))  # the epoch has ended
