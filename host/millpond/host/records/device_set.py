# SPDX-License-Identifier: Apache-2.0
"""Pure: sets of devices as users write them, ``csd0``, ``csd[0-3,7]`` or ``@fast``, and names folded into
such a text.

The syntax is a part of ClusterShell's.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from millpond.base.errors import LocalError

ALL = "all"
"""The name of the group of all devices."""
MOST = 10_000
"""Numbers in a range, and names in a term."""
_COMMA_OUTSIDE = re.compile(r",(?![^\[\]]*\])")
_NUMBERS = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_NUMBERED = re.compile(r"(.*?)([0-9]+)([^0-9]*)")


def is_one(text: str) -> bool:
    """Return whether a text is written as the name of one device."""
    return bool(text) and not any(character in text for character in ",[]@")


def expand(text: str, known: Sequence[str], groups: Mapping[str, str]) -> tuple[str, ...]:
    """Return the devices that a text names, each once, in its order. ``groups`` are texts by name. Raises
    LocalError for a wrong text, an unknown group, and a device that is not ``known``.
    """
    names = tuple(dict.fromkeys(_names(text, known, groups)))
    if not names:
        raise LocalError(f"'{text}' names no device")
    for name in names:
        if name not in known:
            raise LocalError(f"there is no device '{name}'; the fleet has {', '.join(known) or 'none'}")
    return names


def _names(text: str, known: Sequence[str], groups: Mapping[str, str]) -> Iterator[str]:
    for term in _terms(text):
        if not term.startswith("@"):
            yield from _range(term, text)
        elif (group := term[1:]) == ALL:
            yield from known
        elif group in groups:
            yield from members(groups[group])
        else:
            there = ", ".join(f"@{name}" for name in (ALL, *groups))
            raise LocalError(
                f"there is no group '{term}'; there are {there}; [groups] in fleet.toml has them"
            )


def members(text: str) -> tuple[str, ...]:
    """Return the names that the text of a group holds. Raises LocalError for a wrong text."""
    terms = _terms(text)
    if any(term.startswith("@") for term in terms):
        raise LocalError(f"'{text}': a group holds devices, no groups")
    return tuple(name for term in terms for name in _range(term, text))


def _terms(text: str) -> list[str]:
    return [term.strip() for term in _COMMA_OUTSIDE.split(text) if term.strip()]


def _range(term: str, text: str) -> Iterator[str]:
    """Yield the names of a term such as ``csd[0-3,7]``. Raises LocalError, quoting the whole ``text``."""
    parts = re.split(r"\[([^\[\]]*)\]", term)
    if any(character in part for part in parts[::2] for character in "[]@"):
        raise LocalError(f"'{text}': write devices as csd0,csd1 or csd[0-3,7], groups as @fast")
    numbers = [_numbers(part, text) for part in parts[1::2]]
    if math.prod(map(len, numbers)) > MOST:
        raise LocalError(f"'{text}': '{term}' names more than {MOST} devices")
    for chosen in itertools.product(*numbers):
        yield "".join(itertools.chain.from_iterable(zip(parts[::2], (*chosen, ""), strict=True)))


def _numbers(ranges: str, text: str) -> list[str]:
    found = list[str]()
    for part in ranges.split(","):
        matched = _NUMBERS.fullmatch(part.strip())
        first, last = (matched[1], matched[2] or matched[1]) if matched else ("", "")
        if not matched or int(last) < int(first) or len(found) + int(last) - int(first) >= MOST:
            raise LocalError(f"'{text}': '[{ranges}]' is no range; write numbers as in csd[0-3,7]")
        width = len(first) if first.startswith("0") else 0
        found += [f"{number:0{width}}" for number in range(int(first), int(last) + 1)]
    return found


def fold(names: Iterable[str]) -> str:
    """Return the shortest text that ``expand`` takes for these names: ``csd[0-3,7]``."""
    found: dict[tuple[str, str, int], list[int]] = {}
    plain = dict[str, None]()
    for name in dict.fromkeys(names):
        matched = _NUMBERED.fullmatch(name)
        if matched is None or len(matched[2]) > 9:  # more digits than a range takes
            plain[name] = None
            continue
        width = len(matched[2]) if matched[2].startswith("0") and matched[2] != "0" else 0
        found.setdefault((matched[1], matched[3], width), []).append(int(matched[2]))
    return ",".join([*(_folded(*key, sorted(numbers)) for key, numbers in found.items()), *plain])


def _folded(before: str, behind: str, width: int, numbers: Sequence[int]) -> str:
    runs = list[list[int]]()
    for number in numbers:
        if runs and runs[-1][1] + 1 == number:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [
        f"{first:0{width}}" if first == last else f"{first:0{width}}-{last:0{width}}" for first, last in runs
    ]
    inside = ",".join(texts)
    return f"{before}{inside}{behind}" if len(numbers) == 1 else f"{before}[{inside}]{behind}"
