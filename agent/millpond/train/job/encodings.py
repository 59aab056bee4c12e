# SPDX-License-Identifier: Apache-2.0
"""Pure: the encoding of updates that a job's file names."""

from __future__ import annotations

from typing import Any

from millpond.aggregate.encoding.layout import Encoding
from millpond.base.errors import ConfigError
from millpond.base.schema import load


def encoding_of(given: str | dict[str, Any], where: str) -> Encoding:
    """Return the encoding of a table, or of a name alone. Raises ConfigError."""
    try:
        found = load(Encoding, {"name": given} if isinstance(given, str) else given, where)
    except ConfigError as error:  # of a key, which the schema places, or of a name
        text = str(error)
        raise ConfigError(text if text.startswith(where) else f"{where}: {text}") from None
    if isinstance(given, dict) and "share" in given and not found.kind.takes_share:
        raise ConfigError(f"{where}: share: '{found.name}' sends all values")
    return found
