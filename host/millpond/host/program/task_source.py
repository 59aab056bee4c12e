# SPDX-License-Identifier: Apache-2.0
"""Edge (files): the source file of a task that is a Python object, as workers get files, not objects."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from millpond.base.errors import LocalError


@dataclass(frozen=True, slots=True)
class TaskSource:
    """The ``factory`` of a task, ``module:name``, and the ``files`` of its module below ``folder``."""

    factory: str
    folder: Path
    files: tuple[str, ...]


def source_of(task: object) -> TaskSource:
    """Return the source of a task: a class or a function, an object that is a variable of its module, an
    object of a class without arguments and attributes, or a module. Raises LocalError for one that a worker
    could not make from a file.
    """
    if isinstance(task, ModuleType):
        return _source(task, "")
    owner = task if inspect.isclass(task) or inspect.isfunction(task) else type(task)
    module = sys.modules.get(owner.__module__)
    if module is None or owner.__module__ == "__main__" or not _is_file(module):
        raise LocalError(
            f"{owner.__qualname__} is defined in {owner.__module__}: write it to a file of its own "
            f"and import it, as the file is what workers get (in a notebook: %%writefile task.py)"
        )
    name = _name(task, owner.__qualname__, module)
    return _source(module, name)


def _name(task: object, owner: str, module: ModuleType) -> str:
    """Return the name in ``module`` that a worker finds a task by."""
    if inspect.isclass(task) or inspect.isfunction(task):
        if getattr(module, owner, None) is not task:
            raise LocalError(f"{owner} is not at the top of {module.__name__}, where a worker looks for it")
        return owner
    for name, value in vars(module).items():
        if value is task:
            return name
    if getattr(task, "__dict__", None) or "." in owner:
        raise LocalError(
            f"this {owner} has attributes that a worker does not know: give its class, and its arguments as "
            f"arguments={{...}}"
        )
    return owner


def _source(module: ModuleType, name: str) -> TaskSource:
    """Return the file of a module, and those of the packages around it."""
    if not _is_file(module):
        raise LocalError(f"the module {module.__name__} has no file that workers could get")
    path = Path(str(module.__file__)).resolve()
    parts = module.__name__.split(".")
    own = parts[:-1] if path.name != "__init__.py" else parts
    folder = path.parents[len(own)]
    packages = [folder.joinpath(*own[: depth + 1], "__init__.py") for depth in range(len(own))]
    files = dict.fromkeys([path, *(package for package in packages if package.is_file())])
    factory = f"{module.__name__}:{name}" if name else module.__name__
    return TaskSource(factory, folder, tuple(file.relative_to(folder).as_posix() for file in files))


def _is_file(module: ModuleType) -> bool:
    return str(getattr(module, "__file__", None) or "").endswith(".py")
