# SPDX-License-Identifier: Apache-2.0
"""Edge: a job's worker on the device: one process without network that may read the private data.

The worker trains; the agent relays. All answers of the worker go to the host through the agent's gate, and
the worker ends when the host's connections end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
from pathlib import Path, PurePosixPath

from millpond.agent.config import AgentConfig
from millpond.base.deadline import NEVER, Deadline
from millpond.base.errors import ConnectionLost, ProtocolError, Refused
from millpond.linux import memory
from millpond.linux.confinement.sandbox import Bind, Sandbox, python_binds, system_binds
from millpond.linux.confinement.sandboxed_process import end
from millpond.linux.progress import HANG_SECONDS, processor_time
from millpond.linux.zygote.client import Zygote
from millpond.train.protocol import (
    Compute,
    Computed,
    GetInitial,
    Initial,
    PrepareWorker,
    Ready,
    Train,
    Trained,
)
from millpond.train.worker.start import start_worker
from millpond.wire.channel import Channel
from millpond.wire.framing import Head, Limits
from millpond.wire.messages import Failure, Message

log = logging.getLogger(__name__)

PREPARE_SECONDS = 300.0  # a cold ARM board needs half a minute for `import torch` alone
SEND_SECONDS = 60.0
SLOWEST = 1e6  # bytes per second, below which a transfer counts as stuck
_DIED = "the worker process died; the job's log on the device may say why"
_HANGS = "the worker process hangs: it has not used its processor for {:.1f} s"
_REPLY_WITH_PARAMETERS = (Trained, Initial)
_BULK_REQUESTS = (Train, GetInitial, Compute)


class HostLeft(ConnectionLost):
    """The host has ended its connection; its worker is of no more use."""


def check_folders(folders: tuple[str, ...]) -> None:
    """Refuse data folders that lead out of the volume."""
    for folder in folders:
        path = PurePosixPath(folder)
        if path.is_absolute() or ".." in path.parts:
            raise Refused("", "data", f"the data folder '{folder}' is not inside the volume")


class JobWorker:
    """The worker process of one job, a fork of ``zygote``. ``prepare`` comes first; then ``relay`` relays
    each bulk request.
    """

    def __init__(self, config: AgentConfig, name: str, zygote: Zygote) -> None:
        self.name = name
        ours, theirs = socket.socketpair()
        self._state: memory.SharedBuffer | None = None
        self._sums: memory.SharedBuffer | None = None
        self._channel = Channel(ours, f"the worker of {name}", limits=Limits(payload=1 << 34))
        self._size = 0
        self._busy = threading.Lock()
        with contextlib.ExitStack() as failed, theirs:
            failed.callback(self._channel.close)
            self._shared = [memory.make(f"{what} of {name}") for what in ("state", "sums")]
            failed.callback(self._close_shared)
            log_file = Path(config.state, "jobs", f"{name}.log")
            options = ["--root", config.volume, "--errors", config.privacy.errors]
            self._process = start_worker(
                zygote, _sandbox(config), log_file, theirs.fileno(), self._shared, *options
            )
            failed.pop_all()

    def prepare(self, request: PrepareWorker, host: Channel) -> Ready:
        """Have the worker build the model and load its data. Raises Refused with the worker's reason."""
        try:
            self._channel.send(request, Deadline.after(SEND_SECONDS))
            self._wait_for_worker(host, Deadline.after(PREPARE_SECONDS))
            ready = self._channel.expect(Ready, Deadline.after(SEND_SECONDS))
        except HostLeft:
            raise
        except ConnectionLost:
            raise Refused("", "worker", _DIED) from None
        self._size = 4 * ready.size
        if request.role == "steps":
            try:
                os.ftruncate(self._shared[0], self._size)
                self._state, self._sums = (memory.map_second(d, self._size) for d in self._shared)
            except (OSError, ValueError) as error:
                raise ProtocolError(f"{self._channel.peer}: {error}") from None
        return ready

    def relay(self, host: Channel) -> None:
        """Relay bulk requests and replies until the host closes. Raises RemoteError."""
        buffer = bytearray(self._size)
        with self._busy:
            while True:
                request = host.receive(NEVER)
                if not isinstance(request.message, _BULK_REQUESTS):
                    raise ProtocolError(f"'{request.message.NAME}' has no place on a bulk connection")
                if isinstance(request.message, Compute):
                    self._compute(request, host)
                    continue
                self._forward(request.message, request.payload_size, host, self._channel, buffer)
                self._wait_for_worker(host, NEVER)
                try:
                    reply = self._channel.receive(NEVER)
                except ConnectionLost:
                    host.send(Failure("worker", _DIED), Deadline.after(SEND_SECONDS))
                    raise
                if not isinstance(reply.message, (*_REPLY_WITH_PARAMETERS, Failure)):
                    raise ProtocolError(f"the worker sent '{reply.message.NAME}', which may not leave")
                self._forward(reply.message, reply.payload_size, self._channel, host, buffer)

    def _compute(self, request: Head, host: Channel) -> None:
        """Relay a step: the state and the sums lie in memory that the agent and the worker share."""
        state, sums = self._state, self._sums
        if request.payload_size != self._size or state is None or sums is None:
            raise ProtocolError(f"{host.peer} sent {request.payload_size} bytes of state, not {self._size}")
        deadline = Deadline.after(SEND_SECONDS + self._size / SLOWEST)
        host.receive_into(state.data, deadline)
        self._channel.send(request.message, deadline)
        self._wait_while_busy(host)
        try:
            reply = self._channel.receive(Deadline.after(SEND_SECONDS))
        except ConnectionLost:
            host.send(Failure("worker", _DIED), Deadline.after(SEND_SECONDS))
            raise
        if not isinstance(reply.message, (Computed, Failure)) or reply.payload_size:
            raise ProtocolError(f"the worker sent '{reply.message.NAME}', which may not leave")
        payload = sums.part(0, self._size) if isinstance(reply.message, Computed) else b""
        host.send(reply.message, Deadline.after(SEND_SECONDS + self._size / SLOWEST), payload)

    def _forward(
        self, message: Message, size: int, source: Channel, target: Channel, buffer: bytearray
    ) -> None:
        if size not in (0, len(buffer)):
            raise ProtocolError(f"{source.peer} sent {size} bytes of parameters; the model has {len(buffer)}")
        payload = memoryview(buffer)[:size]
        seconds = SEND_SECONDS + size / SLOWEST
        source.receive_into(payload, Deadline.after(seconds))
        target.send(message, Deadline.after(seconds), payload)

    def _wait_for_worker(self, host: Channel, deadline: Deadline) -> None:
        """Wait until the worker answers, or raise ConnectionLost as soon as the host has gone."""
        self._poll(host, deadline)
        deadline.remaining()

    def _poll(self, host: Channel, deadline: Deadline) -> bool:
        """Return whether the worker has answered before the deadline. Raises HostLeft."""
        poll = select.poll()
        poll.register(self._channel.sock, select.POLLIN)
        poll.register(host.sock, select.POLLIN)
        left = deadline.remaining()
        ready = {descriptor for descriptor, _ in poll.poll(None if left is None else left * 1000)}
        if ready and self._channel.sock.fileno() not in ready:
            raise HostLeft("the host left while the worker was busy")
        return bool(ready)

    def _wait_while_busy(self, host: Channel) -> None:
        """Wait for the worker as long as it uses its processor: all others wait in this step, too."""
        seen = None
        while not self._poll(host, Deadline.after(HANG_SECONDS)):
            now = processor_time(self._process.pid)
            if now is not None and now == seen:
                text = _HANGS.format(HANG_SECONDS)
                log.warning("job %s: %s", self.name, text)
                host.send(Failure("worker", text), Deadline.after(SEND_SECONDS))
                raise ConnectionLost(text)
            seen = now

    def stop(self) -> None:
        """Kill the worker: nothing it holds is worth keeping."""
        self._channel.close()
        self._close_shared()
        end(self._process)

    def _close_shared(self) -> None:
        for descriptor in self._shared:
            os.close(descriptor)


def _sandbox(config: AgentConfig) -> Sandbox:
    volume = Path(config.volume)
    return Sandbox(
        binds=(*system_binds(), *python_binds(), Bind(volume, volume)),
        own_network=True,
        own_pids=True,
        uid=config.users.worker,
    )
