# SPDX-License-Identifier: Apache-2.0
"""Pure: the names of jobs' logs on devices: a run has a log of its own, whatever the job is called."""

from __future__ import annotations

import hashlib


def log_name(job: str, run: str) -> str:
    """Return the name of the log of a ``run`` of a job; jobs of one name have different runs."""
    return f"{job}.{hashlib.sha256(run.encode()).hexdigest()[:8]}.log" if run else f"{job}.log"


def run_name(number: int, created: float) -> str:
    """Return the name of a job's run, which no other job has, also none of an earlier database."""
    return f"{number} of {created!r}"
