"""Pure: what decides on the batches of a job, by name."""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np

from millpond.train.balance.controller import BalanceController, BatchPlan, deadline_of
from millpond.train.balance.curve import Bools, Floats, Ints
from millpond.train.balance.equal_time import Cohort
from millpond.train.balance.simulation import BatchPolicy
from millpond.train.balance.stannis import Stannis

PolicyName = Literal["balance", "stannis", "fixed"]


class Elastic(BatchPolicy, Protocol):
    """A policy whose workers come and go. Who is absent has a batch of 0."""

    @property
    def slowness(self) -> Floats:
        """How many times as long as on its curve each worker takes, as far as the policy asks."""

    def join(self, rank: int, level: float = 1.0) -> BatchPlan:
        """A worker is there that takes ``level`` times as long as on its curve. The plan with it."""

    def leave(self, rank: int) -> BatchPlan:
        """A worker is not there any more. The plan without it."""


class Untuned:
    """The equal-time batches of the beginning, for ever: nobody takes over what others leave."""

    def __init__(
        self,
        crew: Cohort,
        *,
        total: int | None = None,
        patience: float | None = None,
        levels: Floats | None = None,
        present: Bools | None = None,
    ) -> None:
        self._start = BalanceController(crew, total=total, patience=patience, levels=levels).plan
        self._patience = patience
        self.slowness: Floats = np.ones(crew.size) if levels is None else levels.copy()
        self._present = np.ones(crew.size, dtype=np.bool_) if present is None else present.copy()
        self.plan = self._make_plan()

    def _make_plan(self) -> BatchPlan:
        times = np.where(self._present, self._start.times, 0.0)
        batches = np.where(self._present, self._start.batches, 0)
        return BatchPlan(batches, times, deadline_of(times, self._patience))

    def observe(self, _batches: Ints, _measured: Floats, _busy: Floats | None = None, /) -> bool:
        """Nothing follows from it."""
        return False

    def join(self, rank: int, level: float = 1.0) -> BatchPlan:
        """A worker is there, with the batch of the beginning whatever its level."""
        self.slowness[rank] = level
        return self._attend(rank, True)

    def leave(self, rank: int) -> BatchPlan:
        """A worker is not there any more."""
        return self._attend(rank, False)

    def _attend(self, rank: int, present: bool) -> BatchPlan:
        self._present[rank] = present
        self.plan = self._make_plan()
        return self.plan


def policy_of(
    name: PolicyName,
    crew: Cohort,
    total: int | None,
    patience: float | None,
    *,
    levels: Floats | None = None,
    present: Bools | None = None,
    probes: bool = True,
) -> Elastic:
    """The policy of a job for ``crew``: ``total`` and ``patience`` as in ``BalanceController``, though
    "stannis" has none of the latter. ``levels`` are how slow the workers are at first, ``present`` is who is
    there. Raises ValueError if ``total`` cannot be had.
    """
    if name == "stannis":
        return Stannis(crew, total=total, levels=levels, present=present)
    if name == "fixed":
        return Untuned(crew, total=total, patience=patience, levels=levels, present=present)
    return BalanceController(
        crew, total=total, patience=patience, levels=levels, present=present, probes=probes
    )
