# SPDX-License-Identifier: Apache-2.0
"""Edge: the folder into which the files come that a launch's workers have saved."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from millpond.base.errors import ProtocolError
from millpond.host.api.launch import LaunchSaved
from millpond.train.distributed.launch_messages import check_path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_LONGEST = 200


@dataclass(slots=True)
class _Open:
    """A file that is being written, in its folder under another name."""

    descriptor: int
    folder: int
    name: str
    left: int

    @property
    def part(self) -> str:
        return f".{self.name[:_LONGEST]}.part"

    def finish(self) -> None:
        """Give the whole file its name, in the place of whatever had it."""
        os.replace(self.part, self.name, src_dir_fd=self.folder, dst_dir_fd=self.folder)
        self.close()

    def close(self) -> None:
        for descriptor in (self.descriptor, self.folder):
            os.close(descriptor)

    def drop(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.part, dir_fd=self.folder)
        self.close()


class OutputFolder:
    """A folder with one for each worker, made where it is missing. A file appears in it when it is whole. No
    link below it is followed. Raises OSError.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._open: dict[str, _Open] = {}

    def __enter__(self) -> OutputFolder:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Drop files of which not all has come."""
        for file in self._open.values():
            file.drop()
        os.close(self._root)

    def write(self, part: LaunchSaved, data: bytes) -> None:
        """Write a part of a file; those of one come in order. Raises ConfigError for a bad name."""
        check_path(f"{part.worker}/{part.path}")
        if part.start == 0:
            self._begin(part)
        file = self._open.get(part.worker)
        if file is None or len(data) > file.left:
            raise ProtocolError("the host daemon sent parts of files out of order")
        view = memoryview(data)
        while view:
            view = view[os.write(file.descriptor, view) :]
        file.left -= len(data)
        if not file.left:
            del self._open[part.worker]
            file.finish()

    def _begin(self, part: LaunchSaved) -> None:
        if unfinished := self._open.pop(part.worker, None):
            unfinished.drop()
        *folders, name = f"{part.worker}/{part.path}".split("/")
        folder = os.dup(self._root)
        try:
            for each in folders:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(each, dir_fd=folder)
                below = os.open(each, _FOLDER, dir_fd=folder)
                os.close(folder)
                folder = below
            file = _Open(-1, folder, name, part.size)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file.part, dir_fd=folder)
            file.descriptor = os.open(file.part, _FILE, 0o666, dir_fd=folder)
        except OSError:
            os.close(folder)
            raise
        self._open[part.worker] = file
