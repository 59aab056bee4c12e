# SPDX-License-Identifier: Apache-2.0
"""Edge (processes): one launch over several hosts: each one's daemon runs its part, this process joins them.

The daemon of another host is reached by a remote shell, which runs 'millpond dial-stdio' there. Ranks are in
the order of the hosts. The first worker that fails ends those of all hosts, but elastic ones.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import socket
import subprocess
import uuid
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from millpond.base.deadline import Deadline
from millpond.base.errors import (
    ConnectionLost,
    DeadlineExceeded,
    LocalError,
    ProtocolError,
    Refused,
    RemoteError,
)
from millpond.host.api.launch import (
    EVERYONE,
    BeginLaunch,
    EndLaunch,
    JoinLaunch,
    LaunchEnded,
    LaunchInput,
    LaunchInputsEnd,
    LaunchLost,
    LaunchNews,
    LaunchOpened,
    LaunchOutput,
    LaunchPart,
    LaunchPrepares,
    LaunchSaved,
    LaunchWaits,
    OtherHost,
    RestartLaunch,
    StartLaunch,
)
from millpond.host.client.connection import connected
from millpond.host.fleet import directory
from millpond.linux import sockets
from millpond.train.distributed.launch_messages import SAVED_PART
from millpond.wire.channel import Channel
from millpond.wire.framing import Head, Limits
from millpond.wire.messages import Failure, Message

R = TypeVar("R", bound=Message)
SEND_SECONDS = 30.0
END_SECONDS = 5.0
_LIMITS = Limits(head=64 << 20, payload=SAVED_PART)
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,62}[A-Za-z0-9_])?")
_LOOPBACK = "127."
_KEPT_ALIVE = ("-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3")
"""Options that end ssh's connection to a host which has gone without a word."""


@dataclass(frozen=True, slots=True)
class HostName:
    """A host of a launch: what the remote shell calls it, and its address, "" if its name tells it."""

    target: str
    address: str = ""

    @property
    def name(self) -> str:
        """The host's name in those of its workers."""
        return self.target.rpartition("@")[2]

    @property
    def is_here(self) -> bool:
        """Whether this is the host on which the command runs."""
        own = socket.gethostname()
        return self.name in ("localhost", own, own.partition(".")[0])


def hosts_of(text: str) -> tuple[HostName, ...]:
    """Return the hosts of a list such as ``a,root@b=10.0.0.2``. Raises LocalError."""
    found = tuple(
        HostName(target, given) for target, _, given in (one.partition("=") for one in text.split(","))
    )
    for host in found:
        if not _NAME.fullmatch(host.name) or host.target.startswith("-"):
            raise LocalError(f"--hosts {text}: '{host.target}' is no name of a host")
        if [one.name for one in found].count(host.name) > 1:
            raise LocalError(f"--hosts {text}: {host.name} is named twice")
    return found


def addressed(hosts: Sequence[HostName]) -> tuple[HostName, ...]:
    """Return the hosts with their addresses for each other. Raises LocalError for one without."""
    return tuple(replace(host, address=host.address or _address(host, hosts)) for host in hosts)


def _address(host: HostName, hosts: Sequence[HostName]) -> str:
    try:
        if host.is_here and (others := [one for one in hosts if not one.is_here]):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                sock.connect((others[0].address or others[0].name, 9))
                return str(sock.getsockname()[0])
        found = str(socket.getaddrinfo(host.name, None, socket.AF_INET)[0][4][0])
    except OSError as error:
        raise LocalError(
            f"{host.name}: no address: {error.strerror}; give it as {host.name}=ADDRESS"
        ) from None
    if found.startswith(_LOOPBACK) and len(hosts) > 1:
        raise LocalError(
            f"{host.name} is {found} here: give the others' address of it, as {host.name}=ADDRESS"
        )
    return found


@dataclass(slots=True)
class _Part:
    """A host's part of a launch, over the channel to its daemon."""

    host: HostName
    channel: Channel
    shell: subprocess.Popen[bytes] | None = None
    workers: tuple[str, ...] = ()
    ended: LaunchEnded | None = None
    waits: bool = False
    """Whether it waits for lost workers alone."""

    def send(self, message: Message, payload: bytes = b"") -> None:
        """Send a message. Raises RemoteError, which names the host."""
        with self._told_truly():
            self.channel.send(message, Deadline.after(SEND_SECONDS), payload)

    def expect(self, reply: type[R]) -> R:
        while isinstance((head := self._receive()).message, LaunchPrepares):
            pass  # another host may have more to wait for
        return self.channel.checked(head, reply)

    def _receive(self) -> Head:
        """Receive a message. Raises Refused for a failure, which names the host, RemoteError."""
        with self._told_truly():
            sockets.readable([self.channel.sock])  # as long as it takes, but not in the middle of a message
            head = self.channel.receive(Deadline.after(SEND_SECONDS))
        if isinstance(head.message, Failure):
            raise Refused("", head.message.code, f"{self.host.name}: {head.message.text}")
        return head

    @contextlib.contextmanager
    def _told_truly(self) -> Iterator[None]:
        """Raise what has become of the connection, if it is lost inside the context."""
        try:
            yield
        except DeadlineExceeded:
            how = f"its daemon stood still for {SEND_SECONDS:.0f} s in the middle of a message"
            raise ConnectionLost(f"{self.host.name}: {how}") from None
        except ConnectionLost:
            how = "the connection to its daemon has ended"
            if self.shell:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.shell.wait(END_SECONDS)
                how += f": exit code {self.shell.returncode} of the remote shell"
            raise ConnectionLost(f"{self.host.name}: {how}") from None

    def next(self) -> tuple[Message, bytes]:
        head = self._receive()
        if not head.payload_size:
            return head.message, b""
        with self._told_truly():
            data = self.channel.receive_payload(SAVED_PART, Deadline.after(SEND_SECONDS))
        return head.message, bytes(data)

    def named(self, worker: str) -> str:
        """Return a worker's name among those of all hosts. Raises ProtocolError for one that is none."""
        if worker not in (*self.workers, EVERYONE):
            raise ProtocolError(f"{self.host.name} told of a worker that it does not have")
        return f"{worker}.{self.host.name}"

    def close(self) -> None:
        self.channel.close()
        if self.shell:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.shell.wait(END_SECONDS)
            self.shell.kill()
            self.shell.wait(END_SECONDS)


def _reached(host: HostName, rsh: str, fleet: Path) -> _Part:
    """Connect to the daemon of a host: to that of the ``fleet`` here, or by ``rsh``. Raises LocalError."""
    if host.is_here:
        return _Part(host, _channel(connected(directory.read(fleet)), host))
    ours, theirs = socket.socketpair()
    with theirs:
        command = [*_shell(rsh), host.target, "millpond", "dial-stdio"]
        try:
            shell = subprocess.Popen(command, stdin=theirs.fileno(), stdout=theirs.fileno())
        except OSError as error:
            ours.close()
            raise LocalError(f"{host.name}: {command[0]}: {error.strerror}") from None
    return _Part(host, _channel(ours, host), shell)


def _channel(sock: socket.socket, host: HostName) -> Channel:
    """Return the channel to a daemon, whose texts reach a terminal: without control characters."""
    return Channel(sock, host.name, limits=_LIMITS, clean=True)


def _shell(rsh: str) -> list[str]:
    """Return the words of a remote shell; ssh takes the first value of an option, so that the user's stay."""
    words = shlex.split(rsh)
    return [*words, *(_KEPT_ALIVE if Path(next(iter(words), "")).name == "ssh" else ())]


@dataclass(slots=True)
class LaunchHosts:
    """A launch over several ``hosts``, whose links are not encrypted if ``plain``."""

    hosts: tuple[HostName, ...]
    rsh: str
    plain: bool
    fleet: Path
    _parts: list[_Part] = field(default_factory=list)
    _elastic: bool = False
    _preparing: set[str] = field(default_factory=set)

    def launch(
        self, request: StartLaunch, inputs: Iterable[tuple[LaunchInput, bytes]] = ()
    ) -> Generator[tuple[LaunchNews, bytes], None, None]:
        """Launch a script and follow it until all its workers have ended, as ``DaemonClient.launch`` does.
        Workers are named WORKER.HOST.
        """
        self._elastic = request.elastic is not None
        with contextlib.ExitStack() as stack:
            for host in addressed(self.hosts):
                self._parts.append(part := _reached(host, self.rsh, self.fleet))
                self._preparing.add(host.name)
                stack.callback(part.close)
            self._start(request, inputs)
            yield LaunchPrepares("waits for all hosts to be ready"), b""
            self._join()
            yield from self._follow()
            yield self._whole(), b""

    def _start(self, request: StartLaunch, inputs: Iterable[tuple[LaunchInput, bytes]]) -> None:
        for part in self._parts:
            part.send(
                replace(request, devices=_own(part, request.devices), several_hosts=True, plain=self.plain)
            )
        if not request.inputs:
            return
        for file, content in inputs:
            worker, _, host = file.worker.partition(".")
            found = [part for part in self._parts if part.host.name == host or file.worker == EVERYONE]
            if not found:
                raise LocalError(f"files of {file.worker}: name a worker as csd0.{self._parts[0].host.name}")
            for part in found:
                part.send(replace(file, worker=worker), content)
        for part in self._parts:
            part.send(LaunchInputsEnd())

    def _join(self) -> None:
        """Tell each host of the others, and have all begin once the ways between them are open."""
        told = [part.expect(LaunchPart) for part in self._parts]
        for part, its in zip(self._parts, told, strict=True):
            if not its.workers:
                raise ProtocolError(f"{part.host.name} has no worker for the launch")
        if not self.plain:
            self._check_encrypted(told)
        for part, its in zip(self._parts, told, strict=True):
            part.workers = tuple(name for _, name in its.workers)
        both = zip(self._parts, told, strict=True)
        names = [[(where, part.named(name)) for where, name in its.workers] for part, its in both]
        run, size, first = uuid.uuid4().hex, sum(map(len, names)), 0
        master, port = told[0].workers[0][0], told[0].port
        for number, part in enumerate(self._parts):
            others = [other for other in range(len(self._parts)) if other != number]
            known = tuple(name for other in others for name in names[other])
            links = tuple(_other(self._parts[other], told[other]) for other in others)
            name = part.host.name
            part.send(JoinLaunch(name, run, first, size, master, port, known, links))
            first += len(names[number])
        for part in self._parts:
            part.expect(LaunchOpened)
        for part in self._parts:
            part.send(BeginLaunch())

    def _check_encrypted(self, told: Sequence[LaunchPart]) -> None:
        """Raise LocalError where links could not be encrypted, if there are any."""
        bare = [part.host.name for part, its in zip(self._parts, told, strict=True) if not its.key]
        if bare and len(told) > 1:
            raise LocalError(
                f"{', '.join(bare)}: the kernel has no WireGuard (modprobe wireguard), so links between "
                "hosts would not be encrypted: --plain-hosts accepts that"
            )

    def _follow(self) -> Iterator[tuple[LaunchNews, bytes]]:
        """Yield what the workers print and save, until each part has ended."""
        while running := {part.channel.sock: part for part in self._parts if not part.ended}:
            for sock in sockets.readable(list(running)):
                yield from self._take(running[sock])

    def _take(self, part: _Part) -> Iterator[tuple[LaunchNews, bytes]]:
        """Take one message of a part. Raises RemoteError."""
        try:
            message, data = part.next()
        except ConnectionLost as error:
            if not self._elastic or part is self._parts[0]:  # all meet there
                raise
            message, data = LaunchEnded((), "", 0.0), b""
            self._tell_others(part, RestartLaunch())
            yield LaunchOutput(EVERYONE, (f"{error}; the others go on",)), b""
        if isinstance(message, LaunchOutput | LaunchSaved):
            yield replace(message, worker=part.named(message.worker)), data
        elif isinstance(message, LaunchPrepares):
            yield self._prepares(part.host.name, message), b""
        elif isinstance(message, LaunchWaits):
            part.waits = message.waits
            if all(each.ended or each.waits for each in self._parts):
                self._tell_others(None, EndLaunch())
        elif isinstance(message, LaunchLost):
            self._tell_others(part, RestartLaunch())
        elif isinstance(message, LaunchEnded):
            part.ended = message
            if message.error or self._elastic:
                self._tell_others(part, EndLaunch())
        else:
            raise ProtocolError(f"{part.host.name} sent '{message.NAME}' during a launch")

    def _prepares(self, host: str, news: LaunchPrepares) -> LaunchPrepares:
        """Return what a host says as a word of all: the scripts run once each host has no more of them."""
        share = f", {100 * news.done // news.total} %" if news.total else ""
        if news.text:
            return LaunchPrepares(f"{host}: {news.text}{share}")
        self._preparing.discard(host)
        left = ", ".join(sorted(self._preparing))
        return LaunchPrepares(f"waits for {left}" if left else "")

    def _tell_others(self, part: _Part | None, message: Message) -> None:
        for other in self._parts:
            if other is not part and not other.ended:
                with contextlib.suppress(RemoteError):  # which is seen next
                    other.send(message)

    def _whole(self) -> LaunchEnded:
        """Return the end of all parts as one."""
        ends = [(part, part.ended) for part in self._parts if part.ended]
        workers = [replace(one, name=part.named(one.name)) for part, end in ends for one in end.workers]
        errors = [_with_host(part, end.error) for part, end in ends if end.error]
        return LaunchEnded(tuple(workers), next(iter(errors), ""), max(end.seconds for _, end in ends))


def _other(part: _Part, told: LaunchPart) -> OtherHost:
    return OtherHost(part.host.name, part.host.address, told.networks, told.key, told.link_port)


def _own(part: _Part, devices: Sequence[str]) -> tuple[str, ...]:
    """Return those of the devices, named csd0.HOST, that are a host's; none are all of it."""
    return tuple(name for name, _, host in (one.partition(".") for one in devices) if host == part.host.name)


def _with_host(part: _Part, error: str) -> str:
    """Return an error that names the worker of this host, or the host."""
    found = re.match(r"[a-z0-9-]+", error)
    worker = found[0] if found else ""
    known = worker in part.workers
    return f"{worker}.{part.host.name}{error[len(worker) :]}" if known else f"{part.host.name}: {error}"
