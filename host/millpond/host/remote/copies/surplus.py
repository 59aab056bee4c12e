# SPDX-License-Identifier: Apache-2.0
"""Edge (a volume): the files of a copy's target that its source does not have."""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Iterable, Iterator, Mapping

from millpond.fs.vfs.path_adapter import BulkPathAdapter
from millpond.fs.vfs.path_api import Attributes
from millpond.host.remote.copies import unfinished
from millpond.host.remote.copies.rules import Exclusions


class Surplus:
    """Knows what each directory on the ``volume`` is to hold, and what it has held before the copy."""

    def __init__(self, volume: BulkPathAdapter) -> None:
        self._volume = volume
        self._expected: dict[str, tuple[str, frozenset[str]]] = {}
        self._found: list[tuple[str, str, Attributes]] = []

    def expect(self, folder: str, inside: str, names: Iterable[str]) -> None:
        """Expect these names in a directory, which lies ``inside`` that which is copied."""
        self._expected[folder] = inside, frozenset(names)

    def there(self, folder: str, found: Mapping[str, Attributes]) -> None:
        """Note what a directory has."""
        if folder not in self._expected:
            return
        inside, names = self._expected.pop(folder)
        for name in found.keys() - names:
            self._found.append((f"{inside}/{name}".lstrip("/"), f"{folder}/{name}", found[name]))

    def found(self, kept: Exclusions) -> Iterator[tuple[str, Attributes]]:
        """Yield what is to be deleted, by name: not what is excluded, nor what another copy is writing."""
        for inside, path, attributes in sorted(self._found, key=lambda each: each[1]):
            if kept.match(inside, stat.S_ISDIR(attributes.mode)):
                continue
            if not unfinished.is_temporary(path.rpartition("/")[2]):
                yield path, attributes
                continue
            with unfinished.held(self._volume.shown(path)) as is_left:
                if is_left:
                    yield path, attributes

    def remove(self, path: str, attributes: Attributes) -> int:
        """Delete a file, or a directory with all in it. Returns how many there were. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISDIR(attributes.mode):
                self._volume.unlink(path)
                return 1
            return self._remove_tree(path)
        return 0

    def _remove_tree(self, top: str) -> int:
        folders, count = [top], 0
        for folder in folders:
            for name, attributes in list(self._volume.list_attributes(folder)):
                path = f"{folder}/{name}"
                if stat.S_ISDIR(attributes.mode):
                    folders.append(path)
                else:
                    self._volume.unlink(path)
                    count += 1
        for folder in reversed(folders):
            self._volume.rmdir(folder)
        return count + len(folders)
