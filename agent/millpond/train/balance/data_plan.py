"""Pure: which samples each worker takes in each step of an epoch, whatever the batches are.

Private samples are taken on their own device, public ones by anybody; each exactly once in an epoch. Where a
worker stands is a few cursors into permutations that follow from (seed, epoch), so every worker deals for all
without a message, and a checkpoint that holds a ``Position`` resumes in the middle of an epoch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from millpond.train.balance.curve import Ints


@dataclass(frozen=True, slots=True)
class Share:
    """What a worker takes in a step: indices of its private samples, and of public ones."""

    private: tuple[int, ...] = ()
    public: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Samples in it."""
        return len(self.private) + len(self.public)


@dataclass(frozen=True, slots=True)
class Position:
    """How far an epoch has come: cursors into the orders, and what was dealt but given back. By rank where a
    tuple of tuples or of cursors.
    """

    public: int
    private: tuple[int, ...]
    public_again: tuple[int, ...] = ()
    private_again: tuple[tuple[int, ...], ...] = ()


class DataPlan:
    """The order of one epoch: ``private[i]`` samples on worker i, ``public`` ones that all can read."""

    def __init__(self, seed: int, epoch: int, public: int, private: Sequence[int]) -> None:
        self._public: Ints = _order(public, seed, epoch, -1)
        self._private: list[Ints] = [_order(count, seed, epoch, rank) for rank, count in enumerate(private)]

    def begin(self) -> Position:
        """Nothing is dealt."""
        nobody = len(self._private)
        return Position(0, nobody * (0,), (), nobody * ((),))

    def left(self, position: Position) -> tuple[int, tuple[int, ...]]:
        """Samples still to be dealt: public ones, and private ones by rank."""
        public = len(self._public) - position.public + len(position.public_again)
        private = tuple(
            len(order) - cursor + len(again)
            for order, cursor, again in zip(
                self._private, position.private, position.private_again, strict=True
            )
        )
        return public, private

    def deal(self, position: Position, batches: Sequence[int]) -> tuple[Position, list[Share]]:
        """The shares of a step with these batches, by rank, and where the epoch stands then. A share is
        smaller than its batch where there are no samples left for it; all are empty at the epoch's end.
        """
        public_left, private_left = self.left(position)
        private_parts = _private_parts(batches, public_left, private_left)
        shares = []
        for rank, (batch, part) in enumerate(zip(batches, private_parts, strict=True)):
            position, private = self._take_private(position, rank, part)
            position, public = self._take_public(position, batch - part)
            shares.append(Share(private, public))
        return position, shares

    def give_back(self, position: Position, rank: int, share: Share) -> Position:
        """A worker's share did not become part of a step: others take the public samples, it the private ones
        when it is there again.
        """
        again = list(position.private_again)
        again[rank] = share.private + again[rank]
        return replace(
            position, public_again=share.public + position.public_again, private_again=tuple(again)
        )

    def _take_public(self, position: Position, count: int) -> tuple[Position, tuple[int, ...]]:
        taken = position.public_again[:count]
        end = min(position.public + count - len(taken), len(self._public))
        fresh = tuple(self._public[position.public : end].tolist())
        rest = position.public_again[len(taken) :]
        return replace(position, public=end, public_again=rest), taken + fresh

    def _take_private(self, position: Position, rank: int, count: int) -> tuple[Position, tuple[int, ...]]:
        again, cursors = list(position.private_again), list(position.private)
        taken = again[rank][:count]
        end = cursors[rank] + count - len(taken)  # never beyond: count is at most what is left
        fresh = tuple(self._private[rank][cursors[rank] : end].tolist())
        again[rank], cursors[rank] = again[rank][len(taken) :], end
        return replace(position, private=tuple(cursors), private_again=tuple(again)), taken + fresh


def _private_parts(batches: Sequence[int], public: int, private: Sequence[int]) -> list[int]:
    """How many of each batch are private: each worker's own spread evenly over the steps that are left, so
    that nobody has only its own data at the end, when others have none; more where public ones run out.
    """
    together = sum(batches)
    steps = max(1, -(-(public + sum(private)) // together)) if together else 1
    parts = [min(batch, -(-own // steps)) for batch, own in zip(batches, private, strict=True)]
    missing = sum(batches) - sum(parts) - public
    for rank, (batch, own) in enumerate(zip(batches, private, strict=True)):
        more = max(0, min(missing, batch - parts[rank], own - parts[rank]))
        parts[rank] += more
        missing -= more
    return parts


def _order(count: int, seed: int, epoch: int, rank: int) -> Ints:
    """A permutation that follows from its arguments, the same on every processor."""
    key = hashlib.blake2b(f"{seed} {epoch} {rank}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little"))).permutation(count)
