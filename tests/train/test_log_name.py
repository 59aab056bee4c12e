# SPDX-License-Identifier: Apache-2.0
"""The names of jobs' logs on devices."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from millpond.agent import job_worker
from millpond.train.job.log_name import log_name, run_name


def test_two_jobs_of_one_name_have_two_logs() -> None:
    """Before: `logs --device` showed the lines of all jobs of that name."""
    first, second, later = (run_name(*of) for of in ((1, 5.25), (2, 5.25), (1, 6.5)))
    assert len({log_name("digits", run) for run in (first, second, later)}) == 3
    assert log_name("digits", first) == log_name("digits", run_name(1, 5.25))
    assert log_name("digits", "../up").count("/") == 0
    assert log_name("digits", "") == "digits.log"


def test_the_newest_logs_stay_on_the_device(tmp_path: Path) -> None:
    config = cast(Any, SimpleNamespace(job_logs=tmp_path))
    for number in range(job_worker.MOST_LOGS + 5):
        path = tmp_path / f"job{number}.log"
        path.touch()
        os.utime(path, (number, number))
    new = job_worker._log(config, "digits", "1 of 2.0")
    assert new.parent == tmp_path and len(list(tmp_path.iterdir())) == job_worker.MOST_LOGS - 1
    assert not (tmp_path / "job5.log").exists() and (tmp_path / "job6.log").exists()
