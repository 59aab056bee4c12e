# SPDX-License-Identifier: Apache-2.0
"""Pure: the messages of a question, between the host and an agent, on a control connection of its own.

The host sends AskDevice. The agent asks for files, see ``train.protocol``, has a worker count, and answers
Counted. If the answer is to be masked, the messages of a masked exchange follow, with GetAnswer in the place
of Work. Answer has the sums.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from millpond.aggregate.masking.messages import NO_CERTIFICATE, KeyCertificate
from millpond.train.job.files import JobFile
from millpond.train.job.spec import WorkSpec
from millpond.train.protocol import Folder
from millpond.train.questions.question import DataQuestion
from millpond.wire.messages import Kind, Message, message

MODEL: Final = "asked-model.safetensors"


@message("question")
@dataclass(frozen=True, slots=True)
class AskDevice(Message):
    """Answer a question about the samples of ``folders``. The ``name`` is for the audit log. If ``masked``,
    the sums leave with the masks of a cohort alone. A question about a model comes with the ``work`` that
    builds it, which needs ``files`` and for some agents a ``signature`` as in a job, and with the file of its
    values, ``model``, which lies there as MODEL. With ``rho`` above 0 the sums have noise that costs so much,
    see ``privacy.accounting``.
    """

    name: str
    question: DataQuestion
    folders: tuple[Folder, ...]
    masked: bool = True
    rho: float = 0.0
    work: WorkSpec | None = None
    files: dict[str, JobFile] = field(default_factory=dict)
    signature: str = ""
    model: JobFile | None = None

    @property
    def needed(self) -> dict[str, JobFile]:
        """All files that the worker finds, by name."""
        return {**self.files, MODEL: self.model} if self.model else self.files


@message("question.counted", Kind.METRICS)
@dataclass(frozen=True, slots=True)
class Counted(Message):
    """The sums are there. From a worker: the ``samples`` by folder; payload: the sums, int64. From an agent,
    if they are to be masked: the device's lasting ``cohort_key`` with its ``cohort_certificate``, whether it
    has its cohort ``pinned``, and the ``least_devices`` of a sum. Noise protects groups of ``group`` samples.
    """

    samples: tuple[int, ...] = ()
    cohort_key: bytes = b""
    cohort_certificate: KeyCertificate = NO_CERTIFICATE
    pinned: bool = False
    least_devices: int = 0
    group: int = 1


@message("question.answer.get")
@dataclass(frozen=True, slots=True)
class GetAnswer(Message):
    """Ask for the Answer."""


@message("question.answer", Kind.METRICS)
@dataclass(frozen=True, slots=True)
class Answer(Message):
    """Payload: the sums, with the masks of the cohort if there is one, int64."""
