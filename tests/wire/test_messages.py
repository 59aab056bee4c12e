# SPDX-License-Identifier: Apache-2.0
"""Message classes: frozen dataclasses with slots, made without what dataclasses would write for each anew."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import pytest

from millpond.base import schema
from millpond.wire.messages import Kind, Message, message, message_base


@message_base
class Numbered(Message):
    """The base of a message."""

    number: int


@message("test.example", Kind.VOLUME)
class Example(Numbered):
    """A message."""

    LIMIT: ClassVar[int] = 3
    names: tuple[str, ...] = ()
    store: bool = False


@message("test.other")
class Other(Numbered):
    """A message with the same values as another."""


def test_a_message_is_a_frozen_dataclass_with_slots() -> None:
    made = Example(1, store=True)
    assert [field.name for field in dataclasses.fields(made)] == ["number", "names", "store"]
    assert (made.number, made.names, made.store, made.LIMIT) == (1, (), True, 3)
    assert (Example.NAME, Example.KIND, Example.PAYLOAD_KIND) == ("test.example", Kind.VOLUME, Kind.VOLUME)
    assert not hasattr(made, "__dict__")
    for change in (lambda: setattr(made, "number", 2), lambda: delattr(made, "number")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            change()
    assert dataclasses.replace(made, number=2) == Example(2, store=True)


def test_messages_are_equal_if_class_and_values_are() -> None:
    assert Example(1, ("a",)) == Example(1, ("a",))
    assert hash(Example(1, ("a",))) == hash(Example(1, ("a",)))
    assert Example(1) != Example(2)
    assert Other(1) != Numbered(1)
    assert Other(1) != 1
    assert repr(Example(1, ("a",))) == "Example(number=1, names=('a',), store=False)"


def test_a_message_requires_the_fields_without_a_default() -> None:
    assert schema.load(Example, {"number": 7}, "here") == Example(7)
    for arguments, named in (((), {}), ((1, (), True, 4), {}), ((1,), {"unknown": 1})):
        with pytest.raises(TypeError):
            Example(*arguments, **named)


def test_a_dataclass_stays_as_it_is() -> None:
    @message("test.dataclass")
    @dataclasses.dataclass(frozen=True, slots=True)
    class Made(Message):
        """A message that is a dataclass already."""

        parts: list[int] = dataclasses.field(default_factory=list)

    assert Made().parts == []
    assert Made([1]) == Made([1])
    with pytest.raises(ValueError, match=r"two messages are named test\.dataclass"):
        message("test.dataclass")(Made)


def test_a_default_made_for_each_message_is_refused() -> None:
    with pytest.raises(TypeError, match="parts has a default_factory"):

        @message("test.factory")
        class Made(Message):
            """A message."""

            parts: tuple[int, ...] = dataclasses.field(default_factory=tuple)
