# SPDX-License-Identifier: Apache-2.0
"""Two sides of a copy, on this machine, and volumes that fail."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.store.bulk_files import BackingBulk
from millpond.fs.vfs.path_adapter import BulkPathAdapter
from millpond.fs.vfs.path_api import MAX_TRANSFER, Attributes, Handle, os_error
from millpond.host.remote.copies.copying import Copier
from millpond.host.remote.copies.rules import CopyRules
from millpond.host.remote.copies.small_copies import Copied

MIB = 1 << 20


class Failing(BulkPathAdapter):
    """A volume whose writes fail after so many."""

    fail_after = 1 << 30
    writes = 0

    def write(self, handle: Handle, data: bytes, offset: int) -> int:
        self.writes += 1
        if self.writes > self.fail_after:
            raise os_error(errno.EIO)
        return super().write(handle, data[: MAX_TRANSFER // 2 + 1], offset)  # short, as a volume may


class Closed(BulkPathAdapter):
    """A volume with a directory that nobody may list."""

    closed = ""

    def list_attributes(self, path: str) -> Iterator[tuple[str, Attributes]]:
        if self.closed and path.endswith(self.closed):
            raise os_error(errno.EACCES)
        return super().list_attributes(path)


class Sides:
    """A folder here and one there, as volumes."""

    def __init__(self, base: Path) -> None:
        self.here, self.there = base / "here", base / "there"
        for folder in (self.here, self.there):
            folder.mkdir()
        self.roots = [os.open(folder, os.O_PATH | os.O_DIRECTORY) for folder in (self.here, self.there)]
        here, there = (BackingFs(root) for root in self.roots)
        self.source = Closed(here, BackingBulk(here), "/")
        self.target = Failing(there, BackingBulk(there), "csd0:")
        self.told: list[int] = []

    def copy(self, source: str, target: str, *, recursive: bool = False, **rules: Any) -> Copied:
        done = Copied()
        with self.copier(done, **rules) as copier:
            items = copier.plan(source, target, recursive=recursive)
            assert not list(copier.copy(items, self.told.append))
        return done

    def copier(self, done: Copied | None = None, **rules: Any) -> Copier:
        return Copier(self.source, self.target, done or Copied(), rules=CopyRules(**rules))


def code(call: Callable[..., object], *arguments: object, **more: object) -> int | None:
    try:
        call(*arguments, **more)
    except OSError as error:
        return error.errno
    return None


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def sides(tmp_path: Path) -> Iterator[Sides]:
    made = Sides(tmp_path)
    yield made
    for root in made.roots:
        os.close(root)
