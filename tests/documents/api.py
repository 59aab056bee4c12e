# SPDX-License-Identifier: Apache-2.0
"""Edge (imports the product): the public names for Python programs, with their docstrings."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import is_dataclass
from importlib import import_module
from typing import Any

from documents.markdown import page, prose
from documents.types import members

PUBLIC = (
    ("millpond", "Fleet"),
    ("millpond.host.program.job", "RunningJob"),
    ("millpond.host.program.trackers.update", "Tracker"),
    ("millpond.host.program.trackers.update", "JobUpdate"),
    ("millpond.train", "fit"),
    ("millpond.train", "simulate"),
    ("millpond.train.api.fit", "Fitted"),
    ("millpond.train", "group"),
    ("millpond.train.distributed.group", "ProcessGroup"),
    ("millpond.train.distributed.group", "Loader"),
    ("millpond.train.strategies", "Strategy"),
    ("millpond.train.strategies", "Combination"),
    ("millpond.train.strategies", "LocalRule"),
    ("millpond.train.data.parquet", "ParquetRows"),
    ("millpond.train.data.tar", "TarSamples"),
    ("millpond.data", "stream"),
    ("millpond.data", "mini_epochs"),
    ("millpond.data.streaming.loader", "StreamLoader"),
)
HOOKS = "millpond.train.task.task"
_LONGEST = 90


def api_page() -> str:
    """Return the page of the Python API."""
    hooks = prose(import_module(HOOKS).__doc__).partition("\n\n")[2]
    return page(
        "Python API",
        "Names that are not on this page may change in any version.",
        "## The hooks of a task",
        hooks,
        *(section for module, name in PUBLIC for section in _name(module, name)),
    )


def _name(module: str, name: str) -> Iterator[str]:
    found = getattr(import_module(module), name)
    yield f"## {name}"
    yield f"```python\nfrom {module} import {name}\n```"
    yield _signature(name, found)
    yield prose(found.__doc__)
    if is_dataclass(found):
        yield members(found)
    for member, value in vars(found).items() if inspect.isclass(found) else ():
        if not member.startswith("_") and (about := inspect.getdoc(value)):
            yield from _member(f"{name}.{member}", value, about)


def _member(name: str, value: Any, about: str) -> Iterator[str]:
    function = getattr(value, "__func__", value)
    if isinstance(value, property):
        yield f"### {name}"
        yield prose(about)
    elif inspect.isfunction(function):
        yield f"### {name}"
        yield _signature(name, function)
        yield prose(about)


class _Bare:
    """An annotation that is shown without quotes."""

    def __init__(self, text: object) -> None:
        self._text = text if isinstance(text, str) else inspect.formatannotation(text)

    def __repr__(self) -> str:
        return self._text


def _signature(name: str, found: Any) -> str:
    """Return a call as Python writes it, over several lines if it is long."""
    shown = inspect.signature(found)
    parameters = [
        each if each.annotation is each.empty else each.replace(annotation=_Bare(each.annotation))
        for each in shown.parameters.values()
        if each.name != "self"
    ]
    returns = shown.return_annotation
    end = "" if inspect.isclass(found) or returns is shown.empty else f" -> {_Bare(returns)!r}"
    line = f"{name}{shown.replace(parameters=parameters, return_annotation=shown.empty)}{end}"
    if len(line) > _LONGEST:
        line = "\n".join([f"{name}(", *(f"    {each}," for each in _with_stars(parameters)), f"){end}"])
    return f"```text\n{line}\n```"


def _with_stars(parameters: list[inspect.Parameter]) -> Iterator[str]:
    has_star = False
    for each in parameters:
        has_star |= each.kind is each.VAR_POSITIONAL
        if each.kind is each.KEYWORD_ONLY and not has_star:
            has_star = True
            yield "*"
        yield str(each)
