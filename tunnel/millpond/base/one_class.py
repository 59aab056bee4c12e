# SPDX-License-Identifier: Apache-2.0
"""Pure: packages whose modules define one class each, which goes by the name of its module."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Collection
from types import ModuleType
from typing import TypeVar

T = TypeVar("T")


def names_in(package: ModuleType, others: Collection[str]) -> tuple[str, ...]:
    """Return the names of the classes of a package: of its public modules but the ``others``."""
    found = (info.name for info in pkgutil.iter_modules(package.__path__))
    return tuple(name for name in found if not name.startswith("_") and name not in others)


def class_in(package: ModuleType, name: str, base: type[T]) -> type[T]:
    """Return the class, derived from ``base``, that a module of a package defines."""
    module = importlib.import_module(f"{package.__name__}.{name}")
    own = (each for each in vars(module).values() if getattr(each, "__module__", "") == module.__name__)
    return next(each for each in own if isinstance(each, type) and issubclass(each, base))
