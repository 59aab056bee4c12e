# SPDX-License-Identifier: Apache-2.0
"""Edge: a model from ``module:callable``, which may be the user's own files."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from millpond.base.errors import LocalError
from millpond.train.determinism import generators
from millpond.train.job.spec import ModelSpec


def build(model: ModelSpec, code_dir: Path, seed: int) -> nn.Module:
    """Build the seeded model; modules in ``code_dir`` come before installed ones.

    Raises LocalError if the factory is not there, does not take the arguments or makes no torch module, and
    any exception of the user's code.
    """
    module_name, _, attribute = model.factory.partition(":")
    module = _import(module_name, code_dir)
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise LocalError(f"model: factory: module {module_name} has no callable '{attribute}'")
    _check_arguments(factory, model)
    generators.plant(seed)
    made = factory(**model.arguments)
    if not isinstance(made, nn.Module):
        raise LocalError(
            f"model: factory: {model.factory} returned a {type(made).__name__}, not a torch.nn.Module"
        )
    return made


def forget(code_dir: Path) -> None:
    """Unload the modules that came from ``code_dir``, so that another job's take their names."""
    sys.path[:] = [entry for entry in sys.path if entry != str(code_dir)]
    for name, module in list(sys.modules.items()):
        if _is_below(module, code_dir):
            del sys.modules[name]


def _import(name: str, code_dir: Path) -> ModuleType:
    if str(code_dir) not in sys.path:
        sys.path.insert(0, str(code_dir))
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not error.name or not (name == error.name or name.startswith(f"{error.name}.")):
            raise  # the user's module is there; one that it needs is not
        raise LocalError(f"model: factory: there is no module '{name}'; list its file in files") from None
    own = code_dir / (name.replace(".", "/") + ".py")
    if own.exists() and not _is_below(module, code_dir):
        raise LocalError(f"model: files: {own.name} has the name of a module in use; give it another")
    return module


def _is_below(module: ModuleType, folder: Path) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and Path(file).is_relative_to(folder)


def _check_arguments(factory: Any, model: ModelSpec) -> None:
    """Raise LocalError where calling would raise TypeError, whose text could come from user code."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return  # built in, without a signature
    try:
        signature.bind(**model.arguments)
    except TypeError as error:
        raise LocalError(f"model: arguments: {model.factory}: {error}") from None
