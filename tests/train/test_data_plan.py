"""Every sample exactly once per epoch, through any batches, losses and resumptions."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as some

from millpond.train.balance.data_plan import DataPlan, Position, Share
from millpond.wire.schema import dump, load

WORKERS = 4
COUNTS = some.lists(some.integers(0, 40), min_size=WORKERS, max_size=WORKERS)
BATCHES = some.lists(some.one_of(some.just(0), some.integers(2, 12)), min_size=WORKERS, max_size=WORKERS)


class Taken:
    """What went into steps so far."""

    def __init__(self) -> None:
        self.public: Counter[int] = Counter()
        self.private: list[Counter[int]] = [Counter() for _ in range(WORKERS)]

    def add(self, rank: int, share: Share) -> None:
        self.public.update(share.public)
        self.private[rank].update(share.private)

    def check(self, public: int, private: Sequence[int]) -> None:
        assert self.public == Counter(range(public))
        assert self.private == [Counter(range(count)) for count in private]


def finish(plan: DataPlan, position: Position, taken: Taken) -> None:
    """All take part until nothing is left."""
    for _ in range(1000):
        position, shares = plan.deal(position, WORKERS * [5])
        if not any(share.size for share in shares):
            return
        for rank, share in enumerate(shares):
            taken.add(rank, share)
    raise AssertionError("the epoch does not end")


@given(some.integers(0, 300), COUNTS, some.lists(some.tuples(BATCHES, some.integers(0, 15)), max_size=30))
def test_every_sample_counts_once_whatever_happens(
    public: int, private: list[int], steps: list[tuple[list[int], int]]
) -> None:
    plan, taken = DataPlan(1, 2, public, private), Taken()
    position = plan.begin()
    for batches, losses in steps:
        position, shares = plan.deal(position, batches)
        for rank, share in enumerate(shares):
            assert share.size <= batches[rank]
            if losses >> rank & 1:
                position = plan.give_back(position, rank, share)
            else:
                taken.add(rank, share)
        position = load(Position, json.loads(json.dumps(dump(position))), "checkpoint")
        left, own = plan.left(position)
        assert left + sum(taken.public.values()) == public
        assert [a + sum(b.values()) for a, b in zip(own, taken.private, strict=True)] == private
    finish(plan, position, taken)
    taken.check(public, private)


@given(some.integers(0, 300), COUNTS, BATCHES)
def test_a_batch_is_full_as_long_as_there_are_samples_for_it(
    public: int, private: list[int], batches: list[int]
) -> None:
    plan = DataPlan(3, 0, public, private)
    _, shares = plan.deal(plan.begin(), batches)
    possible = min(
        sum(batches), public + sum(min(own, batch) for own, batch in zip(private, batches, strict=True))
    )
    assert sum(share.size for share in shares) == possible


def test_private_samples_are_spread_over_the_epoch() -> None:
    plan = DataPlan(1, 0, 400, [100, 0])
    position = plan.begin()
    parts = []
    while any(plan.left(position)[1]) or plan.left(position)[0]:
        position, shares = plan.deal(position, [10, 10])
        parts.append(len(shares[0].private))
        assert sum(share.size for share in shares) == 20
    assert len(parts) == 25 and set(parts) == {4}


def test_an_epoch_follows_from_its_seed_and_differs_from_others() -> None:
    def first(seed: int, epoch: int) -> list[Share]:
        plan = DataPlan(seed, epoch, 100, [50, 50])
        return plan.deal(plan.begin(), [10, 10])[1]

    assert first(1, 0) == first(1, 0)
    assert len({json.dumps(dump(first(*which))) for which in ((1, 0), (2, 0), (1, 1))}) == 3
    assert first(1, 0)[0].private != first(1, 0)[1].private
