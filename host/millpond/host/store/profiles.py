# SPDX-License-Identifier: Apache-2.0
"""Edge (files): the measured curves of a job's workers, as a file in the job's directory."""

from __future__ import annotations

import json
from pathlib import Path

from millpond.base import schema
from millpond.host.api.daemon import Curves

_NAME = "curves.json"


def write_curves(directory: Path, curves: Curves) -> None:
    """Write the curves of the job in ``directory``. Raises OSError."""
    fresh = directory / f".{_NAME}"
    fresh.write_text(json.dumps(schema.dump(curves)))
    fresh.rename(directory / _NAME)


def read_curves(directory: Path) -> Curves | None:
    """Return the curves of the job in ``directory``, None without any."""
    path = directory / _NAME
    return schema.load(Curves, json.loads(path.read_text()), _NAME) if path.exists() else None
