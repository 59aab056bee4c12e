# SPDX-License-Identifier: Apache-2.0
"""Edge (a volume): the files of a copy's target that its source does not have."""

from __future__ import annotations

import errno
import stat
from collections.abc import Iterable, Iterator, Mapping

from millpond.fs.vfs.path_adapter import BulkPathAdapter
from millpond.fs.vfs.path_api import Attributes
from millpond.host.remote.copies import unfinished
from millpond.host.remote.copies.listings import listed
from millpond.host.remote.copies.rules import Exclusions
from millpond.host.remote.copies.small_copies import naming


class Surplus:
    """Holds the names that a copy expects in the directories on the ``volume``, and those that were there."""

    def __init__(self, volume: BulkPathAdapter) -> None:
        self._volume = volume
        self._expected: dict[str, tuple[str, frozenset[str]]] = {}
        self._found: list[tuple[str, str, Attributes]] = []

    def expect(self, folder: str, inside: str, names: Iterable[str]) -> None:
        """Expect these names in a directory, which lies ``inside`` that which is copied."""
        self._expected[folder] = inside, frozenset(names)

    def there(self, folder: str, found: Mapping[str, Attributes]) -> None:
        """Note the names in a directory."""
        if folder not in self._expected:
            return
        inside, names = self._expected.pop(folder)
        for name in found.keys() - names:
            self._found.append((f"{inside}/{name}".lstrip("/"), f"{folder}/{name}", found[name]))

    def found(self, kept: Exclusions) -> Iterator[tuple[str, Attributes]]:
        """Yield what is to be deleted, by name, a directory behind what is in it: not what is excluded, nor
        what another copy is writing. Raises OSError.
        """
        for top, at, known in sorted(self._found, key=lambda each: each[1]):
            left, folders = [(top, at, known)], list[tuple[str, Attributes]]()
            while left:
                inside, path, attributes = left.pop()
                is_folder = stat.S_ISDIR(attributes.mode)
                if kept.match(inside, is_folder):
                    continue
                if not is_folder:
                    yield from self._unless_written(path, attributes)
                    continue
                folders.append((path, attributes))
                left += [(f"{inside}/{name}", f"{path}/{name}", each) for name, each in self._listed(path)]
            yield from reversed(folders)

    def _unless_written(self, path: str, attributes: Attributes) -> Iterator[tuple[str, Attributes]]:
        """Yield a file, unless another copy is writing it; no copy begins to until it is deleted."""
        if not unfinished.is_temporary(path.rpartition("/")[2]):
            yield path, attributes
            return
        with unfinished.held(self._volume.shown(path)) as is_left:
            if is_left:
                yield path, attributes

    def _listed(self, folder: str) -> list[tuple[str, Attributes]]:
        with naming(self._volume, folder):
            try:
                return list(listed(self._volume, folder))
            except (FileNotFoundError, NotADirectoryError):  # another program has changed it
                return []

    def remove(self, path: str, attributes: Attributes) -> int:
        """Delete a file, or a directory unless something is kept in it. Returns how many. Raises OSError."""
        try:
            (self._volume.rmdir if stat.S_ISDIR(attributes.mode) else self._volume.unlink)(path)
        except FileNotFoundError:
            return 0
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            return 0
        return 1
