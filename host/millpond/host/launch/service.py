# SPDX-License-Identifier: Apache-2.0
"""Edge (threads): launches of scripts: a worker on the host and one on each device, which end together.

A launch belongs to the connection of its command: all workers end when that connection or this process ends.
"""

from __future__ import annotations

import contextlib
import os
import queue
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from millpond.base.deadline import NEVER, Deadline
from millpond.base.errors import (
    ConfigError,
    ConnectionLost,
    LocalError,
    MillpondError,
    Refused,
    RemoteError,
)
from millpond.base.text import printable
from millpond.host.api.launch import (
    EVERYONE,
    LaunchEnded,
    LaunchOutput,
    LaunchSaved,
    StartLaunch,
    WorkerEnd,
)
from millpond.host.fleet.device import Device
from millpond.host.fleet.directory import Fleet
from millpond.host.fleet.forwarding import Forwarding
from millpond.host.launch.data_services import DataRequests
from millpond.host.launch.group import LaunchGroup, serve_channel
from millpond.host.launch.inputs import LaunchInputs
from millpond.host.launch.shared import SharedFolder
from millpond.host.launch.workers import (
    LOOK_SECONDS,
    HostPlace,
    LaunchEvent,
    LaunchWorker,
    Over,
    WorkerRun,
    plan,
)
from millpond.host.records.failures import reason_of
from millpond.host.records.jobs import HOST
from millpond.launch.shared_mount import clear
from millpond.linux import sockets
from millpond.linux.zygote.client import Zygote
from millpond.train.distributed.launch_messages import (
    AllSaved,
    check_files,
    check_start,
    check_transforms_file,
)
from millpond.wire.channel import Channel
from millpond.wire.framing import Head

READY_SECONDS = 30.0
END_SECONDS = 10.0
COLLECT_SECONDS = 30.0
"""Time without anything from workers that were ended and whose files are wanted."""
WAITING = 256
"""Pieces of output that may wait for the client; then the scripts wait."""


class LaunchService:
    """All launches of the daemon. A device takes part in one at a time. The host's workers are forks of
    ``zygote``, and see the public part of a volume that ``volume`` has mounted.
    """

    def __init__(
        self,
        fleet: Fleet,
        devices: Mapping[str, Device],
        forwarding: Forwarding,
        zygote: Zygote,
        volume: Callable[[str], Path],
    ) -> None:
        self._fleet, self._devices, self._forwarding = fleet, devices, forwarding
        self._zygote, self._volume = zygote, volume
        self._lock = threading.Lock()
        self._reserved: set[str] = set()
        clear(fleet.shared_folders)

    def run(self, request: StartLaunch, client: Channel) -> None:
        """Run a launch to its end and send all its output to ``client``. Raises LocalError, RemoteError."""
        with _shared(request, client) as folder, LaunchInputs(self._fleet.directory) as inputs:
            if request.inputs:
                inputs.receive(client)
            self._run(request, folder, inputs, client)

    def _run(self, request: StartLaunch, folder: int | None, inputs: LaunchInputs, client: Channel) -> None:
        installed = bool(request.module) and not request.confined
        check_files(request.script, request.files, installed=installed)
        check_start(request.processes, dict(request.variables))
        if request.transforms:
            check_transforms_file(request.transforms, request.files)
        names = self._names(request)
        inputs.check([*([HOST] if request.host else []), *names])
        with self._reserve(names):
            self._wait_ready(names, client)
            public = {name: self._volume(name) / "public" for name in names} if request.host else {}
            reached = () if request.confined else names
            with (
                self._forwarding.between(reached, host=request.host and not request.confined) as opened,
                self._serving(folder) as shared,
            ):
                place = HostPlace(self._zygote, public, inputs, opened, shared)
                workers = plan(self._fleet, request, names)
                opened.reserve(workers[0].launch.master_port)
                client.send(_Launch(workers, self._devices, place, client).run(), NEVER)

    @contextlib.contextmanager
    def _serving(self, folder: int | None) -> Iterator[SharedFolder | None]:
        """Serve an open folder inside the context, if there is one. Raises LocalError."""
        if folder is None:
            yield None
            return
        try:
            shared = SharedFolder(folder, self._fleet.shared_folders)
        except OSError as error:
            raise LocalError(f"the shared folder cannot be served: {error.strerror}") from None
        with contextlib.closing(shared):
            yield shared

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
        more = request.inputs or request.variables or request.shares or request.processes != 1
        if request.confined and (more or request.transforms):
            raise ConfigError(
                "--private is for a script and its files alone: no --input, --wheels, --env, --shared, "
                "--nproc-per-node, --transforms"
            )
        if request.confined and not request.host:
            raise ConfigError("--private needs the host as rank 0, whose model all begin with: no --no-host")
        return names

    @contextlib.contextmanager
    def without(self, name: str) -> Iterator[None]:
        """Begin no launch with a device inside the context. Raises Refused while one takes part."""
        with self._lock:
            if name in self._reserved:
                raise Refused("", "state", f"{name} takes part in a launch")
            yield

    @contextlib.contextmanager
    def _reserve(self, names: Sequence[str]) -> Iterator[None]:
        with self._lock:
            if busy := self._reserved.intersection(names):
                raise Refused(
                    "",
                    "state",
                    f"{', '.join(sorted(busy))}: in another launch already; 'millpond devices' tells which",
                )
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


@contextlib.contextmanager
def _shared(request: StartLaunch, client: Channel) -> Iterator[int | None]:
    """Receive the descriptor of the folder that the workers are to share, if they are; it is closed in the
    end. Raises RemoteError.
    """
    if not request.shares:
        yield None
        return
    client.sock.settimeout(END_SECONDS)
    try:
        (folder,) = sockets.receive_descriptors(client.sock, 1)
    except OSError as error:
        raise ConnectionLost(f"no folder came to share: {error.strerror or error}") from None
    try:
        if not stat.S_ISDIR(os.fstat(folder).st_mode):
            raise ConfigError("only a folder can be shared")
        yield folder
    finally:
        os.close(folder)


class _Launch:
    """One launch, from its start to the end of all its workers."""

    def __init__(
        self,
        workers: Sequence[LaunchWorker],
        devices: Mapping[str, Device],
        place: HostPlace,
        client: Channel,
    ) -> None:
        self._workers, self._devices, self._place, self._client = workers, devices, place, client
        self._events: queue.Queue[LaunchEvent] = queue.Queue(WAITING)
        self._over = Over()
        self._group = LaunchGroup(len(workers), self._note, self._fail)
        self._data = DataRequests(workers, devices, self._over)
        self._wants_files = workers[0].launch.most_saved > 0
        self._codes: dict[str, int] = {}
        self._counts: dict[str, AllSaved] = {}
        self._running = len(workers)
        self._error = ""

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
            self._follow()
        finally:
            self._over.end()
            self._group.end()
            self._data.close()
            for thread in threads:
                thread.join(END_SECONDS)
        return LaunchEnded(tuple(map(self._end_of, self._workers)), self._error, time.monotonic() - began)

    def _end_of(self, worker: LaunchWorker) -> WorkerEnd:
        code, count = self._codes.get(worker.name), self._counts.get(worker.name) or AllSaved(0, 0, 0)
        numbers = (count.files, count.size, count.left_out, count.named)
        return WorkerEnd(worker.name, worker.launch.rank, code, *numbers)

    def _follow(self) -> None:
        """Follow the workers until all are done. After the first failure the others are ended, at once if
        nothing that they have saved is wanted.
        """
        quiet_since = time.monotonic()
        while self._running:
            _check_present(self._client)
            with contextlib.suppress(queue.Empty):
                self._take(self._events.get(timeout=LOOK_SECONDS))
                quiet_since = time.monotonic()
            if not self._error:
                continue
            if not self._wants_files or time.monotonic() - quiet_since > COLLECT_SECONDS:
                break
            self._over.stopping = True
            self._group.end(LOOK_SECONDS)  # not longer: that thread may wait for room in the queue
        self._over.end()
        with contextlib.suppress(queue.Empty):
            while True:  # output from before the end
                self._show(self._events.get_nowait())

    def _take(self, event: LaunchEvent) -> None:
        self._show(event)
        self._running -= event.done
        if event.worker is None:
            return
        if event.count:
            self._counts[event.worker.name] = event.count
        if self._error:
            return  # the others were ended
        if event.code is not None:
            self._codes[event.worker.name] = event.code
        if event.code or event.reason:
            how = event.reason or f"it ended with exit code {event.code}"
            others = "; the others were ended" if len(self._workers) > 1 else ""
            self._error = f"{event.worker.name} (rank {event.worker.launch.rank}): {how}{others}"

    def _show(self, event: LaunchEvent) -> None:
        name = event.worker.name if event.worker else EVERYONE
        if event.lines:
            self._client.send(LaunchOutput(name, event.lines), NEVER)
        if event.saved:
            part, data = event.saved
            self._client.send(LaunchSaved(name, part.path, part.start, part.size), NEVER, data)

    def _work(self, worker: LaunchWorker) -> None:
        """Run one worker to its end, in a thread of its own."""
        run = WorkerRun(worker, self._place, self._over, self._put)
        try:
            if worker.name == HOST:
                count = run.on_host(partial(self._serve, worker))
            else:
                count = run.on_device(self._devices[worker.name], partial(self._answer, worker))
            self._put(LaunchEvent(worker, done=True, count=count))
        except (MillpondError, OSError) as error:
            self._put(LaunchEvent(worker, reason=printable(reason_of(error, worker.name)), done=True))
        if run.ended:
            self._group.leave(worker.launch.rank)

    def _serve(self, worker: LaunchWorker, channel: Channel) -> None:
        """Answer the requests of a script on the host until it ends."""
        if worker.launch.confined:
            serve_channel(self._group, worker.launch.rank, channel)
        else:
            self._data.serve(worker.name, channel)

    def _answer(self, worker: LaunchWorker, agent: Channel, head: Head) -> bool:
        """Answer a request of a script on a device; return False if the launch is over."""
        if worker.launch.confined:
            return self._group.serve(worker.launch.rank, agent, head, asked=True)
        agent.send(self._data.answer(worker.name, head.message), Deadline.after(END_SECONDS))
        return True

    def _note(self, text: str) -> None:
        self._put(LaunchEvent(None, (printable(text),)))

    def _fail(self, rank: int, text: str) -> None:
        self._put(LaunchEvent(self._workers[rank], reason=printable(text)))

    def _put(self, event: LaunchEvent) -> None:
        while not self._over:
            with contextlib.suppress(queue.Full):
                self._events.put(event, timeout=LOOK_SECONDS)
                return


def _check_present(client: Channel) -> None:
    """Raise ConnectionLost if the client has closed its connection: it sends nothing else during a launch."""
    if sockets.readable([client.sock], 0.0):
        raise ConnectionLost("the command that launched the script has left")
