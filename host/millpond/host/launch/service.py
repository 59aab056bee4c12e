# SPDX-License-Identifier: Apache-2.0
"""Edge (threads): launches of scripts: a worker on the host and one on each device, which end together.

A launch belongs to the connection of its command: all workers end when that connection or this process ends.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from millpond.base.deadline import NEVER, Deadline
from millpond.base.errors import (
    ConfigError,
    ConnectionLost,
    LocalError,
    Refused,
    RemoteError,
)
from millpond.base.text import counted, named
from millpond.host.api.launch import BeginLaunch, JoinLaunch, LaunchOpened, LaunchPrepares, StartLaunch
from millpond.host.fleet.device import Device
from millpond.host.fleet.directory import Fleet
from millpond.host.fleet.forwarding import Forwarding
from millpond.host.launch.inputs import LaunchInputs
from millpond.host.launch.joining import check_join
from millpond.host.launch.links import HostLinks, host_links
from millpond.host.launch.links import clear as clear_links
from millpond.host.launch.preparation import Period
from millpond.host.launch.run import END_SECONDS, LaunchRun, check_present
from millpond.host.launch.shared import SharedFolder
from millpond.host.launch.workers import (
    HostPlace,
    part,
    plan,
)
from millpond.host.records.jobs import HOST
from millpond.launch.shared_mount import clear
from millpond.linux import sockets
from millpond.linux.zygote.client import Zygote
from millpond.train.distributed.launch_messages import (
    check_files,
    check_start,
    check_transforms_file,
)
from millpond.wire.channel import Channel
from millpond.wire.messages import Message

R = TypeVar("R", bound=Message)
READY_SECONDS = 30.0


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
        clear_links(fleet)

    def run(self, request: StartLaunch, client: Channel) -> None:
        """Run a launch to its end and send all its output to ``client``. Raises LocalError, RemoteError."""
        with _shared(request, client) as folder, LaunchInputs(self._fleet.directory) as inputs:
            if request.inputs:
                inputs.receive(client)
            self._run(request, folder, inputs, client)

    def _run(self, request: StartLaunch, folder: int | None, inputs: LaunchInputs, client: Channel) -> None:
        installed = bool(request.module) and not request.confined
        check_files(request.script, request.files, installed=installed)
        if request.transforms:
            check_transforms_file(request.transforms, request.files)
        names = self._names(request)
        if not request.several_hosts:
            request = _counted(request, len(names) + request.host)
        inputs.check([*([HOST] if request.host else []), *names])
        with self._reserve(names), contextlib.ExitStack() as undo:
            there = self._wait_ready(names, client, _least(request, names))
            ends = undo.enter_context(self._ends(request))
            joined = self._joined(request, names, client, ends)
            if joined:
                request = _counted(request, joined.size)
            public = self._mounted(there, client) if request.host else {}
            reached = () if request.confined else names
            links = ends.to(joined, names[0]) if joined else []
            with (
                self._forwarding.between(
                    reached, host=request.host and not request.confined, links=links
                ) as opened,
                self._serving(folder) as shared,
            ):
                place = HostPlace(self._zygote, public, inputs, opened, shared)
                workers = plan(self._fleet, request, names, joined)
                if request.host and not workers[0].launch.rank:  # else the port is another worker's
                    opened.reserve(workers[0].launch.master_port)
                if joined:
                    _answer(client, LaunchOpened(), BeginLaunch)
                client.send(LaunchRun(workers, self._devices, place, client).run(joined is not None), NEVER)

    def _ends(self, request: StartLaunch) -> AbstractContextManager[HostLinks]:
        return host_links(self._fleet, plain=request.plain or not request.several_hosts)

    def _joined(
        self, request: StartLaunch, names: Sequence[str], client: Channel, ends: HostLinks
    ) -> JoinLaunch | None:
        """Tell this host's part of a launch over several hosts, and return the whole; None for one of this
        host alone. Raises ConfigError for a whole that cannot be, RemoteError.
        """
        if not request.several_hosts:
            return None
        own = part(self._fleet, request, names, ends.key, ends.port)
        joined = _answer(client, own, JoinLaunch)
        check_join(joined, own, self._fleet.config.network, self._fleet.peers)
        return joined

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
        if request.several_hosts and (request.confined or request.shares or not names):
            raise ConfigError(
                "a launch over several hosts needs a device on each, and has no --private and no --shared"
            )
        more = request.inputs or request.variables or request.shares or request.processes != 1
        if request.confined and request.elastic:
            raise ConfigError("--private scripts meet nobody: no --max-restarts, --nnodes, --rdzv-conf")
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

    def _mounted(self, names: Sequence[str], client: Channel) -> dict[str, Path]:
        """Return the mounted public folders of devices. Raises RemoteError."""
        found, period = dict[str, Path](), Period()
        for name in names:
            if period:
                client.send(LaunchPrepares(f"mounts the volume of {name}"), NEVER)
            found[name] = self._volume(name) / "public"
        return found

    def _wait_ready(self, names: Sequence[str], client: Channel, least: int) -> list[str]:
        """Wait some time until all devices are ready; return those that are, ``least`` or more. Raises
        RemoteError.
        """
        deadline, missing, period = Deadline.after(READY_SECONDS), set[str](), Period()
        for name in names:
            while not self._devices[name].wait_ready(Deadline.after(0.5)):
                check_present(client)
                if period:
                    waited = [each for each in names if not self._devices[each].wait_ready(Deadline.after(0))]
                    client.send(LaunchPrepares(f"waits for {named(waited)} to be ready"), NEVER)
                if deadline.passed:
                    missing.add(name)
                    break
            if len(names) - len(missing) < least:
                raise RemoteError(f"{name} is not ready: {self._devices[name].status.reason}")
        return [name for name in names if name not in missing]


def _answer(client: Channel, told: Message, reply: type[R]) -> R:
    """Tell the command of several hosts something, and return its answer, which may be long in coming: others
    may have more to prepare. Raises RemoteError, also if it stops in the middle of it.
    """
    client.send(told, NEVER)
    sockets.readable([client.sock])
    return client.expect(reply, Deadline.after(END_SECONDS))


def _least(request: StartLaunch, names: Sequence[str]) -> int:
    """Return the number of devices that must be ready when a launch begins."""
    if request.elastic and request.several_hosts:
        return 0  # others may be enough
    return max(request.elastic.least - request.host, 0) if request.elastic else len(names)


def _counted(request: StartLaunch, workers: int) -> StartLaunch:
    """Return a request that is checked for so many ``workers``; an elastic one gets their number, if it has
    none. Raises ConfigError.
    """
    check_start(request.processes, dict(request.variables))
    if not (elastic := request.elastic):
        return request
    if not elastic.most:
        elastic = replace(elastic, least=workers, most=workers)
    if not elastic.least <= workers <= elastic.most:
        raise ConfigError(
            f"--nnodes {elastic.least}:{elastic.most}: the launch has {counted(workers, 'worker')}; "
            "--devices chooses the devices, and --no-host leaves the host out"
        )
    check_start(request.processes, {}, elastic)
    return replace(request, elastic=elastic)


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
