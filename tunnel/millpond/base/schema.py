# SPDX-License-Identifier: Apache-2.0
"""Pure: convert plain data to frozen dataclasses and back, checking every type. For messages
and TOML files.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from millpond.base.errors import ConfigError

T = TypeVar("T")

# The place of a value: text, or the place around it and the parts of its own name. Only errors need the text.
_Where = str | tuple[Any, ...]
_Converter = Callable[[Any, _Where, bool], Any]


def load(cls: type[T], data: object, where: _Where, *, strict: bool = True) -> T:
    """Build dataclass ``cls`` from mapping ``data``.

    Raises ConfigError naming ``where`` and the key: unknown (if ``strict``; the nearest known one is named),
    missing, or of the wrong type.
    """
    if type(data) is not dict and not isinstance(data, Mapping):
        raise _wrong(where, "a table", data)
    fields = _fields(typing.cast(Any, cls))
    values: dict[str, Any] = {}
    for key, value in data.items():
        if type(value) is fields.scalars.get(key):  # most are
            values[key] = value
            continue
        convert = fields.converters.get(key)
        if convert is not None:
            values[key] = convert(value, (where, ": ", key), strict)
        elif strict:
            raise ConfigError(f"{_text(where)}: unknown key '{key}'{nearest(str(key), fields.converters)}")
    for name in fields.required:
        if name not in values:
            raise ConfigError(f"{_text(where)}: missing key '{name}'")
    return cls(**values)


def dump(value: object) -> Any:
    """Convert a dataclass, tuple, dict or scalar to plain data, from which ``load`` gives the same value."""
    kind: Any = type(value)
    if kind in _NAMES:
        return value
    if (names := _field_names(kind)) is not None:
        return {name: item if type(item := getattr(value, name)) in _NAMES else dump(item) for name in names}
    if isinstance(value, (tuple, list)):
        return [dump(item) for item in value]
    if isinstance(value, Mapping):
        return {key: dump(item) for key, item in value.items()}
    return value


def _text(where: _Where) -> str:
    return where if isinstance(where, str) else _text(where[0]) + "".join(map(str, where[1:]))


def _wrong(where: _Where, expected: str, value: object) -> ConfigError:
    return ConfigError(f"{_text(where)}: expected {expected}, got {_kind(value)}")


@dataclasses.dataclass(frozen=True, slots=True)
class _Fields:
    """The fields of a dataclass: how the value of each is converted, which are required, and the types of
    scalar fields, whose values need no conversion if they have that type.
    """

    converters: dict[str, _Converter]
    required: tuple[str, ...]
    scalars: dict[str, type]


@functools.cache
def _fields(cls: Any) -> _Fields:
    hints, fields = typing.get_type_hints(cls), dataclasses.fields(cls)
    required = tuple(field.name for field in fields if _required(field))
    converters = {field.name: _converter(hints[field.name]) for field in fields}
    return _Fields(converters, required, {name: hints[name] for name in converters if hints[name] in _NAMES})


@functools.cache
def _field_names(kind: type) -> tuple[str, ...] | None:
    """Return the names of a dataclass's fields, None for another type."""
    return tuple(_fields(kind).converters) if dataclasses.is_dataclass(kind) else None


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def nearest(key: str, known: Collection[str]) -> str:
    """Return the end of an error about an unknown key: the nearest known one, or all of them."""
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(known)}"


def _converter(hint: Any) -> _Converter:
    """Make the converter of a field, once per field. Not cached by hint: int | float and float | int are
    equal, and convert differently.
    """
    if hint is Any:
        return lambda value, _where, _strict: value
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _union(args)
    if origin is typing.Literal:
        return functools.partial(_literal, args)
    if origin is tuple:
        return _tuple(args)
    if origin is dict:
        return _dict(_converter(args[0]), _converter(args[1]))
    if dataclasses.is_dataclass(hint):
        return lambda value, where, strict: load(typing.cast("type[Any]", hint), value, where, strict=strict)
    return functools.partial(_scalar, hint)


def _union(args: tuple[Any, ...]) -> _Converter:
    optional = type(None) in args
    *others, last = (_converter(arg) for arg in args if arg is not type(None))

    def convert(value: object, where: _Where, strict: bool) -> Any:
        if value is None and optional:
            return None
        for other in others:
            try:
                return other(value, where, strict)
            except ConfigError:
                continue
        return last(value, where, strict)

    return convert


def _literal(args: tuple[Any, ...], value: object, where: _Where, _strict: bool) -> Any:
    for arg in args:
        if type(value) is type(arg) and value == arg:  # True and 1.0 equal 1, and have other types
            return arg
    raise ConfigError(f"{_text(where)}: {value!r:.40} is not one of {', '.join(map(str, args))}")


def _tuple(args: tuple[Any, ...]) -> _Converter:
    alike = len(args) == 2 and args[1] is Ellipsis
    converters = [_converter(arg) for arg in args if arg is not Ellipsis]

    def convert(value: object, where: _Where, strict: bool) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)):
            raise _wrong(where, "a list", value)
        if alike:
            each = converters[0]
            return tuple([each(item, (where, "[", i, "]"), strict) for i, item in enumerate(value)])
        if len(converters) != len(value):
            raise ConfigError(f"{_text(where)}: expected {len(converters)} values, got {len(value)}")
        return tuple(each(item, where, strict) for each, item in zip(converters, value, strict=True))

    return convert


def _dict(key_of: _Converter, item_of: _Converter) -> _Converter:
    def convert(value: object, where: _Where, strict: bool) -> dict[Any, Any]:
        if not isinstance(value, Mapping):
            raise _wrong(where, "a table", value)
        return {
            key_of(key, where, strict): item_of(item, (where, ".", key), strict)
            for key, item in value.items()
        }

    return convert


def _scalar(hint: Any, value: object, where: _Where, _strict: bool) -> Any:
    if type(value) is hint:
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return _float(value, where)
    raise _wrong(where, _NAMES.get(hint, hint), value)


def _float(value: int, where: _Where) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ConfigError(f"{_text(where)}: the number has too many digits") from None


_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false", bytes: "bytes"}


def _kind(value: object) -> str:
    return f"{_NAMES.get(type(value), type(value).__name__)} ({value!r:.40})"
