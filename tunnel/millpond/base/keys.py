# SPDX-License-Identifier: Apache-2.0
"""Pure: what a document's key is about, and the bounds of its value, beside its type."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping
from typing import Any

from millpond.base.errors import ConfigError

MOST = 1e9


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """A key's meaning in a few words, and the bounds of its numbers, in a field's type:
    ``Annotated[int, Key("samples of a batch", above=0)]``. An ``example`` is shown where the default tells
    little.
    """

    about: str = ""
    least: float | None = None
    most: float = MOST
    above: float | None = None
    example: str = ""

    def fault(self, value: object) -> str:
        """Return what is wrong with a value, "" if nothing is. Only numbers have bounds."""
        if type(value) not in (int, float):
            return ""
        number = typing.cast(float, value)
        if self.above is not None and not self.above < number <= self.most:
            return f"{value} is not greater than {self.above:g} and at most {self.most:g}"
        if self.least is not None and not self.least <= number <= self.most:
            return f"{value} is not between {self.least:.10g} and {self.most:.10g}"
        return ""


@functools.cache
def keys_of(cls: Any) -> Mapping[str, Key]:
    """Return the keys of a dataclass by its fields' names; of a field without one, an empty one."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: _key(hints[field.name]) for field in dataclasses.fields(cls)}


def _key(hint: Any) -> Key:
    return next((each for each in getattr(hint, "__metadata__", ()) if isinstance(each, Key)), Key())


def check_keys(document: Any, where: str) -> None:
    """Check the values of a dataclass, and of those in it. Raises ConfigError, naming the key."""
    kind: Any = type(document)
    for name, key in keys_of(kind).items():
        value = getattr(document, name)
        if fault := key.fault(value):
            raise ConfigError(f"{where}: {name}: {fault}")
        if dataclasses.is_dataclass(value):
            check_keys(value, f"{where}: {name}")
        for number, item in enumerate(value if isinstance(value, tuple) else ()):
            if dataclasses.is_dataclass(item):
                check_keys(item, f"{where}: {name}[{number}]")
