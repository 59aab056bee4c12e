# SPDX-License-Identifier: Apache-2.0
"""Edge: workers as the daemon sees them, with one interface on a device and on the host itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from millpond.aggregate.encoding.codec import codec
from millpond.aggregate.encoding.layout import PLAIN, Encoding
from millpond.aggregate.kernels import Vector
from millpond.aggregate.masking.messages import KeyCertificate
from millpond.base.deadline import NEVER, Deadline
from millpond.base.errors import ConnectionLost, ProtocolError, Refused
from millpond.base.sizes import SLOWEST
from millpond.base.text import printable
from millpond.data.streaming.relay import StreamRelay
from millpond.host.fleet import worker_user
from millpond.host.fleet.device import Device
from millpond.host.workers.node_control import NodeControl
from millpond.linux import memory
from millpond.linux.confinement.sandbox import Bind, Sandbox, python_binds, system_binds
from millpond.linux.zygote.client import Zygote
from millpond.train import error_texts
from millpond.train.job.files import JobFile, contents
from millpond.train.protocol import (
    MOST_PERCENT,
    PART_VALUES,
    SPREAD,
    Fetch,
    FileContents,
    MissingFiles,
    Part,
    PrepareServer,
    PrepareWorker,
    Ready,
    Update,
    WarmUp,
    Work,
    WorkProgress,
)
from millpond.train.state import layout
from millpond.train.task.sums import LOSS, is_declared
from millpond.train.worker.handle import WorkerHandle
from millpond.train.worker.start import WorkerFiles
from millpond.wire.channel import Buffer, Channel, FileSlice
from millpond.wire.framing import Head, Limits
from millpond.wire.messages import Message, Ok

REPLY_SECONDS = 60.0
LOCAL_LIMITS = Limits(head=4 << 20, payload=1 << 34)
R = TypeVar("R", bound=Message)


@dataclass(frozen=True, slots=True, eq=False)
class ModelState:
    """A model's state in shared memory. It does not change during a task that computes at it."""

    memory: memory.SharedSlice

    @property
    def values(self) -> Vector:
        """The state as float32 [size]."""
        return np.frombuffer(self.memory.data, np.float32)

    @property
    def number(self) -> int:
        """The index of the state in its shared memory."""
        return self.memory.start // self.memory.size


@dataclass(frozen=True, slots=True)
class SpreadState:
    """A ``state`` that a device has from reduction nodes, and its ``digest``. If the nodes are ``ahead``, the
    host has other values, and sends none in their place.
    """

    state: ModelState
    digest: str
    ahead: bool = False


class Worker(Protocol):
    """A process that trains: prepares once, then trains from one state after the other. Every call may raise
    RemoteError; then close it.
    """

    name: str
    holds: bool
    """Whether the task under way still needs its state."""

    @property
    def percent(self) -> int:
        """The part of the task under way that is done, by the worker's word."""

    def prepare(self, deadline: Deadline) -> Ready:
        """Build the model and load the data."""

    def train(self, request: Work, state: ModelState, deadline: Deadline) -> Update:
        """Train from ``state``. Returns the head of the update, whose values are there until the next call.
        ``holds`` becomes False when the worker needs ``state`` no more.
        """

    def fetch(self, stop: int, deadline: Deadline) -> None:
        """Ask for the first ``stop`` values of the last update, all of which are then to be read."""

    def read(self, out: Vector, deadline: Deadline) -> None:
        """Fill ``out`` with the next values that were asked for."""

    def close(self) -> None:
        """End the worker."""


class DeviceWorker:
    """A worker on a device. The agent ends the worker when the control connection ends."""

    def __init__(
        self,
        device: Device,
        request: Callable[[Deadline], PrepareWorker],
        contents: Callable[[JobFile], Path],
        first: Callable[[], tuple[JobFile, Path]] | None = None,
    ) -> None:
        """Prepare a worker on ``device`` with ``request``, which is called when the agent loads torch.
        ``contents`` returns where the contents of a job's file lie, ``first`` the file of the first values of
        what is not exchanged, for a device that computes others.
        """
        self.name = device.name
        self._device, self._request, self._contents, self._first = device, request, contents, first
        self._control: Channel | None = None
        self._channel: Channel | None = None
        self._next = self._stop = 0  # the next part, and the end, of the values that were asked for
        self._read = 0  # of them
        self._encoding, self._parameters = Encoding(), 0
        self.holds, self.percent = False, 0
        self.cohort_key, self.cohort_certificate = b"", KeyCertificate()
        self.node: NodeControl | None = None
        self.spread: SpreadState | None = None
        self._closed = False

    def prepare(self, deadline: Deadline) -> Ready:
        try:
            return self._prepare(deadline)
        except Refused as error:
            if not error_texts.OTHER_VALUES.is_in(error.text) or not self._first or not self._control:
                raise
            self._control.close()
        return self._prepare(deadline, *self._first())

    def _prepare(self, deadline: Deadline, first: JobFile | None = None, path: Path = Path()) -> Ready:
        self._control = self._device.control(deadline)
        self._check_open()
        self._control.call(WarmUp(), Ok, deadline)
        request = replace(self._request(deadline), first=first)
        self._encoding, self._parameters = request.work.encoding, layout.parameters_end(request.tensors)
        missing = self._control.call(request, MissingFiles, deadline)
        left = deadline.remaining()
        self._send_files(self._control, request, missing, path)
        deadline = Deadline.after(left)  # files have deadlines of their own
        ready = self._control.expect(Ready, deadline)
        self._channel = self._device.bulk(ready.token, ready.tls, deadline)
        self._check_open()
        self.node, self.cohort_key = NodeControl(self._device, self._control), ready.cohort_key
        self.cohort_certificate = ready.cohort_certificate
        return ready

    def _send_files(self, agent: Channel, request: PrepareWorker, missing: MissingFiles, first: Path) -> None:
        known = contents(request.needed)
        if not known.keys() >= set(missing.digests) or len(missing.digests) > len(known):
            raise ProtocolError(f"{self.name} asks for a file that the job does not have")
        for digest in missing.digests:
            size = known[digest].size
            deadline = Deadline.after(REPLY_SECONDS + size / SLOWEST)
            is_first = request.first is not None and digest == request.first.sha256
            with (first if is_first else self._contents(known[digest])).open("rb") as file:
                agent.call(FileContents(digest), Ok, deadline, FileSlice(file.fileno(), 0, size))

    def train(self, request: Work, state: ModelState, deadline: Deadline) -> Update:
        self.percent = 0
        update = _checked(self._answer(request, state, deadline), request, self.name)
        has_values = not (request.held_out or request.synthetic)
        if update.encoding != (self._encoding.name if has_values else PLAIN):
            raise ProtocolError(f"{self.name} encoded an update as {printable(update.encoding)}")
        return update

    def _answer(self, request: Work, state: ModelState, deadline: Deadline) -> Update:
        """Send the request, with the state unless the device has it from other nodes."""
        channel, spread = self._connected, self.spread
        if spread and spread.state is state:
            try:
                channel.send(replace(request, spread=spread.digest), deadline)
                update = self._updated(channel, deadline)
                self.holds = False
                return update
            except Refused as error:
                if error.code != SPREAD or spread.ahead:
                    raise
                self.spread = None
        channel.send(request, deadline, state.memory.data)
        self.holds = False
        return self._updated(channel, deadline)

    def _updated(self, channel: Channel, deadline: Deadline) -> Update:
        """Return the answer, and note how far it is meanwhile."""
        while (percent := _percent_of(head := channel.receive(deadline))) is not None:
            self.percent = percent
        return channel.checked(head, Update)

    def ask(self, request: Message, deadline: Deadline) -> None:
        """Ask the device something between two tasks."""
        self._connected.send(request, deadline)

    def answer(self, reply: type[R], deadline: Deadline) -> R:
        """Return the answer to what was asked."""
        return self._connected.expect(reply, deadline)

    def fetch(self, stop: int, deadline: Deadline) -> None:
        self._connected.send(Fetch(stop), deadline)
        self._next = self._read = 0
        self._stop = stop

    def read(self, out: Vector, deadline: Deadline) -> None:
        encoding, values = self._encoding, out.data.cast("B")
        if encoding.name == PLAIN:
            self._receive(values, deadline)
            return
        encoded = values[: 4 * max(0, self._parameters - self._read)]
        self._read += len(out)
        # One that lasts would be one for each worker.
        data = memoryview(bytearray(encoding.size(len(encoded) // 4)))
        self._receive(data, deadline)
        if encoded and not codec(encoding).decode(encoding, data, encoded):
            raise ProtocolError(f"{self.name} sent values that are not encoded as {encoding.name}")
        self._receive(values[len(encoded) :], deadline)

    def _receive(self, wanted: memoryview, deadline: Deadline) -> None:
        """Fill ``wanted`` with the next bytes of parts."""
        channel = self._connected
        while wanted:
            if not channel.payload_left:
                self._begin_part(channel, deadline)
            piece = wanted[: channel.payload_left]
            channel.receive_next(piece, deadline)
            wanted = wanted[len(piece) :]

    def _begin_part(self, channel: Channel, deadline: Deadline) -> None:
        count = min(PART_VALUES, self._stop - self._next)
        ends = (self._next, self._next + count)
        first, last = (self._encoding.place(end, self._parameters) for end in ends)
        part = channel.expect(Part, deadline, payload=last - first)
        if part.start != self._next:
            raise ProtocolError(f"{self.name} sent values {part.start} where {self._next} belong")
        self._next += count

    @property
    def _connected(self) -> Channel:
        if self._channel is None:
            raise ProtocolError(f"{self.name} is not prepared")
        return self._channel

    def _check_open(self) -> None:
        if self._closed:  # while it was dialling
            raise ConnectionLost(f"{self.name}: given up")

    def close(self) -> None:
        self._closed = True
        for channel in (self._channel, self._control):
            if channel:
                channel.close()


class HostProcess(WorkerHandle):
    """A process of a job on the host, a fork of ``zygote``. It runs a user's model, so it can read only
    ``readable``, the job's ``files`` and programs, has no network, and is of a user of its own. ``states`` is
    the descriptor of the memory in which the parameter server has its states. ``streams`` connects it to a
    data service.
    """

    def __init__(
        self,
        name: str,
        request: PrepareWorker | PrepareServer,
        files: WorkerFiles,
        readable: Sequence[Path],
        log: Path,
        zygote: Zygote,
        states: int,
        kept: Path | None = None,
        streams: StreamRelay | None = None,
    ) -> None:
        self._request, self._log = request, log
        super().__init__(
            name,
            zygote,
            _sandbox(readable),
            files,
            log,
            ("--errors", "full"),
            peer=f"the worker '{name}' on the host",
            states=states,
            kept=kept,
            streams=streams,
            limits=LOCAL_LIMITS,
        )

    def _prepare(self, reply: type[R], deadline: Deadline) -> R:
        try:
            return self.channel.call(self._request, reply, deadline)
        except ConnectionLost:
            self._check_shortage()
            raise ConnectionLost(f"the worker process on the host died; {self._log} may say why") from None

    def _call(self, request: Message, reply: type[R], payload: Buffer = b"", size: int | None = 0) -> R:
        """Send a request and return its reply, for as long as the process computes. Raises ConnectionLost if
        it hangs.
        """
        try:
            # One that hangs does not read what is more than a socket holds.
            self.channel.send(request, Deadline.after(REPLY_SECONDS + len(payload) / SLOWEST), payload)
            self.wait(NEVER)
            return self.channel.expect(reply, Deadline.after(REPLY_SECONDS), payload=size)
        except ConnectionLost:
            self._check_shortage()
            raise

    def _check_shortage(self) -> None:
        """Raise Refused if the process, whose connection has ended, has run out of memory."""
        if found := self.shortage():
            raise Refused("", found.code, f"{self.name} on the host: {found.text}")


class LocalWorker(HostProcess):
    """A worker on the host. Its own state lies in the folder ``kept``."""

    def __init__(
        self,
        request: PrepareWorker,
        files: WorkerFiles,
        readable: Sequence[Path],
        log: Path,
        zygote: Zygote,
        states: int,
        kept: Path | None = None,
        streams: StreamRelay | None = None,
    ) -> None:
        if kept:
            worker_user.give(kept)
        super().__init__(request.worker, request, files, readable, log, zygote, states, kept, streams)
        self.holds, self.percent = False, 0
        self._next = 0
        size = 4 * layout.size(request.tensors)
        self._values = np.frombuffer(memory.map_first(self.values, size).data, np.float32)

    def prepare(self, deadline: Deadline) -> Ready:
        return self._prepare(Ready, deadline)

    def train(self, request: Work, state: ModelState, deadline: Deadline) -> Update:
        self.percent = 0
        try:
            self.channel.send(replace(request, state=state.number), deadline)
            self.wait(deadline)
            while (percent := _percent_of(head := self.channel.receive(deadline))) is not None:
                self.percent = percent
                self.wait(deadline)
            update = self.channel.checked(head, Update)
        except ConnectionLost:
            self._check_shortage()
            raise
        self.holds = False
        return _checked(update, request, self.name)

    def fetch(self, _stop: int, _deadline: Deadline) -> None:
        self._next = 0

    def read(self, out: Vector, _deadline: Deadline) -> None:
        """See Worker. The values are copied: the process could change them after they were checked."""
        out[:] = self._values[self._next : self._next + len(out)]
        self._next += len(out)


def _sandbox(readable: Sequence[Path]) -> Sandbox:
    gpus = (Bind(path, path, read_only=False) for path in sorted(Path("/dev").glob("nvidia*")))
    return Sandbox(
        binds=(*system_binds(), *python_binds(), *gpus, *(Bind(path, path) for path in readable)),
        own_network=True,
        own_pids=True,
        uid=worker_user.UID,
    )


def _percent_of(head: Head) -> int | None:
    """Return how far a worker is, None for a message that does not tell it."""
    if not isinstance(head.message, WorkProgress) or head.payload_size:
        return None
    return max(0, min(head.message.percent, MOST_PERCENT))


def _checked(update: Update, request: Work, name: str) -> Update:
    samples = update.samples if request.held_out else request.samples
    if (update.exchange, update.samples) != (request.exchange, samples) or samples < 0:
        raise ProtocolError(f"{name} answered another exchange than the one it was asked for")
    if not is_declared(update.metrics) or (set(update.metrics) != {LOSS} and not request.held_out):
        raise ProtocolError(f"{name} sent metrics {printable(', '.join(update.metrics))}")
    return update
