# SPDX-License-Identifier: Apache-2.0
"""Pure: the batch policies of a job, by name."""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np

from millpond.train.balance.controller import BalanceController, BatchPlan, deadline_of
from millpond.train.balance.curve import Bools, Floats, Ints
from millpond.train.balance.equal_time import Cohort
from millpond.train.balance.hypertune import inverse
from millpond.train.balance.simulation import BatchPolicy
from millpond.train.balance.stannis import Stannis, StannisCpu

PolicyName = Literal["balance", "stannis", "stannis-inverse", "stannis-cpu", "fixed"]


class Elastic(BatchPolicy, Protocol):
    """A policy whose workers come and go. An absent worker has a batch of 0."""

    @property
    def slowness(self) -> Floats:
        """Return how many times as long as on its curve each worker takes, as far as the policy asks."""

    def join(self, rank: int, level: float = 1.0) -> BatchPlan:
        """Add a worker that takes ``level`` times as long as on its curve. Return the plan with it."""

    def leave(self, rank: int) -> BatchPlan:
        """Remove a worker. Return the plan without it."""


class Untuned:
    """Keeps the first equal-time batches for ever: no worker takes over samples of others."""

    def __init__(
        self,
        cohort: Cohort,
        *,
        total: int | None = None,
        patience: float | None = None,
        levels: Floats | None = None,
        present: Bools | None = None,
    ) -> None:
        self._start = BalanceController(cohort, total=total, patience=patience, levels=levels).plan
        self._patience = patience
        self.slowness: Floats = np.ones(cohort.size) if levels is None else levels.copy()
        self._present = np.ones(cohort.size, dtype=np.bool_) if present is None else present.copy()
        self.plan = self._make_plan()

    def _make_plan(self) -> BatchPlan:
        times = np.where(self._present, self._start.times, 0.0)
        batches = np.where(self._present, self._start.batches, 0)
        return BatchPlan(batches, times, deadline_of(times, self._patience))

    def observe(
        self, _batches: Ints, _measured: Floats, _busy: Floats | None = None, _left: float = 1.0, /
    ) -> bool:
        """Ignore the measurements: there is never a new plan."""
        return False

    def join(self, rank: int, level: float = 1.0) -> BatchPlan:
        """Add a worker, with its first batch whatever its level."""
        self.slowness[rank] = level
        return self._set_present(rank, True)

    def leave(self, rank: int) -> BatchPlan:
        """Remove a worker. Return the plan without it."""
        return self._set_present(rank, False)

    def _set_present(self, rank: int, present: bool) -> BatchPlan:
        self._present[rank] = present
        self.plan = self._make_plan()
        return self.plan


def policy_of(
    name: PolicyName,
    cohort: Cohort,
    total: int | None,
    patience: float | None,
    *,
    levels: Floats | None = None,
    present: Bools | None = None,
    probes: bool = True,
) -> Elastic:
    """Make the policy of a job for ``cohort``: ``total`` and ``patience`` as in ``BalanceController``, though
    those of the Stannis paper have none of the latter. ``levels`` are how slow the workers are at first,
    ``present`` says which are there. Raises ValueError if ``total`` cannot be had.
    """
    if name == "stannis":
        return Stannis(cohort, total=total, levels=levels, present=present)
    if name == "stannis-inverse":
        return Stannis(cohort, method=inverse, total=total, levels=levels, present=present)
    if name == "stannis-cpu":
        return StannisCpu(cohort, total=total, levels=levels, present=present)
    if name == "fixed":
        return Untuned(cohort, total=total, patience=patience, levels=levels, present=present)
    return BalanceController(
        cohort, total=total, patience=patience, levels=levels, present=present, probes=probes
    )
