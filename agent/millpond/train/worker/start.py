# SPDX-License-Identifier: Apache-2.0
"""Edge: starts workers, as forks of a zygote that has loaded torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from millpond.linux.confinement.sandbox import Bind, Sandbox
from millpond.linux.limits.process_limits import ProcessLimits
from millpond.linux.logs import BoundedLog
from millpond.linux.zygote.client import Child, Zygote

_CODE, _WHEELS = Path("/code"), Path("/wheels")
_STREAMING = "millpond.data.streaming.training_worker"
"""The module of workers that have streamed samples: it lies above this package."""


def workers_zygote(idle: float, limits: ProcessLimits | None = None) -> Zygote:
    """The zygote of all workers of a daemon, each within ``limits``. It keeps torch for ``idle`` seconds
    after the last of them.
    """
    module, loaded = "millpond.train.worker.process", "millpond.train.worker.preloaded"
    return Zygote(module, loaded, idle=idle, limits=limits)


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
    streams: int | None = None,
) -> Child:
    """Start a worker on its end of a channel and its two shared memories. One with a socket for ``streams``
    asks there for connections to a data service. Raises OSError.
    """
    arguments = ["3", "--shared", "4", "5", *files.options, *options]
    passed, entry = [channel, *shared], ""
    if streams is not None:
        passed.append(streams)
        arguments += ["--streams", str(2 + len(passed))]
        entry = _STREAMING
    output = BoundedLog(log)
    try:
        return zygote.start(files.shown_in(sandbox), arguments, passed, output.writer, entry=entry)
    finally:
        output.close_writer()
