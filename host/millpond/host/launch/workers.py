# SPDX-License-Identifier: Apache-2.0
"""Edge: the workers of a launched script: the address where they meet, one worker on host or device."""

from __future__ import annotations

import contextlib
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from millpond.base.deadline import NEVER, Deadline
from millpond.base.errors import ConnectionLost, ProtocolError, Refused, RemoteError
from millpond.base.text import printable
from millpond.host.api.launch import StartLaunch
from millpond.host.fleet import worker_user
from millpond.host.fleet.device import Device
from millpond.host.fleet.directory import Fleet
from millpond.host.fleet.firewall import OpenPorts
from millpond.host.launch.group import is_group_request
from millpond.host.launch.inputs import LaunchInputs
from millpond.host.launch.shared import SharedFolder
from millpond.host.records.jobs import HOST
from millpond.images.boards import EMULATED
from millpond.launch.process import LaunchedScript, shared_bind
from millpond.linux import sockets
from millpond.linux.confinement.sandbox import Bind, Sandbox, python_binds, system_binds
from millpond.linux.zygote.client import Zygote
from millpond.train.distributed.data_service_messages import FindData
from millpond.train.distributed.launch_messages import (
    MOST_AT_ONCE,
    MOST_NAMED,
    AllSaved,
    Exited,
    Launch,
    Lines,
    Listening,
    Output,
    SavedOrder,
    SavedPart,
    StopScript,
    Taken,
)
from millpond.wire.channel import Channel
from millpond.wire.framing import Head
from millpond.wire.messages import Failure, Message
from millpond.wire.relay import is_readable

START_SECONDS = 60.0
LOOK_SECONDS = 0.1
PUBLIC = Path("/volume/public")
"""Where a script sees public data: its own device's, and on the host the first device's."""
ALL_PUBLIC = Path("/volumes")
"""Where the host's worker sees those of all devices, as csd0/public."""
Serve = Callable[[Channel], None]
"""Answers the requests of a script on its channel, until it ends."""
Answer = Callable[[Channel, Head], bool]
"""Answers one request; false if the launch is over."""


class WorkerObserver(Protocol):
    """Is told what becomes of one worker."""

    def show(self, lines: tuple[str, ...]) -> None:
        """Take lines that it printed."""

    def exited(self, code: int, error: str) -> None:
        """Note its exit code, and the exception of a confined script."""

    def saved(self, part: SavedPart, data: bytes) -> None:
        """Take a part of a file that it has saved."""


@dataclass(frozen=True, slots=True)
class LaunchWorker:
    """A worker of a launch: its name, its Launch message, and the host's ``interface`` towards the first
    device.
    """

    name: str
    launch: Launch
    interface: str


def plan(fleet: Fleet, request: StartLaunch, devices: Sequence[str]) -> list[LaunchWorker]:
    """Return the workers in the order of their ranks. All connect to worker 0, each by the address at which
    it can reach worker 0; confined ones connect to nobody.
    """
    names = [*([HOST] if request.host else []), *devices]
    interface, port = fleet.interface(devices[0]) if devices else "lo", _free_port()
    run, here = uuid.uuid4().hex, [name for name in names if _is_here(fleet, name)]

    def launch(rank: int, name: str) -> Launch:
        master = _master_address(fleet, name, devices, on_host=request.host)
        return Launch(
            request.script,
            request.arguments,
            request.files,
            rank,
            len(names),
            "" if request.confined else master,
            0 if request.confined else port,
            "" if request.confined else _own_address(fleet, name, devices),
            most_saved=request.most_saved,
            confined=request.confined,
            folders=request.folders,
            signature=request.signature,
            worker=name,
            run=run,
            names=() if request.confined else tuple(_names(fleet, name, devices, on_host=request.host)),
            module=request.module,
            processes=request.processes,
            shared=name in here and len(here) > 1,
            variables=request.variables,
            inputs=request.inputs,
            tells_ports=name == HOST and bool(devices) and not request.confined,
            shares=request.shares,
        )

    return [LaunchWorker(name, launch(rank, name), interface) for rank, name in enumerate(names)]


def _is_here(fleet: Fleet, name: str) -> bool:
    """Return whether a worker has this machine's processors, as those of emulated devices have."""
    return name == HOST or fleet.device(name).board == EMULATED


def _names(fleet: Fleet, viewer: str, devices: Sequence[str], *, on_host: bool) -> Iterator[tuple[str, str]]:
    """Yield the addresses and names of all workers, for one of them: the host has one address for each
    device, of which a device has its own first.
    """
    for name in devices:
        yield fleet.addresses(name).device_ip, name
    if on_host:
        for name in sorted(devices, key=lambda name: name != viewer):
            yield fleet.addresses(name).host_ip, f"{HOST} {socket.gethostname()}"


def _master_address(fleet: Fleet, name: str, devices: Sequence[str], *, on_host: bool) -> str:
    if not devices:
        return "127.0.0.1"
    if not on_host:
        return fleet.addresses(devices[0]).device_ip
    return fleet.addresses(devices[0] if name == HOST else name).host_ip


def _own_address(fleet: Fleet, name: str, devices: Sequence[str]) -> str:
    """Return the address at which the others reach a worker."""
    if name != HOST:
        return fleet.addresses(name).device_ip
    return fleet.addresses(devices[0]).host_ip if devices else "127.0.0.1"


def _free_port() -> int:
    """Return a port that is free on the host, most likely on a device too, and that forwarding permits."""
    with socket.socket() as sock:
        sock.bind(("", 0))
        port: int = sock.getsockname()[1]
    return port


class Over:
    """The end of a launch, as an event: true once the launch is over. Shuts down the channels at which its
    threads wait. ``stopping`` comes before it where what the workers have saved is still wanted.
    """

    def __init__(self) -> None:
        self._event, self._lock = threading.Event(), threading.Lock()
        self._channels: list[Channel] = []
        self.stopping = False

    def end(self) -> None:
        """End the launch."""
        self._event.set()
        with self._lock:
            for channel in self._channels:
                channel.shut_down()

    def __bool__(self) -> bool:
        return self._event.is_set()

    def add(self, channel: Channel) -> None:
        """Add a channel to shut down at the end of the launch, or at once if that has come."""
        with self._lock:
            self._channels.append(channel)
        if self:
            channel.shut_down()


@dataclass(frozen=True, slots=True)
class HostPlace:
    """The needs of the host's worker: the zygote that it is a fork of, the public folders by device, the
    files that all workers are sent, the ports that are ``opened`` to devices, and the folder that all
    workers share, if they do.
    """

    zygote: Zygote
    public: Mapping[str, Path]
    inputs: LaunchInputs
    opened: OpenPorts = field(default_factory=OpenPorts)
    shared: SharedFolder | None = None

    @contextlib.contextmanager
    def sandbox(self, launch: Launch) -> Iterator[Sandbox]:
        """Yield its sandbox, in which the shared folder is mounted inside the context."""
        with contextlib.ExitStack() as stack:
            sandbox = self._sandbox(confined=launch.confined)
            if self.shared:
                mounted = stack.enter_context(self.shared.on_host(launch.run))
                sandbox = replace(sandbox, binds=(*(sandbox.binds or ()), shared_bind(mounted)))
            yield sandbox

    def _sandbox(self, *, confined: bool) -> Sandbox:
        folders = [(path, ALL_PUBLIC / name / "public") for name, path in self.public.items()]
        folders += [(folders[0][0], PUBLIC)] if folders else []
        return Sandbox(
            binds=(*system_binds(), *python_binds(), *(Bind(*pair) for pair in folders)),
            own_pids=True,
            own_network=confined,
            uid=worker_user.UID,
        )


def run_on_host(
    worker: LaunchWorker, place: HostPlace, serve: Serve, observer: WorkerObserver, over: Over
) -> AllSaved | None:
    """Run a worker on the host, whose requests ``serve`` answers. Returns the count of what it has saved;
    None if the launch ended it. Raises OSError, RemoteError.
    """
    with place.sandbox(worker.launch) as sandbox:
        script = LaunchedScript(place.zygote, sandbox, worker.launch, worker.interface)
        return _run_on_host(script, worker, place, serve, observer, over)


def _run_on_host(
    script: LaunchedScript,
    worker: LaunchWorker,
    place: HostPlace,
    serve: Serve,
    observer: WorkerObserver,
    over: Over,
) -> AllSaved | None:
    launch = worker.launch
    serving = threading.Thread(target=serve, args=(script.requests,), name="requests host", daemon=True)
    try:
        over.add(script.channel)
        over.add(script.requests)
        serving.start()
        if launch.inputs:
            place.inputs.send(worker.name, script.channel)
        exited = _follow(script, place.opened, observer, over)
        if exited is None:
            return None
        observer.exited(exited.code, printable(exited.error))
        return _receive_saved(script.channel, launch.most_saved, observer)
    finally:
        script.stop()
        if serving.ident:
            serving.join(START_SECONDS)


def _follow(script: LaunchedScript, opened: OpenPorts, observer: WorkerObserver, over: Over) -> Exited | None:
    """Show the script's output, and open the ports that it listens on, until its end; return None if the
    launch ends before. Raises RemoteError.
    """
    lines, killed, channel = Lines(), False, script.channel.sock.fileno()
    watched = [script.output, channel]
    while not over:
        if over.stopping and not killed:
            killed = True
            script.kill()
        ready = sockets.readable(watched, LOOK_SECONDS)
        if script.output in ready:  # all of it is there before the end is told
            data = script.read()
            _show(lines.take(data) if data else lines.end(), observer)
            if not data:
                watched.remove(script.output)
        elif ready:
            if isinstance(news := _news(script), Exited):
                _show(lines.end(), observer)
                return news
            opened.listen(news.ports)
    return None


def _news(script: LaunchedScript) -> Exited | Listening:
    try:
        head = script.channel.receive(NEVER)
    except ConnectionLost:
        raise RemoteError("the first process of the script's sandbox died") from None
    if not isinstance(head.message, Exited | Listening) or head.payload_size:
        raise ProtocolError(f"it sent '{head.message.NAME}' while a script runs")
    return head.message


def _receive_saved(channel: Channel, most: int, observer: WorkerObserver) -> AllSaved:
    order = SavedOrder(most)
    while True:
        head = channel.receive(NEVER)
        if isinstance(head.message, AllSaved):
            return _all_saved(head)
        _take_part(head, channel, order, observer)


def _all_saved(head: Head) -> AllSaved:
    found = head.message
    assert isinstance(found, AllSaved)
    if head.payload_size or min(found.files, found.size, found.left_out) < 0:
        raise ProtocolError("it sent strange numbers of files")
    named = tuple(printable(name, 80) for name in found.named[:MOST_NAMED])
    return AllSaved(found.files, found.size, found.left_out, named)


def _take_part(head: Head, channel: Channel, order: SavedOrder, observer: WorkerObserver) -> None:
    if not isinstance(head.message, SavedPart):
        raise ProtocolError(f"it sent '{head.message.NAME}' where files belong")
    order.take(head.message, head.payload_size)
    data = channel.receive_payload(head.payload_size, Deadline.after(START_SECONDS))
    observer.saved(head.message, bytes(data))


def run_on_device(
    worker: LaunchWorker,
    device: Device,
    place: HostPlace,
    answer: Answer,
    observer: WorkerObserver,
    over: Over,
) -> AllSaved | None:
    """Run a worker on a device. ``answer`` sends the answer to a request of its script, and returns False if
    the launch is over. Returns as ``run_on_host``. Raises RemoteError, also when the launch is over.
    """
    run, shared = worker.launch.run, place.shared
    is_over = over.__bool__
    with shared.on_device(device, run, is_over) if shared else contextlib.nullcontext():
        return _run_on_device(worker, device, place.inputs, answer, observer, over)


def _run_on_device(
    worker: LaunchWorker,
    device: Device,
    inputs: LaunchInputs,
    answer: Answer,
    observer: WorkerObserver,
    over: Over,
) -> AllSaved | None:
    launch, order, stopped = worker.launch, SavedOrder(worker.launch.most_saved), False
    with device.control(Deadline.after(START_SECONDS)) as agent:
        over.add(agent)
        agent.send(launch, Deadline.after(START_SECONDS))
        if launch.inputs:
            inputs.send(worker.name, agent)
        while True:
            if over.stopping and not stopped:
                if launch.confined:
                    return None
                agent.send(StopScript(), Deadline.after(START_SECONDS))
                stopped = True
            if not is_readable(agent.sock, LOOK_SECONDS):  # a TLS connection is for one thread
                continue
            head = agent.receive(NEVER)
            if is_request(head.message, launch):
                if not answer(agent, head):
                    return None
            elif isinstance(head.message, AllSaved):
                return _all_saved(head)
            else:
                _take(head, agent, None if launch.confined else order, observer)


def is_request(message: Message, launch: Launch) -> bool:
    """Return whether a message is a request that the scripts of this launch make."""
    return is_group_request(message) if launch.confined else isinstance(message, FindData)


def _take(head: Head, agent: Channel, order: SavedOrder | None, observer: WorkerObserver) -> None:
    """Pass on what a device sends by itself, and ask for more when that is done."""
    if order and isinstance(head.message, SavedPart):
        _take_part(head, agent, order, observer)
    elif not _take_news(head, observer):
        return
    agent.send(Taken(), Deadline.after(START_SECONDS))


def _take_news(head: Head, observer: WorkerObserver) -> bool:
    """Pass on output, and then return True, or the end of the script. Raises Refused for a failure."""
    message = head.message
    if head.payload_size:
        raise ProtocolError(f"it sent a payload behind '{message.NAME}'")
    if isinstance(message, Failure):
        raise Refused("", printable(message.code), printable(message.text))
    if isinstance(message, Exited):
        observer.exited(message.code, printable(message.error))
        return False
    if not isinstance(message, Output):
        raise ProtocolError(f"it sent '{message.NAME}' while a script runs")
    if sum(len(line) + 1 for line in message.lines) > MOST_AT_ONCE:
        raise ProtocolError(f"it sent more than {MOST_AT_ONCE} characters of output at once")
    _show(message.lines, observer)
    return True


def _show(lines: tuple[str, ...], observer: WorkerObserver) -> None:
    if lines:
        observer.show(tuple(printable(line, len(line), kept="\t") for line in lines))
