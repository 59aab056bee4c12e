# SPDX-License-Identifier: Apache-2.0
"""Edge (the daemon's socket): questions about the samples of all devices, for commands and programs."""

from __future__ import annotations

from collections.abc import Sequence

from millpond.host.api.questions import AskFleet
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.records.questions import AnsweredQuestion
from millpond.train.questions.answers import figures
from millpond.train.questions.question import DataQuestion, check


def ask(
    client: DaemonClient, question: DataQuestion, folders: Sequence[str], devices: str, *, masked: bool
) -> AnsweredQuestion:
    """Ask a question about folders of the ``devices`` that a text names, "" for all. Raises ConfigError,
    LocalError, RemoteError.
    """
    check(question)
    names = client.fleet.named(devices) if devices else ()
    found = client.ask(AskFleet(question, tuple(folders), names, masked))
    return AnsweredQuestion(
        question,
        tuple(folders),
        masked,
        found.devices,
        found.left_out,
        figures(question, found.words),
        {name: figures(question, words) for name, words in found.by_device.items()},
    )
