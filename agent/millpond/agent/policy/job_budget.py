# SPDX-License-Identifier: Apache-2.0
"""Edge (a file): what the rounds of a job cost the private folders that it reads, and whether their budget
has it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from millpond.agent.policy.budget_ledger import ROUNDING, BudgetLedger
from millpond.agent.policy.settings import Policy
from millpond.base.errors import Refused
from millpond.train.protocol import PrepareWorker


class JobBudget:
    """Bounds what a job of the ``request`` spends: no more than its own epsilon, and no more than
    ``policy.budget`` leaves. Costs are in ``ledger`` whether or not there is a budget: one that is set later
    counts them.
    """

    def __init__(self, policy: Policy, ledger: BudgetLedger, request: PrepareWorker) -> None:
        self._ledger, self._run = ledger, request.run
        self._most = policy.budget.rho if policy.budget else math.inf
        privacy, rounds = request.work.privacy, request.work.total
        self._cost = privacy.rho(rounds) if privacy else 0.0
        self._whole = self._cost * rounds * ROUNDING

    def check(self, folders: Sequence[str]) -> None:
        """Raise Refused unless all rounds that the job has left can be paid."""
        if self._cost and not self._run:
            raise Refused(
                "", "model", "privacy: the request names no run of the job, whose rounds are counted"
            )
        if self._cost:
            left = max(self._cost, self._whole - self._ledger.spent_by(self._run))
            self._ledger.check(folders, left / ROUNDING, self._most * ROUNDING)

    def charge(self, folders: Sequence[str]) -> None:
        """Pay for an answer of a round. Raises Refused if the job or the folders have too little left."""
        if not self._cost:
            return
        self._ledger.spend(folders, self._cost, self._most * ROUNDING, self._run, self._whole)
