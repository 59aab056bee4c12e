# SPDX-License-Identifier: Apache-2.0
"""Edge (files): the functions of a sample that a Python file defines, by their names."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

from millpond.base.errors import LocalError
from millpond.data.streaming.served_set import ReadSamples, Transform, in_words
from millpond.train.data.columns import Packed, pack

Function = Callable[[Any], Any]
"""Changes a sample."""


def functions_of(path: Path) -> Mapping[str, Function]:
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


def function_named(functions: Mapping[str, Function], name: str) -> Function:
    """Return a function. Raises LocalError if there is none of that name."""
    if name not in functions:
        raise LocalError(f"the data service has no transform '{name}'")
    return functions[name]


def changed(sample: Any, function: Function) -> Any:
    """Return what a function makes of a sample. Raises LocalError for any exception of it."""
    try:
        return function(sample)
    except Exception as error:
        raise LocalError(f"the transform of a sample failed: {error!r:.200}") from error


def in_process(functions: Mapping[str, Function]) -> Callable[[str], Transform]:
    """Return what gives transforms by name: they call these functions in the process of the service."""

    def named(name: str) -> Transform:
        function = function_named(functions, name)

        def transform(samples: ReadSamples) -> Packed:
            return pack([changed(sample, function) for sample in samples.decoded()])

        return transform

    return named
