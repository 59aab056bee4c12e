# SPDX-License-Identifier: Apache-2.0
"""Edge (files): measured curves of a job, or its prepared workers, as a file in the job's directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

from millpond.base import schema
from millpond.host.api.daemon import Curves, PreparedWorkers
from millpond.host.jobs.job_folder import CURVES, PREPARED
from millpond.linux.files import write_durably

_NAMES: dict[type[Curves | PreparedWorkers], str] = {
    Curves: CURVES,
    PreparedWorkers: PREPARED,
}
R = TypeVar("R", Curves, PreparedWorkers)


def write(directory: Path, found: Curves | PreparedWorkers) -> None:
    """Write a result of the job in ``directory``. Raises OSError."""
    write_durably(directory / _NAMES[type(found)], json.dumps(schema.dump(found)).encode())


def read(directory: Path, kind: type[R]) -> R | None:
    """Return the result of this ``kind`` of the job in ``directory``, None without any."""
    path = directory / _NAMES[kind]
    return schema.load(kind, json.loads(path.read_text()), path.name) if path.exists() else None
