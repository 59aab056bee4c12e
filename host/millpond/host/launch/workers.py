# SPDX-License-Identifier: Apache-2.0
"""Edge: the workers of a launched script: the address where they meet, one worker on host or device."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from millpond.base.deadline import NEVER, Deadline
from millpond.base.errors import ConnectionLost, ProtocolError, Refused, RemoteError
from millpond.base.text import printable
from millpond.host.api.launch import JoinLaunch, LaunchPart, StartLaunch
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
    Begun,
    Exited,
    Launch,
    Lines,
    Listening,
    Output,
    RestartScript,
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


@dataclass(frozen=True, slots=True)
class LaunchWorker:
    """A worker of a launch: its name, its Launch message, and the host's ``interface`` towards the first
    device.
    """

    name: str
    launch: Launch
    interface: str


@dataclass(frozen=True, slots=True)
class LaunchEvent:
    """A worker printed ``lines``, has ``saved`` a part of a file, exited with ``code`` and perhaps an
    exception, was lost for ``reason``, or is ``done``, with the count of what it has saved if that is known.
    An elastic one is ``lost`` until it is ``back``. Its script has ``begun``.
    """

    worker: LaunchWorker | None
    lines: tuple[str, ...] = ()
    saved: tuple[SavedPart, bytes] | None = None
    code: int | None = None
    reason: str = ""
    done: bool = False
    count: AllSaved | None = None
    lost: str = ""
    back: bool = False
    begun: bool = False


def part(fleet: Fleet, request: StartLaunch, devices: Sequence[str], key: str, link_port: int) -> LaunchPart:
    """Return this host's part of a launch over several ones, in the order of its ranks, with the ``key`` and
    port of its links.
    """
    names = [*([HOST] if request.host else []), *devices]
    networks = (str(ipaddress.IPv4Interface(fleet.addresses(name).host).network) for name in devices)
    workers = tuple((_own_address(fleet, name, devices), name) for name in names)
    return LaunchPart(workers, tuple(networks), sockets.free_port(), key, link_port)


def plan(
    fleet: Fleet, request: StartLaunch, devices: Sequence[str], joined: JoinLaunch | None = None
) -> list[LaunchWorker]:
    """Return the workers in the order of their ranks. All connect to worker 0, each by the address at which
    it can reach worker 0; confined ones connect to nobody. With ``joined`` they are a part of all workers.
    """
    names = [*([HOST] if request.host else []), *devices]
    # Most likely it is free on a device too, and forwarding permits it.
    interface, port = fleet.interface(devices[0]) if devices else "lo", sockets.free_port()
    run, here = uuid.uuid4().hex, [name for name in names if _is_here(fleet, name)]
    first, size = 0, len(names)
    if joined:
        run, port, first, size = joined.run, joined.master_port, joined.first, joined.size

    def launch(rank: int, name: str) -> Launch:
        master = _master_address(fleet, name, devices, on_host=request.host)
        if first:
            assert joined
            master = joined.master_address
        return Launch(
            request.script,
            request.arguments,
            request.files,
            rank,
            size,
            "" if request.confined else master,
            0 if request.confined else port,
            "" if request.confined else _own_address(fleet, name, devices),
            most_saved=request.most_saved,
            confined=request.confined,
            folders=request.folders,
            signature=request.signature,
            worker=f"{name}.{joined.name}" if joined else name,
            run=run,
            names=() if request.confined else tuple(_names(fleet, name, devices, request.host, joined)),
            module=request.module,
            processes=request.processes,
            shared=name in here and len(here) > 1,
            variables=request.variables,
            inputs=request.inputs,
            tells_ports=name == HOST and bool(devices) and not request.confined,
            shares=request.shares,
            transforms=request.transforms,
            elastic=request.elastic,
            tells_begin=True,
        )

    return [LaunchWorker(name, launch(rank, name), interface) for rank, name in enumerate(names, first)]


def _is_here(fleet: Fleet, name: str) -> bool:
    """Return whether a worker has this machine's processors, as those of emulated devices have."""
    return name == HOST or fleet.device(name).board == EMULATED


def _names(
    fleet: Fleet, viewer: str, devices: Sequence[str], on_host: bool, joined: JoinLaunch | None
) -> Iterator[tuple[str, str]]:
    """Yield the addresses and names of all workers, for one of them: the host has one address for each
    device, of which a device has its own first.
    """
    yield from joined.names if joined else ()
    suffix = f".{joined.name}" if joined else ""
    for name in devices:
        yield fleet.addresses(name).device_ip, f"{name} {name}{suffix}" if suffix else name
    if on_host:
        alias = f"{HOST}{suffix} " if suffix else ""
        for name in sorted(devices, key=lambda name: name != viewer):
            yield fleet.addresses(name).host_ip, f"{HOST} {alias}{socket.gethostname()}"


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


class Over:
    """The end of a launch, as an event: true once the launch is over. Shuts down the channels at which its
    threads wait. ``stopping`` comes before it where what the workers have saved is still wanted. Elastic
    scripts are started again as often as ``restarts`` says.
    """

    def __init__(self) -> None:
        self._event, self._lock = threading.Event(), threading.Lock()
        self._channels: list[Channel] = []
        self.stopping = False
        self.restarts = 0

    def wait(self, seconds: float) -> bool:
        """Wait at most so long for the end; return whether it has come."""
        return self._event.wait(seconds)

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


class WorkerRun:
    """The run of one worker until its end, or that of the launch. It ``put``s its results as events, and
    tells ``sent`` the bytes of its files that it has sent.
    """

    def __init__(
        self,
        worker: LaunchWorker,
        place: HostPlace,
        over: Over,
        put: Callable[[LaunchEvent], None],
        sent: Callable[[int], None],
    ) -> None:
        self._sent = sent
        self._worker, self._launch, self._place = worker, worker.launch, place
        self._over, self._put = over, put
        self._order = SavedOrder(worker.launch.most_saved)
        self._restarts = over.restarts
        self.ended = False
        """Whether the script has told its end."""

    def on_host(self, serve: Serve) -> AllSaved | None:
        """Run the worker on the host, whose requests ``serve`` answers. Returns the count of what it has
        saved; None if the launch ended it. Raises OSError, RemoteError.
        """
        with self._place.sandbox(self._launch) as sandbox, contextlib.ExitStack() as ending:
            script = LaunchedScript(self._place.zygote, sandbox, self._launch, self._worker.interface)
            target, arguments = serve, (script.requests,)
            serving = threading.Thread(target=target, args=arguments, name="requests host", daemon=True)
            ending.callback(lambda: serving.join(START_SECONDS) if serving.ident else None)
            ending.callback(script.stop)
            self._over.add(script.channel)
            self._over.add(script.requests)
            serving.start()
            if self._launch.inputs:
                self._place.inputs.send(self._worker.name, script.channel, self._sent)
            if (exited := self._follow(script)) is None:
                return None
            self._exited(exited)
            return self._receive_saved(script.channel)

    def _follow(self, script: LaunchedScript) -> Exited | None:
        """Show the script's output, and open the ports that it listens on, until its end; return None if the
        launch ends before. Raises RemoteError.
        """
        lines, killed, channel = Lines(), False, script.channel.sock.fileno()
        watched = [script.output, channel]
        while not self._over:
            if self._over.stopping and not killed:
                killed = True
                script.kill()
            if self._starts_again():
                script.restart()
            ready = sockets.readable(watched, LOOK_SECONDS)
            if script.output in ready:  # all of it is there before the end is told
                data = script.read()
                self._show(lines.take(data) if data else lines.end())
                if not data:
                    watched.remove(script.output)
            elif ready:
                news = _news(script)
                if isinstance(news, Exited):
                    self._show(lines.end())
                    return news
                if isinstance(news, Begun):
                    self._tell(begun=True)
                else:
                    self._place.opened.listen(news.ports)
        return None

    def _receive_saved(self, channel: Channel) -> AllSaved:
        while True:
            head = channel.receive(NEVER)
            if isinstance(head.message, AllSaved):
                return _all_saved(head)
            self._take_part(head, channel)

    def on_device(self, device: Device, answer: Answer) -> AllSaved | None:
        """Run the worker on a device. ``answer`` sends the answer to a request of its script, and returns
        False if the launch is over. Returns as ``on_host``. Raises RemoteError, also when the launch is over.
        """
        shared, is_over = self._place.shared, self._over.__bool__
        mounted = shared.on_device(device, self._launch.run, is_over) if shared else contextlib.nullcontext()
        with mounted, device.control(Deadline.after(START_SECONDS)) as agent:
            self._over.add(agent)
            agent.send(self._launch, Deadline.after(START_SECONDS))
            if self._launch.inputs:
                self._place.inputs.send(self._worker.name, agent, self._sent)
            return self._relay(agent, answer)

    def _relay(self, agent: Channel, answer: Answer) -> AllSaved | None:
        stopped = False
        while True:
            if self._over.stopping and not stopped:
                if self._launch.confined:
                    return None
                agent.send(StopScript(), Deadline.after(START_SECONDS))
                stopped = True
            if self._starts_again():
                agent.send(RestartScript(), Deadline.after(START_SECONDS))
            if not is_readable(agent.sock, LOOK_SECONDS):  # a TLS connection is for one thread
                continue
            head = agent.receive(NEVER)
            if is_request(head.message, self._launch):
                if not answer(agent, head):
                    return None
            elif isinstance(head.message, AllSaved):
                return _all_saved(head)
            else:
                self._take(head, agent)

    def _starts_again(self) -> bool:
        """Return whether the script is to be started again since this was asked last."""
        seen, self._restarts = self._restarts, self._over.restarts
        return seen != self._restarts

    def _take(self, head: Head, agent: Channel) -> None:
        """Pass on what a device sends by itself, and ask for more when that is done."""
        if isinstance(head.message, Begun) and not head.payload_size:
            self._tell(begun=True)
            return
        if isinstance(head.message, SavedPart) and not self._launch.confined:
            self._take_part(head, agent)
        elif not self._take_news(head):
            return
        agent.send(Taken(), Deadline.after(START_SECONDS))

    def _take_part(self, head: Head, channel: Channel) -> None:
        if not isinstance(head.message, SavedPart):
            raise ProtocolError(f"it sent '{head.message.NAME}' where files belong")
        self._order.take(head.message, head.payload_size)
        data = channel.receive_payload(head.payload_size, Deadline.after(START_SECONDS))
        self._tell(saved=(head.message, bytes(data)))

    def _take_news(self, head: Head) -> bool:
        """Pass on output, and then return True, or the end of the script. Raises Refused for a failure."""
        message = head.message
        if head.payload_size:
            raise ProtocolError(f"it sent a payload behind '{message.NAME}'")
        if isinstance(message, Failure):
            raise Refused("", printable(message.code), printable(message.text))
        if isinstance(message, Exited):
            self._exited(message)
            return False
        if not isinstance(message, Output):
            raise ProtocolError(f"it sent '{message.NAME}' while a script runs")
        if sum(len(line) + 1 for line in message.lines) > MOST_AT_ONCE:
            raise ProtocolError(f"it sent more than {MOST_AT_ONCE} characters of output at once")
        self._show(message.lines)
        return True

    def _show(self, lines: tuple[str, ...]) -> None:
        if lines:
            self._tell(lines=tuple(printable(line, len(line), kept="\t") for line in lines))

    def _exited(self, exited: Exited) -> None:
        self.ended, code, error = True, exited.code, printable(exited.error)
        self._tell(code=code, reason=f"it ended with exit code {code}: {error}" if code and error else "")

    def _tell(self, **what: Any) -> None:
        self._put(LaunchEvent(self._worker, **what))


def _news(script: LaunchedScript) -> Exited | Listening | Begun:
    try:
        head = script.channel.receive(NEVER)
    except ConnectionLost:
        raise RemoteError("the first process of the script's sandbox died") from None
    if not isinstance(head.message, Exited | Listening | Begun) or head.payload_size:
        raise ProtocolError(f"it sent '{head.message.NAME}' while a script runs")
    return head.message


def _all_saved(head: Head) -> AllSaved:
    found = head.message
    assert isinstance(found, AllSaved)
    if head.payload_size or min(found.files, found.size, found.left_out) < 0:
        raise ProtocolError("it sent strange numbers of files")
    named = tuple(printable(name, 80) for name in found.named[:MOST_NAMED])
    return AllSaved(found.files, found.size, found.left_out, named)


def is_request(message: Message, launch: Launch) -> bool:
    """Return whether a message is a request that the scripts of this launch make."""
    return is_group_request(message) if launch.confined else isinstance(message, FindData)
