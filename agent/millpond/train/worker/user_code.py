# SPDX-License-Identifier: Apache-2.0
"""Edge: a task or a model from ``module:callable``, which may be the user's own files."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from millpond.aggregate.rules.catalogue import rule_of
from millpond.base.errors import ConfigError, LocalError
from millpond.train.determinism import generators
from millpond.train.job.spec import ModelSpec, WorkSpec
from millpond.train.strategies import Combination, LocalRule, Strategy, catalogue
from millpond.train.task.task import Task, is_task


def build(work: WorkSpec, code_dir: Path) -> tuple[Task, nn.Module]:
    """Build the task of a job and its seeded model; modules in ``code_dir`` come before installed ones.

    Raises LocalError if the factory is not there, does not take the arguments or makes something else, and
    any exception of the user's code.
    """
    spec, table = work.model, "task" if work.task else "model"
    module_name, _, attribute = spec.factory.partition(":")
    module = _import(module_name, code_dir, table)
    found: Any = getattr(module, attribute, None) if attribute else module
    if found is None or not (callable(found) or is_task(found)):
        wanted = f"callable '{attribute}'" if attribute else "hook 'model'"
        raise LocalError(f"{table}: factory: module {module_name} has no {wanted}")
    called = found if callable(found) else found.model
    _check_arguments(called, spec.arguments, f"{table}: arguments: {spec.factory}")
    generators.plant(work.seed)
    if not work.task:
        task = Task(_ModelAlone(found, spec), work.format, work.classes, variation=work.variation)
    elif callable(found):
        task = Task(_made(found, spec), work.format, work.classes, variation=work.variation)
    else:
        task = Task(found, work.format, work.classes, spec.arguments, work.variation)
    return task, task.model()


def strategy(table: Mapping[str, Any], code_dir: Path) -> Strategy:
    """Return the strategy of a job, which may be a class of its code. Raises LocalError, and any exception of
    the user's code.
    """
    where = "federated: strategy"
    made = catalogue.check(table, where) or _own(table, code_dir, where)
    try:
        rule_of(made.combine.rule, made.combine.share)
    except ConfigError as error:
        raise LocalError(f"{where}: combine: {error}") from None
    return made


def _own(table: Mapping[str, Any], code_dir: Path, where: str) -> Strategy:
    arguments = dict(table)
    factory = str(arguments.pop("factory"))
    name, _, attribute = factory.partition(":")
    make = getattr(_import(name, code_dir, where), attribute, None)
    if not callable(make):
        raise LocalError(f"{where}: factory: module {name} has no class '{attribute}'")
    _check_arguments(make, arguments, f"{where}: {factory}")
    made = make(**arguments)
    declared = (getattr(made, "local", None), getattr(made, "combine", None))
    if not (isinstance(made, Strategy) and isinstance(declared[0], LocalRule)):
        raise LocalError(f"{where}: {factory} is no millpond.train.strategies.Strategy")
    if not isinstance(declared[1], Combination):
        raise LocalError(f"{where}: {factory}: combine is no millpond.train.strategies.Combination")
    return made


@dataclass(frozen=True, slots=True)
class _ModelAlone:
    """A task whose hooks but the model are the default ones."""

    factory: Callable[..., Any]
    spec: ModelSpec

    def model(self) -> nn.Module:
        made = self.factory(**self.spec.arguments)
        if not isinstance(made, nn.Module):
            name = type(made).__name__
            raise LocalError(f"model: factory: {self.spec.factory} returned a {name}, not a torch.nn.Module")
        return made


def _made(factory: Callable[..., Any], spec: ModelSpec) -> object:
    made: object = factory(**spec.arguments)
    if not is_task(made):
        hint = "; name it in a table [model]" if isinstance(made, nn.Module) else ""
        raise LocalError(
            f"task: factory: {spec.factory} returned a {type(made).__name__} without a hook 'model'{hint}"
        )
    return made


def forget(code_dir: Path) -> None:
    """Unload the modules that came from ``code_dir``, so that another job's take their names."""
    sys.path[:] = [entry for entry in sys.path if entry != str(code_dir)]
    for name, module in list(sys.modules.items()):
        if _is_below(module, code_dir):
            del sys.modules[name]


def _import(name: str, code_dir: Path, table: str) -> ModuleType:
    if str(code_dir) not in sys.path:
        sys.path.insert(0, str(code_dir))
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not error.name or not (name == error.name or name.startswith(f"{error.name}.")):
            raise  # the user's module is there; one that it needs is not
        raise LocalError(f"{table}: factory: there is no module '{name}'; list its file in files") from None
    own = code_dir / (name.replace(".", "/") + ".py")
    if own.exists() and not _is_below(module, code_dir):
        raise LocalError(f"{table}: files: {own.name} has the name of a module in use; give it another")
    return module


def _is_below(module: ModuleType, folder: Path) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and Path(file).is_relative_to(folder)


def _check_arguments(factory: Callable[..., Any], arguments: Mapping[str, Any], where: str) -> None:
    """Raise LocalError where calling would raise TypeError, whose text could come from user code."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return  # built in, without a signature
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise LocalError(f"{where}: {error}") from None
