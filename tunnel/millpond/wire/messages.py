# SPDX-License-Identifier: Apache-2.0
"""Pure: define the base of messages and their registry by name; each component declares its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, TypeVar


class Kind(StrEnum):
    """The kinds of bytes that the privacy ledger counts."""

    CONTROL = "control"
    METRICS = "metrics"
    PARAMETERS = "parameters"
    VOLUME = "volume"
    LAUNCHED = "launched"  # output of a launched script, and its own traffic


class Message:
    """Base of all messages: frozen dataclasses of plain data."""

    __slots__ = ()
    NAME: ClassVar[str]
    KIND: ClassVar[Kind] = Kind.CONTROL
    PAYLOAD_KIND: ClassVar[Kind] = Kind.CONTROL


M = TypeVar("M", bound=type[Message])
_registry: dict[str, type[Message]] = {}


def message(name: str, kind: Kind = Kind.CONTROL, payload: Kind | None = None) -> Callable[[M], M]:
    """Return a class decorator that registers a message under its ``name`` on the wire, with its kinds."""

    def register(cls: M) -> M:
        if name in _registry:
            raise ValueError(f"two messages are named {name}")
        cls.NAME, cls.KIND, cls.PAYLOAD_KIND = name, kind, payload or kind
        _registry[name] = cls
        return cls

    return register


def registered(name: str) -> type[Message]:
    """Return the class of a message by its name on the wire. Raises KeyError."""
    return _registry[name]


@message("ok")
@dataclass(frozen=True, slots=True)
class Ok(Message):
    """The request succeeded; there is no result."""


@message("failure")
@dataclass(frozen=True, slots=True)
class Failure(Message):
    """The request is refused: ``code`` is a short stable word, ``text`` one line for a person."""

    code: str
    text: str
