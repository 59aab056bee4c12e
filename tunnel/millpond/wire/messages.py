# SPDX-License-Identifier: Apache-2.0
"""Pure: define the base of messages and their registry by name; each component declares its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from enum import StrEnum
from typing import Any, ClassVar, TypeVar, dataclass_transform


class Kind(StrEnum):
    """The kinds of bytes that the privacy ledger counts."""

    CONTROL = "control"
    METRICS = "metrics"
    PARAMETERS = "parameters"
    VOLUME = "volume"
    LAUNCHED = "launched"  # output of a launched script, and its own traffic


class Message:
    """Base of all messages: frozen dataclasses of plain data, with slots.

    It has what ``dataclass`` would write for each class anew, which takes the greater part of the time in
    which a short command is loaded.
    """

    __slots__ = ()
    __match_args__: ClassVar[tuple[str, ...]] = ()
    NAME: ClassVar[str]
    KIND: ClassVar[Kind] = Kind.CONTROL
    PAYLOAD_KIND: ClassVar[Kind] = Kind.CONTROL

    def __setattr__(self, name: str, value: object) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")

    def _values(self) -> tuple[object, ...]:
        return tuple(getattr(self, name) for name in self.__match_args__)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Message) and type(other) is type(self):
            return self._values() == other._values()
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self._values())

    def __repr__(self) -> str:
        fields = zip(self.__match_args__, self._values(), strict=True)
        return f"{type(self).__qualname__}({', '.join(f'{name}={value!r}' for name, value in fields)})"


M = TypeVar("M", bound=type[Message])
_registry: dict[str, type[Message]] = {}


@dataclass_transform(frozen_default=True)
def message(name: str, kind: Kind = Kind.CONTROL, payload: Kind | None = None) -> Callable[[M], M]:
    """Return a class decorator that makes a message a frozen dataclass with slots, unless it is one, and
    registers it under its ``name`` on the wire, with its kinds.
    """

    def register(cls: M) -> M:
        if name in _registry:
            raise ValueError(f"two messages are named {name}")
        if "__dataclass_fields__" not in vars(cls):
            cls = message_base(cls)
        cls.NAME, cls.KIND, cls.PAYLOAD_KIND = name, kind, payload or kind
        _registry[name] = cls
        return cls

    return register


@dataclass_transform(frozen_default=True)
def message_base(cls: M) -> M:
    """Make a base of messages with common fields, which is no message itself, as ``message`` makes these."""
    made: Any = dataclasses.dataclass(init=False, repr=False, eq=False, slots=True)(cls)
    fields = dataclasses.fields(made)
    given = [f"{field.name}={field.name}" if _has_default(field) else field.name for field in fields]
    steps = [f" _store_(self, {field.name!r}, {field.name})\n" for field in fields]
    known = {"_store_": object.__setattr__} | {field.name: field.default for field in fields}
    exec(f"def __init__({', '.join(['self', *given])}):\n{''.join(steps) or ' pass'}", known)  # noqa: S102
    made.__init__ = known["__init__"]
    return made  # type: ignore[no-any-return]


def _has_default(field: dataclasses.Field[Any]) -> bool:
    if field.default_factory is not dataclasses.MISSING:
        raise TypeError(f"the message field {field.name} has a default_factory")
    return field.default is not dataclasses.MISSING


def registered(name: str) -> type[Message]:
    """Return the class of a message by its name on the wire. Raises KeyError."""
    return _registry[name]


@message("ok")
class Ok(Message):
    """The request succeeded; there is no result."""


@message("failure")
class Failure(Message):
    """The request is refused: ``code`` is a short stable word, ``text`` one line for a person."""

    code: str
    text: str
