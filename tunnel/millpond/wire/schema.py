"""Pure: frozen dataclasses from plain data and back, every type checked. For messages and TOML files."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from millpond.wire.errors import ConfigError

T = TypeVar("T")


def load(cls: type[T], data: object, where: str, *, strict: bool = True) -> T:
    """Build dataclass ``cls`` from mapping ``data``.

    Raises ConfigError naming ``where`` and the key: unknown (if ``strict``; the nearest known one is named),
    missing, or of the wrong type.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where}: expected a table, got {_kind(data)}")
    hints = _hints(typing.cast(Any, cls))
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key in hints:
            values[key] = _convert(hints[key], value, f"{where}: {key}", strict)
        elif strict:
            raise ConfigError(f"{where}: unknown key '{key}'{_nearest(str(key), hints)}")
    missing = [f.name for f in dataclasses.fields(cls) if _required(f) and f.name not in values]  # type: ignore[arg-type]
    if missing:
        raise ConfigError(f"{where}: missing key '{missing[0]}'")
    return cls(**values)


def dump(value: object) -> Any:
    """The plain data of a dataclass, tuple, dict or scalar; ``load`` gives the same value back."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: dump(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [dump(item) for item in value]
    if isinstance(value, Mapping):
        return {key: dump(item) for key, item in value.items()}
    return value


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    names = {f.name for f in dataclasses.fields(cls)}
    return {name: hint for name, hint in typing.get_type_hints(cls).items() if name in names}


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _nearest(key: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else f"; known: {', '.join(known)}"


def _convert(hint: Any, value: object, where: str, strict: bool) -> Any:
    if hint is Any:
        return value
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _convert_union(args, value, where, strict)
    if origin is typing.Literal:
        return _convert_literal(args, value, where)
    if origin is tuple:
        return _convert_tuple(args, value, where, strict)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: expected a table, got {_kind(value)}")
        return {
            _convert(args[0], key, where, strict): _convert(args[1], item, f"{where}.{key}", strict)
            for key, item in value.items()
        }
    if dataclasses.is_dataclass(hint):
        return load(typing.cast("type[Any]", hint), value, where, strict=strict)
    return _convert_scalar(hint, value, where)


def _convert_union(args: tuple[Any, ...], value: object, where: str, strict: bool) -> Any:
    if value is None and type(None) in args:
        return None
    rest = [arg for arg in args if arg is not type(None)]
    for arg in rest[:-1]:
        try:
            return _convert(arg, value, where, strict)
        except ConfigError:
            continue
    return _convert(rest[-1], value, where, strict)


def _convert_literal(args: tuple[Any, ...], value: object, where: str) -> Any:
    for arg in args:
        if type(value) is type(arg) and value == arg:  # True and 1.0 equal 1, and are not it
            return arg
    raise ConfigError(f"{where}: {value!r:.40} is not one of {', '.join(map(str, args))}")


def _convert_tuple(args: tuple[Any, ...], value: object, where: str, strict: bool) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{where}: expected a list, got {_kind(value)}")
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_convert(args[0], item, f"{where}[{i}]", strict) for i, item in enumerate(value))
    if len(args) != len(value):
        raise ConfigError(f"{where}: expected {len(args)} values, got {len(value)}")
    return tuple(_convert(arg, item, where, strict) for arg, item in zip(args, value, strict=True))


def _convert_scalar(hint: Any, value: object, where: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return _float(value, where)
    if type(value) is hint:
        return value
    raise ConfigError(f"{where}: expected {_NAMES.get(hint, hint)}, got {_kind(value)}")


def _float(value: int, where: str) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ConfigError(f"{where}: the number has too many digits") from None


_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false", bytes: "bytes"}


def _kind(value: object) -> str:
    return f"{_NAMES.get(type(value), type(value).__name__)} ({value!r:.40})"
