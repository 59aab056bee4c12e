# SPDX-License-Identifier: Apache-2.0
"""Edge (the budget's file): noise in the sums of a question, paid for before they leave.

The noise protects a group of samples as training forms them, of ``policy.least_samples`` and more: sums with
the group, and with zeros in its place, differ by the question's sensitivity for each sample.
"""

from __future__ import annotations

import math
import os

from millpond.agent.config import AgentConfig
from millpond.agent.policy.budget_ledger import ROUNDING, BudgetLedger
from millpond.base.errors import Refused
from millpond.privacy.accounting import sigma_of_sum
from millpond.privacy.discrete_gaussian import discrete_gaussian
from millpond.train.questions.messages import AskDevice
from millpond.train.questions.sums import Words


def largest_group(least_samples: int) -> int:
    """Return the most samples of a group: the last one of a folder has the rest, too."""
    return 2 * least_samples - 1


class SumsNoise:
    """The noise of a question with ``rho`` above 0, which ``ledger`` charges to its private folders."""

    def __init__(self, config: AgentConfig, request: AskDevice, ledger: BudgetLedger) -> None:
        self._rho, self._ledger, self._size = request.rho, ledger, request.question.words
        budget = config.policy.budget
        self._most = budget.rho * ROUNDING if budget else math.inf
        self._sensitivity = request.question.sensitivity * largest_group(config.policy.least_samples)
        self._folders = [folder.path for folder in request.folders if not folder.public]

    def check(self) -> None:
        """Raise Refused if a folder has too little of its budget left."""
        self._ledger.check(self._folders, self._rho, self._most)

    def added(self, words: Words, terms: int) -> Words:
        """Return the sums with the device's share of the noise of ``terms`` devices: all of it for one.
        Raises Refused for what cannot be paid, or is more noise than can be.
        """
        try:
            sigma = sigma_of_sum(self._rho, self._sensitivity, terms, self._size)
        except ValueError:
            raise Refused("", "data", "epsilon: it is too small for noise of whole numbers") from None
        self._ledger.spend(self._folders, self._rho, self._most)
        return words + discrete_gaussian(sigma, self._size, os.urandom)
