# SPDX-License-Identifier: Apache-2.0
"""Edge: the files that a command sends behind a StartLaunch, kept until all workers have theirs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType
from typing import IO

from millpond.base.deadline import Deadline
from millpond.base.errors import ConfigError, LocalError, ProtocolError
from millpond.base.text import printable
from millpond.host.api.launch import EVERYONE, LaunchInput, LaunchInputsEnd
from millpond.train.distributed.launch_messages import SAVED_PART, InputPart, InputsEnd
from millpond.wire.channel import Channel, FileSlice

SECONDS = 600.0


class LaunchInputs:
    """Files for the workers of a launch, in one file without a name in ``folder``, if there are any."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: IO[bytes] | None = None
        self._parts: list[tuple[LaunchInput, FileSlice]] = []

    def __enter__(self) -> LaunchInputs:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._file:
            self._file.close()

    def receive(self, client: Channel) -> None:
        """Receive all files. Raises LocalError once all have come, if they could not be kept."""
        problem = ""
        while True:
            head = client.receive(Deadline.after(SECONDS))
            if isinstance(head.message, LaunchInputsEnd):
                break
            if not isinstance(head.message, LaunchInput):
                raise ProtocolError(f"'{head.message.NAME}' came where a launch's files belong")
            data = b""
            if head.payload_size:
                data = bytes(client.receive_payload(SAVED_PART, Deadline.after(SECONDS)))
            try:
                self._keep(head.message, data)
            except OSError as error:
                problem = problem or f"the launch's files cannot be kept: {error.strerror}"
        if problem:
            raise LocalError(problem)

    def _keep(self, part: LaunchInput, data: bytes) -> None:
        self._file = self._file or tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 - see __exit__
        descriptor = self._file.fileno()
        start = os.lseek(descriptor, 0, os.SEEK_END)
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        self._parts.append((part, FileSlice(descriptor, start, len(data))))

    def check(self, workers: Collection[str]) -> None:
        """Raise ConfigError for files of a worker that the launch does not have."""
        for part, _ in self._parts:
            if part.worker not in (*workers, EVERYONE):
                raise ConfigError(
                    f"files for '{printable(part.worker, 80)}', which is no worker of this launch; it has "
                    f"{', '.join(workers)}, and '{EVERYONE}' for files of each"
                )

    def size(self, worker: str) -> int:
        """Return the bytes of a worker's files."""
        return sum(data.size for part, data in self._parts if part.worker in (worker, EVERYONE))

    def send(self, worker: str, channel: Channel, advance: Callable[[int], None]) -> None:
        """Send a worker its files, and call ``advance`` with the bytes of each part."""
        for part, data in self._parts:
            if part.worker in (worker, EVERYONE):
                message = InputPart(part.path, part.start, part.size, part.wheel)
                channel.send(message, Deadline.after(SECONDS), data)
                advance(data.size)
        channel.send(InputsEnd(), Deadline.after(SECONDS))
