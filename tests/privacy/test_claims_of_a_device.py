# SPDX-License-Identifier: Apache-2.0
"""Attacks of a device on the job: what it claims to have is checked by the host before it takes part."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from millpond.host.jobs.context import JobContext
from millpond.host.jobs.training.worker_group import WorkerGroup
from millpond.host.records.jobs import JobRow, JobState
from millpond.train.job.host_spec import LimitsSpec
from millpond.train.job.spec import DataSpec, Job, ModelSpec, SynchronousSpec
from millpond.train.protocol import Ready

JOB = Job(
    "claims", DataSpec("private/digits", "test"), ModelSpec("net:Net"), limits=LimitsSpec(most_samples=50)
)


def admitted(tmp_path: Path, ready: Ready, job: Job = JOB) -> str:
    """Return "" if the host admits a device, or the reason for refusing it."""
    fleet = SimpleNamespace(job_directory=lambda _number: tmp_path)
    context = cast(JobContext, SimpleNamespace(fleet=fleet, devices={"csd0": None}))
    row = JobRow(1, job, {}, None, JobState.RUNNING, "", "", 0.0, None)
    return WorkerGroup(row, context, threading.Event(), logging.getLogger("claims"))._admit("csd0", ready)


def test_a_device_with_as_many_samples_as_the_job_allows_is_admitted(tmp_path: Path) -> None:
    assert admitted(tmp_path, Ready((50,))) == ""


@pytest.mark.parametrize("samples", [51, 1 << 24, 1 << 63])
def test_a_device_that_claims_more_is_refused(tmp_path: Path, samples: int) -> None:
    """Its share of every mean would grow with what it claims."""
    found = admitted(tmp_path, Ready((samples,)))
    assert found == f"it claims to have {samples} samples; the job allows 50 (limits.most_samples)"


@pytest.mark.parametrize("parts", [(), (10, 10), (-5,), (60, -20)])
def test_claims_that_make_no_sense_are_refused(tmp_path: Path, parts: tuple[int, ...]) -> None:
    assert admitted(tmp_path, Ready(parts)).startswith("it claims to have samples of ")
    assert admitted(tmp_path, Ready((10,), (-1,))).startswith("it claims to have samples of ")


def test_public_samples_count_as_well(tmp_path: Path) -> None:
    data = replace(JOB.data, public="public/digits")
    job = replace(JOB, data=data, synchronous=SynchronousSpec(host=False))
    assert admitted(tmp_path, Ready((30, 20)), job) == ""
    assert "limits.most_samples" in admitted(tmp_path, Ready((30, 21)), job)


def test_a_device_without_samples_is_refused(tmp_path: Path) -> None:
    expected = "it has 1 samples in private/digits; training takes at least 2"
    assert admitted(tmp_path, Ready((1,))) == expected


@pytest.mark.parametrize("group", [0, -1, 31, 1 << 40])
def test_groups_are_of_private_samples(tmp_path: Path, group: int) -> None:
    data = replace(JOB.data, public="public/digits")
    job = replace(JOB, data=data, synchronous=SynchronousSpec(host=False))
    found = admitted(tmp_path, Ready((30, 20), (0, 0), group), job)
    assert found == f"it has its private samples in groups of {group}, and has 30"
    assert admitted(tmp_path, Ready((30, 20), (0, 0), 30), job) == ""
