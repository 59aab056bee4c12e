# SPDX-License-Identifier: Apache-2.0
"""Exchanges of masked updates that never have a sum: the job ends, and says why."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from millpond.host.jobs.context import JobFailed
from millpond.host.workers.masked_reduction import Losses, MaskedReduction
from millpond.host.workers.worker import DeviceWorker

from .steps import Given, Team


class Sumless(MaskedReduction):
    """Members of whom too few ever take part."""

    def begin(self, _workers: Mapping[str, DeviceWorker], _scale: float, _bits: int) -> tuple[Losses, str]:
        return {}, "1 of 2 devices take part, 2 must"


def test_a_job_whose_devices_never_agree_ends_and_says_why() -> None:
    team = Team([4, 4])
    team.engine._masked = Sumless(np.zeros(team.size, np.float32), 1.0)
    try:
        for _ in range(9):
            assert team.run(Given(2, 2)).failed
        with pytest.raises(JobFailed, match="no sum of masked updates in 10 tries: 1 of 2 devices take part"):
            team.run(Given(2, 2))
    finally:
        team.close()
