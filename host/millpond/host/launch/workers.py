# SPDX-License-Identifier: Apache-2.0
"""Edge: the workers of a launched script: the address where they meet, one worker on host or device."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from millpond.base.deadline import NEVER, Deadline
from millpond.base.errors import ProtocolError, Refused
from millpond.base.text import printable
from millpond.host.api.launch import StartLaunch
from millpond.host.fleet.device import Device
from millpond.host.fleet.directory import Fleet
from millpond.host.model.jobs import HOST
from millpond.launch.process import LaunchedScript
from millpond.linux.confinement.sandbox import Sandbox, python_binds, system_binds
from millpond.wire.channel import Channel
from millpond.wire.launch_messages import MOST_AT_ONCE, Exited, Launch, Lines, Output
from millpond.wire.messages import Failure

START_SECONDS = 60.0
LOOK_SECONDS = 0.1

Show = Callable[[tuple[str, ...]], None]
"""Takes lines that a worker printed."""


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
    it can reach worker 0.
    """
    names = [*([HOST] if request.host else []), *devices]
    interface, port = fleet.interface(devices[0]) if devices else "lo", _free_port()

    def launch(rank: int, name: str) -> Launch:
        master = _master_address(fleet, name, devices, on_host=request.host)
        return Launch(request.script, request.arguments, request.files, rank, len(names), master, port)

    return [LaunchWorker(name, launch(rank, name), interface) for rank, name in enumerate(names)]


def _master_address(fleet: Fleet, name: str, devices: Sequence[str], *, on_host: bool) -> str:
    if not devices:
        return "127.0.0.1"
    if not on_host:
        return fleet.addresses(devices[0]).device_ip
    return fleet.addresses(devices[0] if name == HOST else name).host_ip


def _free_port() -> int:
    """Return a port that is free on the host, most likely on a device too, and that forwarding permits."""
    with socket.socket() as sock:
        sock.bind(("", 0))
        port: int = sock.getsockname()[1]
    return port


class Over:
    """The end of a launch, as an event: true once the launch is over. Shuts down the channels at which its
    threads wait.
    """

    def __init__(self) -> None:
        self._event, self._lock = threading.Event(), threading.Lock()
        self._channels: list[Channel] = []

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


def run_on_host(worker: LaunchWorker, show: Show, over: Over) -> int | None:
    """Run a worker on the host. Returns its exit code; None if the launch ended it. Raises OSError,
    RemoteError.
    """
    sandbox = Sandbox(binds=(*system_binds(), *python_binds()), own_pids=True, capabilities=False)
    script, lines = LaunchedScript(sandbox, worker.launch, worker.interface), Lines()
    try:
        while not over:
            if not select.select([script.output], [], [], LOOK_SECONDS)[0]:
                continue
            data = script.read()
            _show(lines.take(data) if data else lines.end(), show)
            if not data:
                return script.wait()
        return None
    finally:
        script.stop()


def run_on_device(worker: LaunchWorker, device: Device, show: Show, over: Over) -> int:
    """Run a worker on a device. Returns its exit code. Raises RemoteError, also when the launch is over."""
    with device.control(Deadline.after(START_SECONDS)) as agent:
        over.add(agent)
        agent.send(worker.launch, Deadline.after(START_SECONDS))
        while True:
            head = agent.receive(NEVER)
            if head.payload_size:
                raise ProtocolError(f"it sent a payload behind '{head.message.NAME}'")
            if isinstance(head.message, Failure):
                raise Refused("", printable(head.message.code), printable(head.message.text))
            if isinstance(head.message, Exited):
                return head.message.code
            if not isinstance(head.message, Output):
                raise ProtocolError(f"it sent '{head.message.NAME}' while a script runs")
            if sum(len(line) + 1 for line in head.message.lines) > MOST_AT_ONCE:
                raise ProtocolError(f"it sent more than {MOST_AT_ONCE} characters of output at once")
            _show(head.message.lines, show)


def _show(lines: tuple[str, ...], show: Show) -> None:
    if lines:
        show(tuple(printable(line, len(line)) for line in lines))
