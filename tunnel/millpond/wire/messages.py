"""Pure: what a message is. Each component declares its own; the registry knows them by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, TypeVar


class Kind(StrEnum):
    """What bytes that cross the link are, for the privacy ledger."""

    CONTROL = "control"
    METRICS = "metrics"
    PARAMETERS = "parameters"
    VOLUME = "volume"
    LAUNCHED = "launched"  # what a launched script prints, and what it sends by itself


class Message:
    """Base of all messages: frozen dataclasses of plain data."""

    __slots__ = ()
    NAME: ClassVar[str]
    KIND: ClassVar[Kind] = Kind.CONTROL
    PAYLOAD_KIND: ClassVar[Kind] = Kind.CONTROL


M = TypeVar("M", bound=type[Message])
_registry: dict[str, type[Message]] = {}


def message(name: str, kind: Kind = Kind.CONTROL, payload: Kind | None = None) -> Callable[[M], M]:
    """Class decorator: register a message under its ``name`` on the wire, with its kinds."""

    def register(cls: M) -> M:
        if name in _registry:
            raise ValueError(f"two messages are named {name}")
        cls.NAME, cls.KIND, cls.PAYLOAD_KIND = name, kind, payload or kind
        _registry[name] = cls
        return cls

    return register


def registered(name: str) -> type[Message]:
    """The class of a message by its name on the wire. Raises KeyError."""
    return _registry[name]


@message("ok")
@dataclass(frozen=True, slots=True)
class Ok(Message):
    """Done; nothing to say."""


@message("failure")
@dataclass(frozen=True, slots=True)
class Failure(Message):
    """The request is refused: ``code`` is a short stable word, ``text`` one line for a person."""

    code: str
    text: str
