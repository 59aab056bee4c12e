# SPDX-License-Identifier: Apache-2.0
"""Pure: jobs side by side: the keys in which their definitions differ, and what each came to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from millpond.base.schema import dump
from millpond.host.records.jobs import Round
from millpond.train.job.spec import Job


@dataclass(frozen=True, slots=True)
class ComparedJob:
    """A job's results: ``final`` and ``best`` value of its ``metric``, its ``rounds`` (or epochs), their
    seconds, the bytes that crossed the tunnels in them, and the joules that are known; None where there is
    nothing.
    """

    id: int
    name: str
    state: str
    rounds: int
    metric: str
    final: float | None
    best: float | None
    seconds: float
    to_devices: int
    from_devices: int
    joules: float | None


@dataclass(frozen=True, slots=True)
class JobComparison:
    """Jobs in the order asked for. ``differences`` maps dotted keys to each job's value, None without one."""

    jobs: tuple[ComparedJob, ...]
    differences: dict[str, tuple[Any, ...]]


def results(
    number: int,
    name: str,
    state: str,
    rounds: Sequence[Round],
    *,
    metric: str = "",
    final: float | None = None,
    best: float | None = None,
) -> ComparedJob:
    """Return the results of a job with these finished rounds and scores."""
    metered = [sum(each.joules.values()) for each in rounds if each.joules]
    tunnels = [pair for each in rounds for pair in each.tunnel.values()]
    return ComparedJob(
        number,
        name,
        state,
        len(rounds),
        metric,
        final,
        best,
        sum(each.seconds for each in rounds),
        sum(to for to, _ in tunnels),
        sum(back for _, back in tunnels),
        sum(metered) if metered else None,
    )


def differences(definitions: Sequence[tuple[Job, str]]) -> dict[str, tuple[Any, ...]]:
    """Return the keys in which jobs, each given with the digest of its code, differ."""
    flat = [settings(_whole(job)) | {"code": digest[:12]} for job, digest in definitions]
    keys = dict.fromkeys(key for each in flat for key in each)
    values = {key: tuple(each.get(key) for each in flat) for key in keys}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


def settings(job: Job) -> dict[str, Any]:
    """Return the values of a job's keys, also of those that its file leaves out, by their dotted names; not
    those of its trackers, whose addresses may have a password in them.
    """
    return {key: value for key, value in _flat(dump(job)).items() if not key.startswith("track.")}


def parameters(job: Job) -> dict[str, Any]:
    """Return the same for trackers: with the tables that the job's kind has."""
    return settings(_whole(job))


def _whole(job: Job) -> Job:
    """Return the job with the defaults of its kind: a table that is left out is no difference."""
    return job if job.synchronous else replace(job, federated=job.averaging)


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        elif value is not None:
            found[f"{prefix}{key}"] = value
    return found
