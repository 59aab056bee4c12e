# SPDX-License-Identifier: Apache-2.0
"""Edge (files): the transforms of a data service: functions of a sample in a Python file, by their names."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FunctionType

from millpond.base.errors import LocalError
from millpond.data.streaming.served_set import Transform, in_words


def functions_of(path: Path) -> Mapping[str, Transform]:
    """Return the functions that a file defines itself, without those whose names begin with "_". The file is
    run here, with the rights of this process. Raises LocalError.
    """
    name = f"transforms of {path.name}"
    spec = importlib.util.spec_from_file_location(name, path) if path.suffix == ".py" else None
    if not (spec and spec.loader and path.is_file()):
        raise LocalError(f"{path} is no Python file of transforms")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # as dataclasses need it
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise LocalError(f"{path}: {in_words(error)}") from error
    own = {key: value for key, value in vars(module).items() if isinstance(value, FunctionType)}
    found = {key: value for key, value in own.items() if value.__module__ == name and key[0] != "_"}
    if not found:
        raise LocalError(f"{path} defines no function of its own")
    return found
