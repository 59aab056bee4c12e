# SPDX-License-Identifier: Apache-2.0
"""Pure: make all texts of a peer's message fit for logs and terminals."""

from __future__ import annotations

import dataclasses
import sys
from typing import TypeVar, cast

from millpond.base.text import printable

T = TypeVar("T")


def cleaned(data: T, longest: int = sys.maxsize) -> T:
    """Return a message, or other plain data, whose texts have no control characters but tabs and are
    shortened to ``longest`` characters: fields, keys, and what is in tuples, lists, tables and dataclasses.
    """
    return cast(T, _cleaned(data, longest))


def _cleaned(value: object, longest: int) -> object:
    if isinstance(value, str):
        is_fit = value.isprintable() and len(value) <= longest
        return value if is_fit else printable(value, min(longest, len(value)), kept="\t")
    if isinstance(value, (tuple, list)):
        items = [_cleaned(item, longest) for item in value]
        is_same = all(new is old for new, old in zip(items, value, strict=True))
        return value if is_same else type(value)(items)
    if isinstance(value, dict):
        return {_cleaned(key, longest): _cleaned(item, longest) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        new = {name: _cleaned(getattr(value, name), longest) for name in names}
        changes = {name: item for name, item in new.items() if item is not getattr(value, name)}
        return dataclasses.replace(value, **changes) if changes else value
    return value
