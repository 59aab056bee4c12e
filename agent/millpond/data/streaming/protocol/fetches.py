# SPDX-License-Identifier: Apache-2.0
"""Pure: the fetches of a consumer: samples that it asked for by their indices, and what has come of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic

import numpy as np

from millpond.base.errors import LocalError, ProtocolError
from millpond.data.streaming.protocol.inbox import Piece, S
from millpond.data.streaming.protocol.messages import MOST_FETCHED, FetchSamples
from millpond.train.balance.curve import Ints


@dataclass(slots=True)
class _Fetch(Generic[S]):
    """The samples asked for, and chunks of the first ``came`` of them."""

    indices: Ints
    chunks: list[S] = field(default_factory=list)
    came: int = 0


class Fetches(Generic[S]):
    """Holds what was asked for until it is dropped; each fetch has a number, from 0."""

    def __init__(self) -> None:
        self._fetches: dict[int, _Fetch[S]] = {}
        self._next = 0

    def ask(self, indices: Sequence[int] | Ints) -> FetchSamples:
        """Return the message for a new fetch. Raises LocalError for none or too many samples."""
        wanted = np.asarray(indices, np.int64)
        if not 0 < len(wanted) <= MOST_FETCHED:
            raise LocalError(f"{len(wanted)} samples are fetched at once: 1 to {MOST_FETCHED} can be")
        number, self._next = self._next, self._next + 1
        self._fetches[number] = _Fetch(wanted)
        return FetchSamples(number, wanted.tobytes())

    def again(self) -> list[FetchSamples]:
        """Return the messages for what has not come, for a new connection."""
        rest = {number: fetch.indices[fetch.came :] for number, fetch in self._fetches.items()}
        return [FetchSamples(number, left.tobytes()) for number, left in rest.items() if len(left)]

    def add(self, number: int, samples: S) -> None:
        """Take in a chunk; that of a fetch that was dropped is ignored. Raises ProtocolError."""
        if (fetch := self._fetches.get(number)) is None:
            return
        if fetch.came + len(samples) > len(fetch.indices):
            raise ProtocolError("a fetch brought more samples than were wanted")
        fetch.chunks.append(samples)
        fetch.came += len(samples)

    def whole(self, number: int) -> bool:
        """Return whether all samples of a fetch have come."""
        fetch = self._fetches[number]
        return fetch.came == len(fetch.indices)

    def drop(self, number: int) -> None:
        """Forget a fetch, and its samples."""
        del self._fetches[number]

    def pieces(self, places: Sequence[tuple[int, int]]) -> list[Piece[S]]:
        """Return samples by fetch and place in it, those that follow each other in one piece."""
        found: list[Piece[S]] = []
        for number, place in places:
            for chunk in self._fetches[number].chunks:
                if place < len(chunk):
                    break
                place -= len(chunk)
            if found and found[-1].samples is chunk and found[-1].stop == place:
                found[-1] = Piece(chunk, found[-1].start, place + 1)
            else:
                found.append(Piece(chunk, place, place + 1))
        return found
