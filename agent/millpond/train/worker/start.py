# SPDX-License-Identifier: Apache-2.0
"""Edge: the zygote of workers, which has loaded torch, and the files that they see."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from millpond.linux.confinement.sandbox import Bind, Sandbox
from millpond.linux.limits.process_limits import ProcessLimits
from millpond.linux.zygote.client import Zygote

_CODE, _WHEELS = Path("/code"), Path("/wheels")


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
