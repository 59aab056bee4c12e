# SPDX-License-Identifier: Apache-2.0
"""Pure: the order of an epoch's samples, a function of (seed, epoch), which is the same on every machine.

Where storage reads any sample at the same cost the order is a full random permutation, the one that a group's
loader has for a data set in memory. Shards that are read from front to back keep that: the shards are
shuffled, and each sample moves by at most a *shuffle window* from its place in them, so that what is read
ahead is soon used up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from millpond.base.errors import LocalError
from millpond.train.balance.curve import Ints
from millpond.train.balance.data_plan import order
from millpond.train.balance.ranges import Ranges, count, split


def epoch_order(shards: Sequence[int], seed: int, epoch: int, window: int = 0) -> Ints:
    """Return the indices of all samples in the order of an epoch. ``shards`` are the samples of each shard;
    with a ``window`` of 0 the order does not heed them. Raises LocalError for a negative window.
    """
    if window < 0:
        raise LocalError(f"a shuffle window of {window} samples is negative")
    if not window:
        return order(sum(shards), seed, epoch, "0", False)
    random = _generator(f"{seed} {epoch} shards")
    starts = np.cumsum([0, *shards])
    parts = [np.arange(starts[each], starts[each + 1]) for each in random.permutation(len(shards))]
    stored = np.concatenate([np.empty(0, np.int64), *parts])
    places = np.arange(len(stored)) + window * random.random(len(stored))
    return stored[np.argsort(places, kind="stable")]


def samples_at(order: Ints, ranges: Ranges) -> Ints:
    """Return the indices of the samples at positions of an order."""
    return np.concatenate([order[start:stop] for start, stop in ranges])


def even_steps(left: Ranges, batch: int, rank: int, ranks: int) -> Iterator[tuple[Ranges, Ranges]]:
    """Yield for each step the positions that a rank takes of those ``left`` in an epoch, and what is left
    behind the step. Each rank takes ``batch`` positions, in the last step as many as the others: up to
    ``ranks`` - 1 positions are left at the end (Ember, section 4.1: the set is cut to a size that divides).
    """
    while wanted := min(batch, count(left) // ranks):
        taken, left = split(left, ranks * wanted)
        yield split(split(taken, rank * wanted)[1], wanted)[0], left


def _generator(text: str) -> np.random.Generator:
    key = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
