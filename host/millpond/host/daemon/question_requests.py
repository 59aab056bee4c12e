# SPDX-License-Identifier: Apache-2.0
"""Edge: the daemon's answers to questions about the samples of devices."""

from __future__ import annotations

import math
from collections.abc import Mapping

from millpond.base.errors import Refused
from millpond.host.api.questions import MOST_COUNT_SECONDS, AskFleet, FleetAnswer
from millpond.host.fleet.device import Device
from millpond.host.jobs.service import JobService
from millpond.host.workers import questions
from millpond.host.workers.questions import AskedModel
from millpond.train.job.file_cache import FileCache
from millpond.train.questions.question import SCORING


def answer(
    devices: Mapping[str, Device], jobs: JobService, files: FileCache, request: AskFleet
) -> FleetAnswer:
    """Ask these devices, about the model of one of the ``jobs`` if the question is about one. Raises Refused,
    ConfigError, RemoteError.
    """
    is_about_model = request.question.kind in SCORING
    if is_about_model != bool(request.job):
        about = "a model: name its job" if is_about_model else "no model"
        raise Refused("", "unknown", f"job: {request.question.kind} is about {about}")
    if not 0 <= request.rho < math.inf:
        raise Refused("", "unknown", f"noise of {request.rho} is none")
    if not 0 < request.deadline <= MOST_COUNT_SECONDS:
        raise Refused(
            "", "unknown", f"deadline: {request.deadline:g} s is not within {MOST_COUNT_SECONDS:g} s"
        )
    return questions.ask(devices, request, _model(jobs, files, request) if is_about_model else None)


def _model(jobs: JobService, files: FileCache, request: AskFleet) -> AskedModel:
    row = jobs.row(request.job)
    values = files.copy(jobs.model(request.job, best=request.best))
    code = dict(row.files)
    signed = code.pop(row.job.code.signature, None)
    signature = files.path(signed).read_text(errors="replace") if signed else ""
    return AskedModel(row.job.work, code, signature, values, files.path)
