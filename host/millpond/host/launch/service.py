# SPDX-License-Identifier: Apache-2.0
"""Edge (threads): launches of scripts: a worker on the host and one on each device, which end together.

A launch belongs to the connection of its command: all workers end when that connection or this process ends.
"""

from __future__ import annotations

import contextlib
import queue
import select
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from millpond.base.deadline import NEVER, Deadline
from millpond.base.errors import ConfigError, ConnectionLost, MillpondError, Refused, RemoteError
from millpond.base.text import printable
from millpond.host.api.launch import LaunchEnded, LaunchOutput, StartLaunch, WorkerEnd
from millpond.host.fleet.device import Device
from millpond.host.fleet.directory import Fleet
from millpond.host.fleet.forwarding import Forwarding
from millpond.host.launch.workers import LOOK_SECONDS, LaunchWorker, Over, plan, run_on_device, run_on_host
from millpond.host.model.jobs import HOST
from millpond.wire.channel import Channel
from millpond.wire.launch_messages import check_files

READY_SECONDS = 30.0
END_SECONDS = 10.0
WAITING = 256
"""Pieces of output that may wait for the client; then the scripts wait."""


@dataclass(frozen=True, slots=True)
class LaunchEvent:
    """A worker printed ``lines``, exited with ``code``, or was lost for ``reason``."""

    worker: LaunchWorker
    lines: tuple[str, ...] = ()
    code: int | None = None
    reason: str = ""


class LaunchService:
    """All launches of the daemon. A device takes part in one at a time."""

    def __init__(self, fleet: Fleet, devices: Mapping[str, Device], forwarding: Forwarding) -> None:
        self._fleet, self._devices, self._forwarding = fleet, devices, forwarding
        self._lock = threading.Lock()
        self._reserved: set[str] = set()

    def run(self, request: StartLaunch, client: Channel) -> None:
        """Run a launch to its end and send all its output to ``client``. Raises LocalError, RemoteError."""
        check_files(request.script, request.files)
        names = self._names(request)
        with self._reserve(names):
            self._wait_ready(names, client)
            with self._forwarding.between(names):
                workers = plan(self._fleet, request, names)
                client.send(_Launch(workers, self._devices, client).run(), NEVER)

    def _names(self, request: StartLaunch) -> tuple[str, ...]:
        names = request.devices or tuple(self._devices)
        for name in names:
            if name not in self._devices:
                known = ", ".join(self._devices) or "none"
                raise Refused("", "unknown", f"there is no device '{name}'; the fleet has {known}")
            if names.count(name) > 1:
                raise ConfigError(f"'{name}' is named twice")
        if not names and not request.host:
            raise ConfigError("there is nobody to run the script: no device, and not the host")
        return names

    @contextlib.contextmanager
    def _reserve(self, names: Sequence[str]) -> Iterator[None]:
        with self._lock:
            if busy := self._reserved.intersection(names):
                raise Refused("", "state", f"{', '.join(sorted(busy))}: in another launch already")
            self._reserved.update(names)
        try:
            yield
        finally:
            with self._lock:
                self._reserved.difference_update(names)

    def _wait_ready(self, names: Sequence[str], client: Channel) -> None:
        deadline = Deadline.after(READY_SECONDS)
        for name in names:
            while not self._devices[name].wait_ready(Deadline.after(0.5)):
                _check_present(client)
                if deadline.passed:
                    raise RemoteError(f"{name} is not ready: {self._devices[name].status.reason}")


class _Launch:
    """One launch, from its start to the end of all its workers."""

    def __init__(
        self, workers: Sequence[LaunchWorker], devices: Mapping[str, Device], client: Channel
    ) -> None:
        self._workers, self._devices, self._client = workers, devices, client
        self._events: queue.Queue[LaunchEvent] = queue.Queue(WAITING)
        self._over = Over()
        self._codes: dict[str, int] = {}

    def run(self) -> LaunchEnded:
        """Run the workers and pass on their output. Raises ConnectionLost when the client leaves."""
        began = time.monotonic()
        threads = [
            threading.Thread(target=self._work, args=(worker,), name=f"launch {worker.name}", daemon=True)
            for worker in self._workers
        ]
        try:
            for thread in threads:
                thread.start()
            error = self._follow()
        finally:
            self._over.end()
            for thread in threads:
                thread.join(END_SECONDS)
        ends = tuple(WorkerEnd(p.name, p.launch.rank, self._codes.get(p.name)) for p in self._workers)
        return LaunchEnded(ends, error, time.monotonic() - began)

    def _follow(self) -> str:
        """Follow the workers until all have exited with 0, or the first has not. Returns the error, or ""."""
        error = ""
        while not error and len(self._codes) < len(self._workers):
            _check_present(self._client)
            with contextlib.suppress(queue.Empty):
                error = self._take(self._events.get(timeout=LOOK_SECONDS))
        self._over.end()
        with contextlib.suppress(queue.Empty):
            while True:  # output from before the end
                self._show(self._events.get_nowait())
        return error

    def _take(self, event: LaunchEvent) -> str:
        self._show(event)
        if event.code is not None:
            self._codes[event.worker.name] = event.code
        if not event.code and not event.reason:
            return ""
        how = event.reason or f"it ended with exit code {event.code}"
        others = "; the others were ended" if len(self._workers) > 1 else ""
        return f"{event.worker.name} (rank {event.worker.launch.rank}): {how}{others}"

    def _show(self, event: LaunchEvent) -> None:
        if event.lines:
            self._client.send(LaunchOutput(event.worker.name, event.lines), NEVER)

    def _work(self, worker: LaunchWorker) -> None:
        """Run one worker to its end, in a thread of its own."""

        def show(lines: tuple[str, ...]) -> None:
            self._put(LaunchEvent(worker, lines))

        try:
            if worker.name == HOST:
                code = run_on_host(worker, show, self._over)
            else:
                code = run_on_device(worker, self._devices[worker.name], show, self._over)
            self._put(LaunchEvent(worker, code=code))
        except (MillpondError, OSError) as error:
            self._put(LaunchEvent(worker, reason=printable(str(error))))

    def _put(self, event: LaunchEvent) -> None:
        while not self._over:
            with contextlib.suppress(queue.Full):
                self._events.put(event, timeout=LOOK_SECONDS)
                return


def _check_present(client: Channel) -> None:
    """Raise ConnectionLost if the client has closed its connection: it sends nothing else during a launch."""
    if select.select([client.sock], [], [], 0)[0]:
        raise ConnectionLost("whoever launched a script has left")
