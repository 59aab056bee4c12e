# SPDX-License-Identifier: Apache-2.0
"""Edge (the daemon's socket): questions about the samples of all devices, for commands and programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from millpond.base.errors import ConfigError
from millpond.host.api.questions import COUNT_SECONDS, AskFleet, FleetAnswer
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.records.questions import AnsweredQuestion
from millpond.privacy.accounting import rho_of
from millpond.train.questions.answers import figures
from millpond.train.questions.quantiles import check_shares, quantiles, refined
from millpond.train.questions.question import MOST_ROUNDS, UNIT, AskedKind, DataQuestion, check


@dataclass(frozen=True, slots=True)
class AskedDevices:
    """The devices that questions are for, as a text names them, "" for all, and the folders of each. A model
    that they are about is that of a ``job``, or of its ``best`` score. With an ``epsilon`` above 0, all sums
    of an answer together are (epsilon, delta)-private. Each sum leaves out the devices that need more than
    ``deadline`` seconds to count.
    """

    client: DaemonClient
    folders: tuple[str, ...]
    devices: str = ""
    masked: bool = True
    job: int = 0
    best: bool = False
    epsilon: float = 0.0
    delta: float = 1e-5
    deadline: float = COUNT_SECONDS

    def ask(self, question: DataQuestion) -> AnsweredQuestion:
        """Ask them a question. Raises ConfigError, LocalError, RemoteError."""
        found = self._ask(question)
        told = {name: figures(question, words) for name, words in found.by_device.items()}
        return self._answered(question.kind, question, found, figures(question, found.words), told)

    def ask_quantiles(
        self,
        question: DataQuestion,
        shares: Sequence[float],
        rounds: int,
        tell: Callable[[str], None] = lambda _: None,
    ) -> AnsweredQuestion:
        """Ask them for the quantiles of these shares, by so many histograms, each with the bins of
        ``question`` where a quantile lies, and ``tell`` of each. Raises as ``ask`` does.
        """
        check_shares(shares, question.bins)
        if not 1 <= rounds <= MOST_ROUNDS:
            raise ConfigError(f"rounds: {rounds} is not between 1 and {MOST_ROUNDS}")
        asked = question
        for number in range(rounds):
            tell(f"devices answer: histogram {number + 1} of {rounds}")
            found = self._ask(asked, rounds)
            located = quantiles(asked, found.words, shares)
            if number + 1 < rounds and located:
                asked = refined(question, located)
        known = figures(asked, found.words)
        told = {name: known[name] for name in ("count", "missing")} | {"quantiles": located}
        return self._answered("quantiles", question, found, told, {})

    def _ask(self, question: DataQuestion, rounds: int = 1) -> FleetAnswer:
        """Ask one question of so many that share the epsilon."""
        check(question)
        if not (math.isfinite(self.epsilon) and self.epsilon >= 0 and 0 < self.delta < 1):
            raise ConfigError(f"epsilon: {self.epsilon:g}, with delta {self.delta:g}, is none")
        rho = rho_of(self.epsilon, self.delta) / rounds if self.epsilon else 0.0
        names = self.client.fleet.named(self.devices) if self.devices else ()
        request = AskFleet(
            question, self.folders, names, self.masked, rho, self.job, self.best, self.deadline
        )
        return self.client.ask(request)

    def _answered(
        self,
        kind: AskedKind,
        question: DataQuestion,
        found: FleetAnswer,
        told: dict[str, Any],
        by_device: dict[str, dict[str, Any]],
    ) -> AnsweredQuestion:
        return AnsweredQuestion(
            kind,
            question,
            self.folders,
            self.masked,
            found.devices,
            found.left_out,
            told,
            by_device,
            found.noise / UNIT,
        )
