# SPDX-License-Identifier: Apache-2.0
"""Edge: read a TOML file as a dataclass."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, TypeVar

from millpond.base.errors import ConfigError
from millpond.base.keys import check_keys
from millpond.base.schema import load

T = TypeVar("T")


def read(cls: type[T], path: Path) -> T:
    """Read the dataclass ``cls`` from the TOML file ``path``. Raises ConfigError in one line: for a file that
    cannot be read, for text that is not TOML, and as ``schema.load`` and ``keys.check_keys`` do.
    """
    found = load(cls, document(path), path.name)
    check_keys(found, path.name)
    return found


def document(path: Path) -> dict[str, Any]:
    """Read the tables of a TOML file. Raises ConfigError as ``read`` does for a file that is not TOML."""
    try:
        return parsed(path.read_text(), path.name)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path.name}: {error}") from None


def parsed(text: str, name: str) -> dict[str, Any]:
    """Return the tables of TOML text. Raises ConfigError, naming the file, for text that is not TOML."""
    try:
        return tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None
    except RecursionError:
        raise ConfigError(f"{name}: it is nested too deeply") from None
