# SPDX-License-Identifier: Apache-2.0
"""Pure: the fields of dataclasses as rows of a table: type, default, range and meaning."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, Field
from typing import Any

from documents.markdown import code, table
from millpond.base.keys import MOST, Key, keys_of

_NAMES = {str: "text", int: "integer", float: "number", bool: "`true` or `false`", bytes: "bytes", Any: "any"}
HEADINGS = ("key", "type", "default", "range", "meaning")


def keys(cls: Any, names: dict[str, str] | None = None) -> str:
    """Return the table of the keys of a TOML table, but of those that are tables themselves."""
    hints = typing.get_type_hints(cls)
    rows = [
        (code(field.name), kind(hints[field.name]), default(field), bounds(key), key.about)
        for field, key in zip(fields(cls), keys_in_order(cls), strict=True)
        if not inner(hints[field.name])
    ]
    return table(HEADINGS, [(*row[:-1], row[-1] or (names or {}).get(row[0].strip("`"), "")) for row in rows])


def fields(cls: Any) -> list[Field[Any]]:
    """Return the fields of a dataclass in the order of its constructor."""
    return sorted(dataclasses.fields(cls), key=lambda field: field.kw_only is True)


def keys_in_order(cls: Any) -> list[Key]:
    """Return the keys of the fields."""
    known = keys_of(cls)
    return [known[field.name] for field in fields(cls)]


def members(cls: Any) -> str:
    """Return the table of the fields of a document, which has all of them."""
    hints = typing.get_type_hints(cls)
    rows = [(code(field.name), kind(hints[field.name], "null")) for field in fields(cls)]
    return table(("field", "type"), rows) if rows else ""


def inner(hint: Any) -> Any:
    """Return the dataclass of a field that is a table, or a list of tables; None for another."""
    found = [hint, *typing.get_args(hint)]
    return next((each for each in found if dataclasses.is_dataclass(each)), None)


def inner_tables(cls: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tables in a document by their headings, such as ``[train]`` and ``[[device]]``."""
    for field in fields(cls):
        hint = typing.get_type_hints(cls)[field.name]
        if found := inner(hint):
            name = f"{above}{field.name}"
            yield (f"[[{name}]]" if typing.get_origin(hint) is tuple else f"[{name}]"), found
            yield from inner_tables(found, f"{name}.")


def kind(hint: Any, none: str = "") -> str:
    """Return the words for a type, with those for what is not there, if there are any."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in _NAMES:
        return _NAMES[hint]
    if origin in (types.UnionType, typing.Union):
        words = dict.fromkeys(kind(arg, none) for arg in args if arg is not type(None))
        return " or ".join([*words, *([none] if none and type(None) in args else [])])
    if origin is typing.Literal:
        return ", ".join(code(json.dumps(arg)) for arg in args)
    if origin is tuple:
        return (
            f"list of {kind(args[0], none)}"
            if args[1:] == (...,)
            else f"({', '.join(kind(arg, none) for arg in args)})"
        )
    if origin is dict:
        return "table" if args[1] is Any else f"table of {kind(args[1], none)}"
    return f"{hint.__name__}" if isinstance(hint, type) else str(hint)


def default(field: Field[Any]) -> str:
    """Return a default as TOML writes it; "required" without one."""
    if field.default_factory is not MISSING:
        value = field.default_factory()
        return "" if dataclasses.is_dataclass(value) else code(json.dumps(value))
    if field.default is MISSING:
        return "required"
    return "none" if field.default is None else _shown(field.default)


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return code(json.dumps(list(value), default=str))
    return str(value) if dataclasses.is_dataclass(value) else code(json.dumps(value, default=str))


def bounds(key: Key) -> str:
    """Return the range of a number."""
    below = "" if key.most >= MOST else f"{key.most:.10g}"
    if key.above is not None:
        return f"above {key.above:.10g}" + (f", at most {below}" if below else "")
    if key.least is not None:
        return f"{key.least:.10g} to {below}" if below else f"at least {key.least:.10g}"
    return ""
