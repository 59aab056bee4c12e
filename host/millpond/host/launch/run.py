# SPDX-License-Identifier: Apache-2.0
"""Edge (threads): the run of one launch, from the start of its workers to the end of all.

The first worker that fails ends the others, unless torch's elastic agents run the script: then each ends by
itself, and a device that was lost runs it again once it is ready.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial

from millpond.base.deadline import NEVER, Deadline
from millpond.base.errors import (
    ConnectionLost,
    LocalError,
    MillpondError,
    ProtocolError,
    Refused,
    RemoteError,
)
from millpond.base.text import printable
from millpond.host.api.launch import (
    EVERYONE,
    EndLaunch,
    LaunchEnded,
    LaunchLost,
    LaunchOutput,
    LaunchSaved,
    LaunchWaits,
    RestartLaunch,
    WorkerEnd,
)
from millpond.host.fleet.device import Device
from millpond.host.launch.data_services import DataRequests
from millpond.host.launch.group import LaunchGroup, serve_channel
from millpond.host.launch.preparation import LaunchPreparation
from millpond.host.launch.workers import (
    LOOK_SECONDS,
    HostPlace,
    LaunchEvent,
    LaunchWorker,
    Over,
    WorkerRun,
)
from millpond.host.records.failures import reason_of
from millpond.host.records.jobs import HOST
from millpond.linux import sockets
from millpond.train.distributed.launch_messages import AllSaved
from millpond.wire.channel import Channel
from millpond.wire.framing import Head

END_SECONDS = 10.0
COLLECT_SECONDS = 30.0
"""Time without anything from workers that were ended and whose files are wanted."""
RETRY_SECONDS = 1.0
WAITING = 256
"""Pieces of output that may wait for the client; then the scripts wait."""


class LaunchRun:
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
        inputs = self._place.inputs
        self._preparing = LaunchPreparation(
            {each.name: inputs.size(each.name) if each.launch.inputs else 0 for each in workers}
        )
        self._codes: dict[str, int] = {}
        self._counts: dict[str, AllSaved] = {}
        self._running = len(workers)
        self._elastic = workers[0].launch.elastic is not None
        self._lost: dict[str, str] = {}
        self._error = ""
        self._joined = self._ending = self._waits = False

    def run(self, joined: bool = False) -> LaunchEnded:
        """Run the workers and pass on their output. Those that have ``joined`` workers of other hosts heed
        what the client says of these. Raises ConnectionLost when the client leaves.
        """
        began, self._joined = time.monotonic(), joined
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
        if self._lost and not self._codes and not self._error:
            self._error = "; ".join(f"{name}: {reason}" for name, reason in self._lost.items())
        return LaunchEnded(tuple(map(self._end_of, self._workers)), self._error, time.monotonic() - began)

    def _end_of(self, worker: LaunchWorker) -> WorkerEnd:
        code, count = self._codes.get(worker.name), self._counts.get(worker.name) or AllSaved(0, 0, 0)
        numbers = (count.files, count.size, count.left_out, count.named)
        return WorkerEnd(worker.name, worker.launch.rank, code, *numbers)

    def _follow(self) -> None:
        """Follow the workers until all are done. After the first failure the others are ended, at once if
        nothing that they have saved is wanted, or if none of them has begun.
        """
        quiet_since = time.monotonic()
        while self._running or self._waits_for_lost():
            self._tell_waits()
            self._heed_client()
            if news := self._preparing.news():
                self._client.send(news, NEVER)
            with contextlib.suppress(queue.Empty):
                self._take(self._events.get(timeout=LOOK_SECONDS))
                quiet_since = time.monotonic()
            if self._elastic or not (self._error or self._ending):
                continue
            is_quiet = time.monotonic() - quiet_since > COLLECT_SECONDS
            if not self._wants_files or is_quiet or self._running <= self._preparing.waiting:
                break
            self._over.stopping = True
            self._group.end(LOOK_SECONDS)  # not longer: that thread may wait for room in the queue
        self._over.end()
        with contextlib.suppress(queue.Empty):
            while True:  # output from before the end
                self._show(self._events.get_nowait())

    def _waits_for_lost(self) -> bool:
        """Return whether workers of other hosts may still run, and lost ones come back to them."""
        return self._joined and bool(self._lost) and not self._ending

    def _tell_waits(self) -> None:
        """Tell the client of several hosts when only lost workers are left here, and when one is back."""
        waits = self._waits_for_lost() and not self._running
        if waits is not self._waits:
            self._waits = waits
            self._client.send(LaunchWaits(waits), NEVER)

    def _heed_client(self) -> None:
        """Heed what the client tells of the other hosts. Raises ConnectionLost if it has left."""
        if not self._joined:
            check_present(self._client)
        elif sockets.readable([self._client.sock], 0.0):
            message = self._client.receive(Deadline.after(END_SECONDS)).message
            if isinstance(message, RestartLaunch):
                self._over.restarts += 1
            elif isinstance(message, EndLaunch):
                self._ending = True
            else:
                raise ProtocolError(f"the command sent '{message.NAME}' during a launch")

    def _take(self, event: LaunchEvent) -> None:
        self._show(event)
        self._running -= event.done
        if event.worker is None:
            return
        if event.begun or event.done or event.reason or event.lost:
            self._preparing.begun(event.worker.name)
        if event.lost or event.back:
            self._take_loss(event.worker.name, event.lost)
        if event.count:
            self._counts[event.worker.name] = event.count
        if (self._error or self._ending) and not self._elastic:
            return  # the others were ended
        if event.code is not None:
            self._codes[event.worker.name] = event.code
        if (event.code or event.reason) and not self._error:
            how = event.reason or f"it ended with exit code {event.code}"
            others = (
                "; the others were ended" if event.worker.launch.world_size > 1 and not self._elastic else ""
            )
            rank = "" if self._elastic else f" (rank {event.worker.launch.rank})"
            self._error = f"{event.worker.name}{rank}: {how}{others}"

    def _take_loss(self, name: str, lost: str) -> None:
        """Note that a device is lost, or is back. The scripts of the others are started again for a loss: a
        connection whose other end has lost its power does not end by itself.
        """
        if lost:
            self._lost[name] = lost
            self._over.restarts += 1
            if self._joined:
                self._client.send(LaunchLost(), NEVER)
        else:
            del self._lost[name]
        self._running += -1 if lost else 1
        text = f"{name} is lost: {lost}" if lost else f"{name} is back"
        self._client.send(LaunchOutput(EVERYONE, (text,)), NEVER)

    def _show(self, event: LaunchEvent) -> None:
        name = event.worker.name if event.worker else EVERYONE
        if event.lines:
            self._client.send(LaunchOutput(name, event.lines), NEVER)
        if event.saved:
            part, data = event.saved
            self._client.send(LaunchSaved(name, part.path, part.start, part.size), NEVER, data)

    def _work(self, worker: LaunchWorker) -> None:
        """Run one worker to its end, in a thread of its own; an elastic one again when its device is back."""
        while not self._has_ended(worker):
            pass

    def _has_ended(self, worker: LaunchWorker) -> bool:
        """Run one worker; return whether that was its end."""
        sent = partial(self._preparing.sent, worker.name)
        run = WorkerRun(worker, self._place, self._over, self._put, sent)
        try:
            if worker.name == HOST:
                count = run.on_host(partial(self._serve, worker))
            else:
                count = run.on_device(self._devices[worker.name], partial(self._answer, worker))
            self._put(LaunchEvent(worker, done=True, count=count))
        except (MillpondError, OSError) as error:
            reason = printable(reason_of(error, worker.name))
            if self._may_return(worker, error) and not run.ended:
                self._put(LaunchEvent(worker, lost=reason))
                return not self._is_back(worker)
            self._put(LaunchEvent(worker, reason=reason, done=True))
        if run.ended:
            self._group.leave(worker.launch.rank)
        return True

    def _may_return(self, worker: LaunchWorker, error: Exception) -> bool:
        """Return whether an elastic worker is to run again: all meet at the first one."""
        is_loss = not isinstance(error, Refused | ProtocolError | LocalError)
        return self._elastic and is_loss and worker.name != HOST and worker.launch.rank > 0

    def _is_back(self, worker: LaunchWorker) -> bool:
        """Wait until a lost device answers; return False if the launch is over before."""
        device = self._devices[worker.name]
        while not self._over.wait(RETRY_SECONDS):
            with contextlib.suppress(RemoteError, OSError):
                if device.wait_ready(Deadline.after(LOOK_SECONDS)):
                    device.control(Deadline.after(END_SECONDS)).close()
                    self._put(LaunchEvent(worker, back=True))
                    return True
        return False

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


def check_present(client: Channel) -> None:
    """Raise ConnectionLost if the client has closed its connection: it sends nothing else during a launch."""
    if sockets.readable([client.sock], 0.0):
        raise ConnectionLost("the command that launched the script has left")
