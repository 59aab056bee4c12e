# SPDX-License-Identifier: Apache-2.0
"""Edge: the files of a job's first values."""

from __future__ import annotations

import json
from pathlib import Path

from millpond.base.errors import ConfigError

_INDEX = ".index.json"


def shards_of(path: Path) -> list[str]:
    """Return the names of the files that an index of Hugging Face's lists, beside it; none of other files.
    Raises ConfigError.
    """
    if not path.name.endswith(_INDEX):
        return []
    try:
        names = set(json.loads(path.read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        names = set()
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ConfigError(f"task: initial: {path.name} lists no files beside it as its weight_map")
    return sorted(names)
