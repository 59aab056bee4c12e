# SPDX-License-Identifier: Apache-2.0
"""Edge (abstract sockets): the temporary names of files that are being copied, and which are in use.

A name tells its target and the version of its source. A copy that writes such a file holds a socket of its
name, which the kernel takes back at the process's end: two copies at once never write into the same file, and
a file whose name no process holds was left by a killed copy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import AbstractContextManager

from millpond.linux.file_lock import name_held

_SHOWN_BYTES = 60
_SUFFIX = ".part"


def stem_of(name: str) -> str:
    """Return how all temporary names of the target ``name`` begin, whatever its length."""
    cut = name.encode(errors="surrogateescape")[:_SHOWN_BYTES].decode(errors="ignore")
    return f".{cut}.{_digest(name)[:8]}."


def temporary(name: str, about: str, number: int) -> str:
    """Return a temporary name of the target ``name``, for the version of a source that ``about`` tells;
    ``number`` tells copies of it apart.
    """
    return f"{stem_of(name)}{_digest(about)[:12]}{f'-{number}' * bool(number)}{_SUFFIX}"


def is_temporary(name: str) -> bool:
    """Return whether a name has the form of a temporary one."""
    return name.startswith(".") and name.endswith(_SUFFIX)


def left_of(name: str, names: Iterable[str]) -> list[str]:
    """Return the temporary names of the target ``name`` that are in ``names``."""
    stem = stem_of(name)
    return [each for each in names if each.startswith(stem) and each.endswith(_SUFFIX)]


def held(place: str) -> AbstractContextManager[bool]:
    """Hold a temporary name, with its volume, in a context. Yields False if another copy has it."""
    return name_held(f"cp {place}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
