# SPDX-License-Identifier: Apache-2.0
"""Edge: starts workers, as forks of a zygote that has loaded torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from millpond.linux.confinement.sandbox import Bind, Sandbox
from millpond.linux.logs import BoundedLog
from millpond.linux.zygote.client import Child, Zygote

_CODE, _WHEELS = Path("/code"), Path("/wheels")


def workers_zygote(idle: float) -> Zygote:
    """The zygote of all workers of a daemon. It keeps torch for ``idle`` seconds after the last of them."""
    return Zygote("millpond.train.worker.process", "millpond.train.worker.preloaded", idle=idle)


@dataclass(frozen=True, slots=True)
class WorkerFiles:
    """A folder with the files of a job, which its workers see as ``/code``, and one with its unpacked wheels,
    if it has any, which they see as ``/wheels``.
    """

    folder: Path
    wheels: Path | None = None

    def shown_in(self, sandbox: Sandbox) -> Sandbox:
        """Return the sandbox with the files in it."""
        wheels = (Bind(self.wheels, _WHEELS),) if self.wheels else ()
        return replace(sandbox, binds=(*(sandbox.binds or ()), Bind(self.folder, _CODE), *wheels))

    @property
    def options(self) -> tuple[str, ...]:
        """The options of the worker's process."""
        return ("--code", str(_CODE), *(("--wheels", str(_WHEELS)) if self.wheels else ()))


def start_worker(
    zygote: Zygote,
    sandbox: Sandbox,
    files: WorkerFiles,
    log: Path,
    channel: int,
    shared: Sequence[int],
    *options: str,
) -> Child:
    """Start a worker on its end of a channel and its two shared memories. Raises OSError."""
    arguments = ["3", "--shared", "4", "5", *files.options, *options]
    output = BoundedLog(log)
    try:
        return zygote.start(files.shown_in(sandbox), arguments, [channel, *shared], output.writer)
    finally:
        output.close_writer()
