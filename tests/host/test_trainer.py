# SPDX-License-Identifier: Apache-2.0
"""The beginning of a training: a newcomer of a resumed job is profiled before the first exchange."""

from __future__ import annotations

from typing import cast

import pytest

from millpond.host.api.daemon import Curves
from millpond.host.jobs.training.admission import Admission
from millpond.host.jobs.training.trainer import Trainer


class Profiling:
    """An admission with one worker that is profiled, which takes three answers."""

    def __init__(self) -> None:
        self.left, self.begun = 3, 0

    @property
    def profiling(self) -> bool:
        return self.left > 0

    def handle_profile(self) -> None:
        self.left -= 1

    def begin(self) -> Curves:
        self.begun += 1
        return Curves((), {})


def test_a_resumed_job_with_a_quorum_profiles_its_newcomer_and_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A quorum takes part, so nothing but the profile keeps the job from its first exchange."""
    trainer = object.__new__(Trainer)
    admission = Profiling()
    trainer._admission = cast(Admission, admission)
    monkeypatch.setattr(trainer, "_can_begin", lambda: True)
    trainer._gather()
    assert (admission.left, admission.begun) == (0, 1)
