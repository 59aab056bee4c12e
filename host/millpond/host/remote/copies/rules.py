# SPDX-License-Identifier: Apache-2.0
"""Pure: what a user wants of a copy: files that are left out, as by rsync's --exclude, and others deleted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True)
class Exclusions:
    """Patterns with ``*``, ``?`` and ``[...]``. One without a slash is compared with names, another one with
    paths below the directory that is copied; one that ends with a slash is for directories alone.
    """

    patterns: Sequence[str] = ()

    def match(self, path: str, is_directory: bool) -> bool:
        """Return whether a file, by its ``path`` below the directory that is copied, is left out."""
        return any(_matches(pattern, path, is_directory) for pattern in self.patterns)


def _matches(pattern: str, path: str, is_directory: bool) -> bool:
    if pattern.endswith("/") and not is_directory:
        return False
    wanted = pattern.rstrip("/")
    if "/" in wanted:
        return fnmatchcase(path, wanted.lstrip("/"))
    return fnmatchcase(path.rpartition("/")[2], wanted)


@dataclass(frozen=True, slots=True)
class CopyRules:
    """The rules of a copy: it leaves out ``excluded`` files, compares contents (``checksum``), ``deletes``
    what the source does not have, and keeps the part of a file that it was writing at its end (``keeps``).
    ``mask`` are the permissions that files may have. ``is_ended`` is asked again and again; ``found`` is
    called with the number of files that are listed, now and then.
    """

    excluded: Exclusions = field(default_factory=Exclusions)
    checksum: bool = False
    deletes: bool = False
    keeps: bool = False
    mask: int = 0o777
    is_ended: Callable[[], bool] = lambda: False
    found: Callable[[int], None] = lambda _count: None


class CopyEnded(Exception):
    """A user has ended the copy."""
