"""Edge (files): what the workers of a job were measured to do, kept with the job."""

from __future__ import annotations

import json
from pathlib import Path

from millpond.base import schema
from millpond.host.api.daemon import Curves

_NAME = "curves.json"


def write_curves(directory: Path, curves: Curves) -> None:
    """Keep them with the job in ``directory``. Raises OSError."""
    fresh = directory / f".{_NAME}"
    fresh.write_text(json.dumps(schema.dump(curves)))
    fresh.rename(directory / _NAME)


def read_curves(directory: Path) -> Curves | None:
    """Those that were kept, if any were."""
    path = directory / _NAME
    return schema.load(Curves, json.loads(path.read_text()), _NAME) if path.exists() else None
