# SPDX-License-Identifier: Apache-2.0
"""Edge (a process): a worker as the process has it that starts it, an agent or the host daemon."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost
from millpond.linux import memory
from millpond.linux.confinement.sandbox import Bind, Sandbox
from millpond.linux.confinement.sandboxed_process import end
from millpond.linux.limits.process_limits import REFUSED, Shortage
from millpond.linux.logs import BoundedLog
from millpond.linux.progress import HANG_SECONDS, HangDetector
from millpond.linux.zygote.client import Zygote
from millpond.train.worker.error_reports import PROCESSES
from millpond.train.worker.start import WorkerFiles
from millpond.wire.channel import Channel
from millpond.wire.framing import Limits
from millpond.wire.messages import Failure

DEATH_SECONDS = 2.0
_STATE = Path("/state")
_STREAMING = "millpond.data.streaming.training_worker"
"""The module of workers that have streamed samples: it lies above this package."""


class HostLeft(ConnectionLost):
    """The host has ended its connection; its worker is of no more use."""


class WorkerHangs(ConnectionLost):
    """The worker neither computes nor reads."""


class StreamConnections(Protocol):
    """Gives a worker that asks at its socket ``asked`` connections to a data service."""

    asked: socket.socket

    def close(self) -> None:
        """End the connections."""


class WorkerHandle:
    """A worker's process, a fork of ``zygote`` in ``sandbox``, where it sees the job's ``files``, and the
    folder ``kept`` for what stays. It is reached by ``channel``, shares its memories for ``states``, made
    here unless given, and for ``values``, prints to ``log``, and asks ``streams`` for samples. Raises
    OSError.
    """

    def __init__(
        self,
        name: str,
        zygote: Zygote,
        sandbox: Sandbox,
        files: WorkerFiles,
        log: Path,
        options: Sequence[str],
        *,
        peer: str,
        states: int | None = None,
        kept: Path | None = None,
        streams: StreamConnections | None = None,
        limits: Limits = Limits(),  # noqa: B008 - it is frozen
    ) -> None:
        self.name, self._streams, self._refusals = name, streams, 0
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours, peer, limits=limits)
        with contextlib.ExitStack() as failed, theirs:
            failed.callback(self._disconnect)
            self.states = self._memory(f"states of {name}") if states is None else states
            self.values = self._memory(f"values of {name}")
            passed, entry = [theirs.fileno(), self.states, self.values], ""
            arguments = ["3", "--shared", "4", "5", *files.options, *options]
            if kept:
                sandbox = replace(
                    sandbox, binds=(*(sandbox.binds or ()), Bind(kept, _STATE, read_only=False))
                )
                arguments += ["--state", str(_STATE)]
            if streams:
                arguments += ["--streams", "6"]
                passed, entry = [*passed, streams.asked.fileno()], _STREAMING
            output = BoundedLog(log)
            try:
                self._process = zygote.start(
                    files.shown_in(sandbox), arguments, passed, output.writer, entry=entry
                )
            finally:
                output.close_writer()
            failed.pop_all()
        if streams:
            streams.asked.close()

    def _memory(self, name: str) -> int:
        descriptor = memory.make(name)
        weakref.finalize(self, os.close, descriptor)
        return descriptor

    @property
    def pid(self) -> int:
        """The process id of the outermost process of the sandbox."""
        return self._process.pid

    def wait(self, deadline: Deadline, host: Channel | None = None, *, computes: bool = True) -> None:
        """Wait for the worker's answer. Raises HostLeft as soon as the ``host`` has gone, DeadlineExceeded,
        and WorkerHangs for one that ``computes`` until then, and stops.
        """
        detector, poll = HangDetector(self.pid), select.poll()
        own = self.channel.sock.fileno()
        for descriptor in (own, *([host.sock.fileno()] if host else [])):
            poll.register(descriptor, select.POLLIN)
        while own not in (ready := [number for number, _ in poll.poll(1000 * HANG_SECONDS)]):
            if ready:
                raise HostLeft("the host left while the worker was busy")
            deadline.remaining()
            if computes and detector.is_hung():
                raise WorkerHangs(f"the worker '{self.name}' hangs: it neither computes nor reads")

    def begin(self) -> None:
        """Note that a request begins: errors in it are no consequence of what was refused before."""
        self._refusals = self._process.refusals

    def shortage(self, patience: float = DEATH_SECONDS) -> Failure | None:
        """Return the memory that the worker has run out of, None if it has not. Waits for its end at most
        ``patience`` seconds.
        """
        found = self._process.shortage(patience)
        return Failure(found.value, found.text) if found else None

    def of_death(self, text: str) -> Failure:
        """Return the report of a worker whose channel has ended: its shortage of memory, or else ``text``."""
        return self.shortage() or self.hinted(Failure("worker", text))

    def of_error(self, failure: Failure) -> Failure | None:
        """Return the shortage of which a worker's own report is a consequence, None if it is none: a
        descendant was killed for memory, or in this request a process was refused, as the report says.
        """
        if failure.code == PROCESSES and self._process.refusals > self._refusals:
            return Failure(PROCESSES, Shortage.PROCESSES.text)
        return self.shortage(0.0)

    def hinted(self, failure: Failure) -> Failure:
        """Return a report with the hint that the worker was refused processes before, if it was."""
        return replace(failure, text=f"{failure.text}; {REFUSED}") if self._process.refusals else failure

    def close(self) -> None:
        """End the process: nothing that it holds is worth keeping."""
        self.channel.close()
        end(self._process)
        self._disconnect()

    def _disconnect(self) -> None:
        self.channel.close()
        if self._streams:
            self._streams.close()
