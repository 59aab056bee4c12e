# SPDX-License-Identifier: Apache-2.0
"""The job that looks at a private folder: one device, one folder, no rounds, and no data of the host."""

from __future__ import annotations

import pytest

from millpond.host.remote.device_data import looking_at
from millpond.train.job.check import check
from millpond.train.job.spec import DataSpec, EvaluationSpec, Job, ModelSpec, SynchronousSpec

DATA = DataSpec("private/digits", "/test", "public/digits", "images", ("cat", "dog"))
MODEL = ModelSpec("net:build")


@pytest.mark.parametrize(
    ("evaluate", "held_out"),
    [
        (EvaluationSpec(target=0.9), 0.0),
        (EvaluationSpec(on=("host", "devices"), held_out=0.2, patience=3), 0.2),
    ],
)
def test_it_has_what_the_device_needs_and_no_more(evaluate: EvaluationSpec, held_out: float) -> None:
    devices = ("csd0", "csd2")
    job = Job("own", DATA, MODEL, synchronous=SynchronousSpec(), evaluate=evaluate, devices=devices)
    found = check(looking_at(job, "csd1", "private/other"), "check")
    assert found.devices == ("csd1",)
    assert found.data == DataSpec("private/other", format="images", classes=("cat", "dog"))
    assert (found.total, found.synchronous) == (0, None)
    assert (found.work.total, found.work.held_out, found.work.model) == (0, held_out, MODEL)
