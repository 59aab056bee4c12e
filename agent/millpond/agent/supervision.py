# SPDX-License-Identifier: Apache-2.0
"""Edge (processes): watches the agent's parts, restarts those that can be restarted alone, and tries whether
a job could run.
"""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from millpond.base.errors import LocalError
from millpond.linux.confinement.sandbox import Sandbox
from millpond.linux.confinement.sandboxed_process import end
from millpond.linux.limits.process_limits import ProcessLimits
from millpond.linux.notify import notify, watchdog_interval
from millpond.linux.zygote.client import Zygote
from millpond.linux.zygote.prepared import PreparedFork

log = logging.getLogger(__name__)
SYS_BLOCK = Path("/sys/dev/block")
_MOST_RESTARTS, _WITHIN_SECONDS = 5, 60.0
CHECK_SECONDS, FAULTY_SECONDS = 300.0, 10.0
"""From one check to the next, and while there is a fault."""
_TRIAL_SECONDS = 60.0
_TRIAL = "millpond.linux.zygote.trial"
_LONGEST_TEXT = 1 << 16


@dataclass(slots=True)
class SupervisedPart:
    """A part of the agent that must live. ``restart`` starts it anew while the others go on; without it the
    whole agent ends when the part dies, and the service manager starts the agent again.
    """

    name: str
    alive: Callable[[], bool]
    restart: Callable[[], None] | None = None
    restarts: list[float] = field(default_factory=list)
    """When the part was restarted, by the monotonic clock."""

    def ensure(self, now: float) -> None:
        """Restart the part if it has died. Raises LocalError if it cannot be restarted, or if it has been
        restarted too often by ``now``.
        """
        if self.alive():
            return
        self.restarts = [at for at in self.restarts if at > now - _WITHIN_SECONDS]
        if self.restart is None or len(self.restarts) >= _MOST_RESTARTS:
            raise LocalError(f"{self.name} died")
        log.warning("%s died, and is restarted", self.name)
        self.restarts.append(now)
        try:
            self.restart()
        except OSError as error:
            raise LocalError(f"{self.name} died, and cannot be restarted: {error}") from None


def disk_of(folder: Path) -> Callable[[], bool]:
    """Return what tells whether the disk that ``folder`` lies on now is still there: of one that is gone, the
    mount stays, and is busy as long as the agent has files on it. Raises OSError.
    """
    number = folder.stat().st_dev
    disk = SYS_BLOCK / f"{os.major(number)}:{os.minor(number)}"
    return disk.exists if disk.exists() else lambda: True  # a file system without a disk of its own


def watch(parts: Sequence[SupervisedPart], stop: threading.Event) -> None:
    """Ensure every second that all ``parts`` live, and tell the service manager so, until ``stop`` is set.
    Raises LocalError.
    """
    interval = min(watchdog_interval() or 1.0, 1.0)
    while not stop.wait(interval):
        for part in parts:
            part.ensure(time.monotonic())
        notify("WATCHDOG=1")


class SelfCheck:
    """Runs ``trials`` now and then, in a thread of its own. Each returns the reason why no job can run, "" if
    one can. Trials that cost nothing are in ``looks``, and run whenever ``fault`` is asked for.
    """

    def __init__(self, *trials: Callable[[], str]) -> None:
        self._trials, self._fault = trials, ""
        self.looks = list[Callable[[], str]]()
        self._stopped, self._wanted = False, threading.Event()
        self._thread = threading.Thread(target=self._run, name="self-check", daemon=True)
        self._thread.start()

    @property
    def fault(self) -> str:
        """The reason why no job can run here, as of the last check; "" if one can."""
        return self._fault or _first(self.looks)

    def hurry(self) -> None:
        """Check at once: something has just failed."""
        self._wanted.set()

    def stop(self) -> None:
        """Check no more."""
        self._stopped = True
        self._wanted.set()

    def _run(self) -> None:
        while not self._stopped:
            self._wanted.clear()
            found = _first(self._trials)
            if found != self._fault:
                log.log(*((logging.ERROR, "no job can run: %s", found) if found else _RECOVERED))
            self._fault = found
            self._wanted.wait(FAULTY_SECONDS if found else CHECK_SECONDS)


_RECOVERED = (logging.INFO, "jobs can run again%s", "")


def _first(trials: Sequence[Callable[[], str]]) -> str:
    return next((fault for trial in trials if (fault := _result(trial))), "")


def _result(trial: Callable[[], str]) -> str:
    try:
        return trial()
    except OSError as error:  # no memory or descriptors left, for example
        return error.strerror or str(error)
    except RuntimeError as error:  # no thread can be started
        return str(error)


def worker_fault(
    zygote: Zygote, sandbox: Sandbox, limits: ProcessLimits, prepared: PreparedFork | None = None
) -> str:
    """Return why no process starts in a sandbox and within limits as workers have, "" if one does. It is a
    fork of the workers' zygote if that has others. One that has none is left alone, or it would never end:
    the fork is that of a zygote without modules, which may be ``prepared``. Raises OSError, RuntimeError.
    """
    if zygote.is_busy:
        return fork_fault(zygote, sandbox)
    empty = Zygote(_TRIAL, idle=_TRIAL_SECONDS, limits=limits, prepared=prepared)
    try:
        return fork_fault(empty, sandbox)
    finally:
        empty.close()


def fork_fault(zygote: Zygote, sandbox: Sandbox) -> str:
    """Return why no fork of a zygote starts in a sandbox, "" if one does. Raises OSError, RuntimeError."""
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(reader, "rb", buffering=0) as output:
        try:
            process = zygote.start(sandbox, [], [], writer, entry=_TRIAL)
        finally:
            os.close(writer)
        try:
            code = process.wait(_TRIAL_SECONDS)
        except subprocess.TimeoutExpired:
            end(process)
            return f"a process in a sandbox does not end within {_TRIAL_SECONDS:.0f} s"
        lines = (output.read(_LONGEST_TEXT) or b"").decode(errors="replace").strip().splitlines()
    return f"no process starts in a sandbox: {lines[-1] if lines else f'exit code {code}'}" if code else ""
