# SPDX-License-Identifier: Apache-2.0
"""Edge (files): the device as a member of the cohorts of one job or question."""

from __future__ import annotations

import os
from pathlib import Path

from millpond.agent.cohort.certificates import KeyCertificates
from millpond.agent.cohort.cohort_key import secret_key
from millpond.agent.cohort.cohort_roster import DeviceCohort
from millpond.agent.cohort.opened_sessions import FLASH_SECONDS, OpenedSessions
from millpond.agent.config import AgentConfig
from millpond.aggregate.masking import keys
from millpond.aggregate.masking.member import CohortMember
from millpond.aggregate.masking.messages import (
    Agree,
    Offered,
    OpenCohort,
    Shares,
    ShowShares,
    TakeOffers,
    TakeShares,
    Unmask,
)
from millpond.wire.messages import Message
from millpond.wire.tls import Identity


class DeviceMember(CohortMember):
    """The device with its key, its policy and its files. Raises Refused where the policy lets it be none."""

    def __init__(self, config: AgentConfig) -> None:
        state, self._policy = Path(config.state), config.policy
        secret, self._cohort = secret_key(state, config.name), DeviceCohort(config.policy, state)
        self._sessions = OpenedSessions(state)
        super().__init__(config.name, secret, self._cohort.now(), os.urandom, self._sessions.begin)
        self.public = keys.LastingKey(secret).public
        self._certificates = KeyCertificates(Identity.in_directory(Path(config.identity)))
        self.certificate = self._certificates.own(config.name, self.public)

    def open(self, request: OpenCohort) -> Offered:
        """Begin an exchange of members that the device accepts now, see CohortMember. Raises Refused."""
        self.roster = self._cohort.now()
        if not self.roster.pinned:
            self._certificates.check(request)
        return super().open(request)

    def answer(self, request: Message) -> Message | None:
        """Answer a request about the present exchange but the last, None for another one. Raises Refused."""
        if isinstance(request, OpenCohort):
            return self.open(request)
        if isinstance(request, TakeOffers):
            return self.take(request)
        if isinstance(request, ShowShares):
            self._sessions.wait(FLASH_SECONDS)
            return self.show(request)
        if isinstance(request, TakeShares):
            return self.take_shown(request)
        return self.agree(request) if isinstance(request, Agree) else None

    def unmask(self, request: Unmask) -> Shares:
        """Give shares, after it is noted durably that the exchange was opened. Raises Refused."""
        self._sessions.wait(FLASH_SECONDS)
        return super().unmask(request)
