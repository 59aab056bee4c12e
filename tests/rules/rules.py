# SPDX-License-Identifier: Apache-2.0
"""The house rules of product code that no linter knows: functions from a root folder to their violations.

Product code lies below ``X/millpond`` for every folder ``X`` of the root. A violation is a line of text.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

MODULES_OF_A_FOLDER = 16
LINES_OF_A_MODULE = 500
LINES_OF_A_FUNCTION = 60
KIND = re.compile(r"(Pure|Edge|Entry)( \([^)]*\))?:")
WITHOUT_A_SUBJECT = re.compile(r"(Who|What|Whoever|Those|They|It|Of|That)\b")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Module:
    """A parsed module: its dotted name, its place below the root, and its text."""

    name: str
    place: Path
    text: str
    tree: ast.Module

    @property
    def kind(self) -> str:
        """Pure, Edge or Entry, as its docstring begins; empty if it says nothing of the kind."""
        found = KIND.match(ast.get_docstring(self.tree) or "")
        return found[1] if found else ""

    @property
    def is_package(self) -> bool:
        return self.place.name == "__init__.py"


@cache
def modules(root: Path) -> tuple[Module, ...]:
    """Parse the product code below ``root``, once for all rules."""
    found = []
    for source in sorted(root.glob("[!.]*/millpond")):
        for path in sorted(source.rglob("*.py")):
            parts = path.relative_to(source.parent).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            text = path.read_text()
            found.append(Module(name, path.relative_to(root), text, ast.parse(text)))
    return tuple(found)


def impure_imports(root: Path) -> list[str]:
    """Find what a pure module imports at run time that is an edge or an entry."""
    known = {module.name: module for module in modules(root)}
    return [
        f"{module.place}: is pure and imports {name}, which is {known[name].kind}"
        for module in known.values()
        if module.kind == "Pure"
        for name in sorted(_imported(module) & known.keys())
        if known[name].kind in ("Edge", "Entry")
    ]


def double_names(root: Path, exceptions: dict[str, str]) -> list[str]:
    """Find public classes of one name in several modules, and exceptions that no longer are any."""
    places = defaultdict(list)
    for module in modules(root):
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{module.place}")
    double = {name: found for name, found in places.items() if len(found) > 1}
    unused = [f"{name}: no longer needs its exception" for name in exceptions if name not in double]
    return unused + [
        f"{name}: is defined in {', '.join(found)}"
        for name, found in double.items()
        if name not in exceptions
    ]


def docstrings_without_a_subject(root: Path) -> list[str]:
    """Find docstrings of functions and classes that cannot be read alone."""
    return [
        f"{module.place}:{node.lineno}: {node.name}: {text.splitlines()[0]}"
        for module in modules(root)
        for node in ast.walk(module.tree)
        if isinstance(node, Function | ast.ClassDef)
        and WITHOUT_A_SUBJECT.match(text := ast.get_docstring(node) or "")
    ]


def undocumented_methods(root: Path) -> list[str]:
    """Find public methods without a docstring whose name no other class documents, as a protocol would."""
    methods = [
        (module, node, method)
        for module in modules(root)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, Function) and not f"{node.name} {method.name}".startswith("_")
    ]
    known = {method.name for _, _, method in methods if ast.get_docstring(method)}
    return [
        f"{module.place}:{method.lineno}: {node.name}.{method.name}"
        for module, node, method in methods
        if method.name not in known and not method.name.startswith("_")
    ]


def crowded_folders(root: Path) -> list[str]:
    """Find folders that hold too many modules, packages not counted."""
    counts: dict[Path, int] = defaultdict(int)
    for module in modules(root):
        counts[module.place.parent] += not module.is_package
    return [f"{place}: {count} modules" for place, count in counts.items() if count > MODULES_OF_A_FOLDER]


def long_code(root: Path) -> list[str]:
    """Find modules and functions of too many lines."""
    found = []
    for module in modules(root):
        if (lines := len(module.text.splitlines())) > LINES_OF_A_MODULE:
            found.append(f"{module.place}: {lines} lines")
        for node in ast.walk(module.tree):
            if isinstance(node, Function):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > LINES_OF_A_FUNCTION:
                    found.append(f"{module.place}:{node.lineno}: {node.name}: {lines} lines")
    return found


def without_a_kind(root: Path) -> list[str]:
    """Find modules whose docstrings say neither Pure nor Edge nor Entry."""
    return [
        f"{module.place}: is it Pure, Edge or Entry?"
        for module in modules(root)
        if not (module.kind or module.is_package)
    ]


def _imported(module: Module) -> set[str]:
    """Return the names that it imports at run time, of modules or of what is in them."""
    package = module.name.split(".") if module.is_package else module.name.split(".")[:-1]
    names = set()
    for node in _at_run_time(module.tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            names |= {origin, *(f"{origin}.{alias.name}" for alias in node.names)}
    return names


def _at_run_time(node: ast.AST) -> Iterator[ast.AST]:
    """Walk all but what is there for the type checker alone."""
    yield node
    children: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        children = node.orelse
    for child in children:
        yield from _at_run_time(child)


_RUNS = {f"subprocess.{name}" for name in ("run", "call", "check_call", "check_output")}


def waits_without_a_deadline(root: Path, exceptions: dict[str, str]) -> list[str]:
    """Find waits that a process or thread which hangs would make endless, and exceptions that are none any
    more: ``wait`` and ``communicate``, ``get`` of a queue, and those of ``os`` and ``subprocess``. An
    exception is a module's place and the begin of the call.
    """
    variables, unused, found = _context_variables(root), set(exceptions), []
    for module in modules(root):
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and _may_be_endless(module, node, variables):
                text = ast.unparse(node)
                excepted = {each for each in exceptions if f"{module.place}: {text}".startswith(each)}
                unused -= excepted
                if not excepted:
                    found.append(f"{module.place}:{node.lineno}: {text}: has no deadline")
    return found + [f"{each}: no longer needs its exception" for each in unused]


def _context_variables(root: Path) -> set[str]:
    return {
        ast.unparse(target)
        for module in modules(root)
        for node in module.tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and "ContextVar" in ast.unparse(node)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    }


def _may_be_endless(module: Module, call: ast.Call, variables: set[str]) -> bool:
    name, given = ast.unparse(call.func), ast.unparse(call)
    if not isinstance(call.func, ast.Attribute) or "timeout" in {each.arg for each in call.keywords}:
        return False
    if name in ("os.waitpid", "os.waitid"):
        return "WNOHANG" not in given
    method, receiver = call.func.attr, ast.unparse(call.func.value)
    return (
        name in _RUNS
        or method == "communicate"
        or (method == "wait" and not call.args)
        or (method == "get" and not call.args and "import queue" in module.text and receiver not in variables)
    )
