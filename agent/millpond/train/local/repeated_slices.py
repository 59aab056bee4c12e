# SPDX-License-Identifier: Apache-2.0
"""Edge (the clock): mini-epochs that are repeated as a rule says, for scripts and for workers of jobs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from millpond.base.errors import LocalError
from millpond.train.local.fast_tier import FastTier, FetchedSlice
from millpond.train.local.prefetch import timed
from millpond.train.local.slices import PassOrder, Place, following
from millpond.train.repeats import RepeatHistory, RepeatRule, score_of


class RepeatedSlices:
    """Iterates over the mini-epochs of ``passes`` passes, of up to ``size`` samples: yields each with the
    number of its repetition, as often as ``rule`` says. ``waited`` are the seconds without a mini-epoch,
    ``repeats`` the repetitions of those that are done, ``scores`` all that were reported.
    """

    def __init__(
        self, tier: FastTier, order: PassOrder, size: int, rule: RepeatRule, passes: int = 1
    ) -> None:
        self._tier, self._order, self._size = tier, order, size
        self._rule, self._passes = rule, passes
        self._place: Place | None = None
        self._own: list[float] = []
        self._before: list[float] = []
        self.waited, self.repeats = 0.0, list[int]()

    @property
    def scores(self) -> list[float]:
        """The scores of all repetitions, those of the present mini-epoch last."""
        return self._before + self._own

    def report(
        self, loss: float, train_error: float | None = None, validation_error: float | None = None
    ) -> None:
        """Report the repetition that has just ended, see ``repeats.score_of``. Raises LocalError."""
        try:
            self._own.append(score_of(self._rule, loss, train_error, validation_error))
        except ValueError as error:
            raise LocalError(str(error)) from None

    def __iter__(self) -> Iterator[tuple[FetchedSlice, int]]:
        unfinished = self._place is not None and self._place.done
        place = self._place if unfinished else following(self._order, self._place, self._size)
        assert place
        for seconds, fetched in timed(self._tier.slices(place, self._size, self._passes)):
            self.waited += seconds
            yield from self._repetitions(fetched)

    def _repetitions(self, fetched: FetchedSlice) -> Iterator[tuple[FetchedSlice, int]]:
        """Yield a mini-epoch as often as the rule says. The state is that after the repetition."""
        done = fetched.place.done
        while not done or self._goes_on(done):
            done += 1
            self._place = replace(fetched.place, done=done)
            yield fetched, done
        self._before += self._own
        self._own.clear()
        self.repeats.append(done)
        self._place = replace(fetched.place, done=0)

    def _goes_on(self, done: int) -> bool:
        return self._rule.goes_on(RepeatHistory(done, self._tier.is_there, self._own, self._before))

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two repetitions, of numbers alone."""
        place = asdict(self._place) if self._place else None
        return {"place": place, "size": self._size, "scores": self._own[:], "before": self._before[:]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the repetition at which the state was taken. Raises LocalError for that of another
        size of mini-epochs.
        """
        if state["size"] != self._size:
            raise LocalError(f"the state is of mini-epochs of {state['size']} samples, not {self._size}")
        self._place = Place(**state["place"]) if state["place"] else None
        self._own, self._before = list(state["scores"]), list(state["before"])
