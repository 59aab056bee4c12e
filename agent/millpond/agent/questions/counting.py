# SPDX-License-Identifier: Apache-2.0
"""Edge (a process): the sums that answer a question, counted by a worker that has ended before they leave.

The worker reads private samples in the sandbox of all workers, without a network. The agent takes its sums
into its own memory and checks that they are such as so many samples have.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from millpond.agent.config import AgentConfig
from millpond.agent.job_files import LaidOutFiles
from millpond.agent.job_worker import bare_sandbox
from millpond.agent.policy import error_reports
from millpond.agent.policy.questions import check_counted
from millpond.agent.policy.shown_volume import showing_folders
from millpond.base.deadline import NEVER, Deadline
from millpond.base.errors import ConnectionLost, ProtocolError, Refused
from millpond.linux.zygote.client import Zygote
from millpond.train.questions.messages import AskDevice, Counted
from millpond.train.questions.sums import Words, fault
from millpond.train.worker.handle import HostLeft, WorkerHandle
from millpond.wire.channel import Channel
from millpond.wire.messages import Failure

log = logging.getLogger(__name__)
_SECONDS = 60.0
_DIED = "the worker process died; questions.log on the device may say why"
_STRANGE = "the worker process sent an invalid answer"
_LOG = "questions.log"


@dataclass(frozen=True, slots=True)
class CountedSums:
    """The sums of a question over ``samples`` by folder."""

    words: Words
    samples: dict[str, int]


def count(
    config: AgentConfig, request: AskDevice, files: LaidOutFiles, zygote: Zygote, host: Channel
) -> CountedSums:
    """Have a worker count. Raises Refused with the part of its reason that may leave, HostLeft, OSError."""
    place = Path("/", os.urandom(8).hex())  # of private folders, in the worker's sandbox
    worker = WorkerHandle(
        f"question {request.name}",
        zygote,
        showing_folders(bare_sandbox(config), config, request.folders, place),
        files.worker,
        config.job_logs / _LOG,
        ("--root", config.volume, "--errors", _errors(config, request)),
        peer="the worker of a question",
    )
    with contextlib.closing(worker):
        try:
            return _counted(config, request, worker, place, host)
        except HostLeft:
            raise
        except ConnectionLost:
            found = worker.of_death(_DIED)
        except ProtocolError:  # its text has the worker's own words, and the host can read the agent's log
            found = Failure("worker", _STRANGE)
        except Refused as error:
            report = Failure(error.code, error.text.replace(f"{place}/", ""))
            discreet = _discreet(config, request, files, report)
            found = worker.of_error(report) or worker.hinted(discreet)
    raise Refused("", found.code, found.text)


def _counted(
    config: AgentConfig, request: AskDevice, worker: WorkerHandle, place: Path, host: Channel
) -> CountedSums:
    placed = (f if f.public else replace(f, path=str(place / f.path)) for f in request.folders)
    worker.begin()
    worker.channel.send(
        replace(request, folders=tuple(placed), files={}, model=None), Deadline.after(_SECONDS)
    )
    worker.wait(NEVER, host)
    size = 8 * request.question.words
    reply = worker.channel.expect(Counted, Deadline.after(_SECONDS), payload=size)
    words = np.frombuffer(worker.channel.receive_payload(size, Deadline.after(_SECONDS)), np.int64)
    if len(reply.samples) != len(request.folders) or fault(request.question, words, sum(reply.samples)):
        raise ProtocolError(_STRANGE)
    samples = dict(zip((folder.path for folder in request.folders), reply.samples, strict=True))
    check_counted(config.policy, request.folders, samples)
    return CountedSums(words, samples)


def _errors(config: AgentConfig, request: AskDevice) -> str:
    """Return how much of errors leaves: with masks or noise no more than their location."""
    return "location" if request.masked or request.rho else config.privacy.errors


def _discreet(config: AgentConfig, request: AskDevice, files: LaidOutFiles, failure: Failure) -> Failure:
    """Return the part of the worker's report that may leave."""
    if _errors(config, request) == "full":
        return failure
    asked = request.question
    names = {config.name, asked.column, *asked.classes, *(folder.path for folder in request.folders)}
    if request.work:
        names.add(request.work.model.factory)
    return error_reports.rebuilt(failure, names, files.sources())
