# SPDX-License-Identifier: Apache-2.0
"""Edge (imports the product): the JSON documents of commands, and the metrics in them."""

from __future__ import annotations

import ast
import inspect
import textwrap
import typing
from collections.abc import Iterable, Iterator
from typing import Any, Final

from documents.cli import PROGRAM, commands
from documents.markdown import code, page, prose
from documents.types import inner, members
from millpond.host.api.daemon import Curves, Devices, JobInfo, TunnelInfo
from millpond.host.api.launch import WorkerEnd
from millpond.host.api.topology import TopologyInfo
from millpond.host.cli.data import DataSummary
from millpond.host.cli.flash import Flashed
from millpond.host.cli.simulation.fleet import PolicyResult
from millpond.host.cli.simulation.tiers import TiersResult
from millpond.host.cli.update import UpdateOutcome
from millpond.host.records.comparison import JobComparison
from millpond.host.records.data_explanation import DataExplanation
from millpond.host.records.jobs import Round
from millpond.host.records.questions import AnsweredQuestion
from millpond.host.records.volume import Checked, VolumeReport
from millpond.host.remote.copies.small_copies import Copied
from millpond.wire.control_messages import Ledger

DOCUMENTS: Final[dict[str, tuple[Any, ...]]] = {
    "devices": (Devices,),
    "topology": (TopologyInfo,),
    "tunnel": (TunnelInfo,),
    "ask": (AnsweredQuestion,),
    "volume": (VolumeReport, Checked),
    "cp": (Copied,),
    "flash": (Flashed,),
    "profile": (Curves,),
    "data check": (DataSummary,),
    "data explain": (DataExplanation,),
    "jobs compare": (JobComparison,),
}
"""The documents of commands that print a dataclass."""
METRICS: Final = (Round, JobInfo, Ledger)
"""Dataclasses that say how a job does."""
OTHERS: Final = (WorkerEnd, UpdateOutcome, PolicyResult, TiersResult)
"""Parts of documents whose other keys a command writes itself."""


def outputs_page() -> str:
    """Return the page of the JSON documents."""
    sections = [
        "`--format json` prints one JSON document on standard output. After an error it has the keys `error`"
        " and `exit_code`.",
        "## Metrics of jobs",
        f"`{PROGRAM} train --format json` prints the job and its rounds, which the fleet's database keeps.",
        *_shown(METRICS),
        "## Documents of commands",
    ]
    found = {*METRICS, *OTHERS}
    for name, command in commands():
        if any("--format" in each.opts for each in command.params):
            sections += [f"### {PROGRAM} {name}", *_document(name, command)]
            found.update(DOCUMENTS.get(name, ()))
    parts = [*OTHERS, *_parts(found)]
    return page("Metrics and JSON documents", *sections, "## Parts of documents", *_shown(parts))


def _document(name: str, command: Any) -> Iterator[str]:
    if documents := DOCUMENTS.get(name):
        for cls in documents:
            yield prose(cls.__doc__)
            yield members(cls)
    elif keys := written_keys(command.callback):
        yield f"Keys: {', '.join(map(code, keys))}."
    else:
        raise LookupError(f"'{PROGRAM} {name}' prints a document that no page shows: name it in DOCUMENTS")


def written_keys(callback: Any) -> list[str]:
    """Return the keys of the dictionaries that a command's module prints, in order."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.getmodule(callback) or callback)))
    function = inspect.unwrap(callback).__name__
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    own = next(node for node in found if node.name == function)
    shown = [own]
    for node in shown:  # and what it calls, as far as that is in this module
        called = {ast.unparse(each.func) for each in ast.walk(node) if isinstance(each, ast.Call)}
        shown += [each for each in found if each.name in called and each not in shown]
    return list(dict.fromkeys(key for node in shown for key in _dictionary_keys(node)))


def _dictionary_keys(function: ast.FunctionDef) -> Iterator[str]:
    given = [
        argument
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(("show", "print_json"))
        for argument in call.args
    ]
    names = {each.id for each in given if isinstance(each, ast.Name)}
    assigned = [
        node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and {ast.unparse(target) for target in node.targets} & names
    ]
    made = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value]
    for node in (*given, *assigned, *(made if function.name == "_document" else ())):
        for each in ast.walk(node):
            if isinstance(each, ast.Dict):
                yield from (str(key.value) for key in each.keys if isinstance(key, ast.Constant))


def _parts(documents: set[Any]) -> list[Any]:
    """Return the dataclasses inside of documents, each once."""
    found: dict[str, Any] = {}
    waiting = sorted(documents, key=lambda cls: cls.__name__)
    while waiting:
        cls = waiting.pop(0)
        for hint in typing.get_type_hints(cls).values():
            for part in _all_inner(hint):
                if part not in documents and part.__name__ not in found:
                    found[part.__name__] = part
                    waiting.append(part)
    return [found[name] for name in sorted(found)]


def _all_inner(hint: Any) -> Iterator[Any]:
    if direct := inner(hint):
        yield direct
    for each in typing.get_args(hint):
        yield from _all_inner(each)


def _shown(classes: Iterable[Any]) -> Iterator[str]:
    for cls in classes:
        yield f"### {cls.__name__}"
        yield prose(cls.__doc__)
        yield members(cls)
