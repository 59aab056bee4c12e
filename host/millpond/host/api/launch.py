# SPDX-License-Identifier: Apache-2.0
"""Pure: the messages between the 'launch' command and the host daemon, over the daemon's Unix socket."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.train.distributed.launch_messages import ElasticAgents
from millpond.wire.messages import Message, message


@message("api.launch")
@dataclass(frozen=True, slots=True)
class StartLaunch(Message):
    """Run ``script``, one of ``files``, on ``devices`` (all of the fleet if none is named) and the host.

    What the workers save comes back, up to ``most_saved`` bytes of each. If ``confined``, the workers have no
    network, and see the private ``folders``; see ``launch_messages.Launch`` for these and ``module``,
    ``processes``, ``variables``, ``transforms`` and ``elastic``. With ``shares`` the descriptor of the folder
    that all share follows, then with ``inputs`` LaunchInputs and LaunchInputsEnd.

    Answered by LaunchPrepares now and then, by LaunchOutput and LaunchSaved repeatedly, then LaunchEnded. The
    launch ends with the connection.

    One of ``several_hosts`` is answered by LaunchPart first, and goes on as JoinLaunch and BeginLaunch say;
    what goes from host to host is not encrypted if ``plain``.
    """

    script: str
    arguments: tuple[str, ...]
    files: dict[str, bytes]
    devices: tuple[str, ...]
    host: bool
    most_saved: int = 0
    confined: bool = False
    folders: tuple[str, ...] = ()
    signature: str = ""
    module: str = ""
    processes: int = 1
    variables: tuple[tuple[str, str], ...] = ()
    inputs: bool = False
    shares: bool = False
    transforms: str = ""
    elastic: ElasticAgents | None = None
    several_hosts: bool = False
    plain: bool = False


@message("api.launch.part")
@dataclass(frozen=True, slots=True)
class LaunchPart(Message):
    """The part of a launch that this host can take: its workers' addresses, each with the worker's name, and
    the ``networks`` of its devices. If its first worker is that of all, they meet at ``port`` there. It has
    the public ``key`` of its links, "" without encryption, and their UDP port.
    """

    workers: tuple[tuple[str, str], ...]
    networks: tuple[str, ...]
    port: int
    key: str
    link_port: int


@dataclass(frozen=True, slots=True)
class OtherHost:
    """Another host of a launch, by its name: its ``address``, the ``networks`` of its devices, and the public
    ``key`` and UDP ``port`` of its links, if these are encrypted.
    """

    name: str
    address: str
    networks: tuple[str, ...]
    key: str
    port: int


@message("api.launch.join")
@dataclass(frozen=True, slots=True)
class JoinLaunch(Message):
    """Take part in the launch ``run`` of ``size`` workers with those from the rank ``first`` on, as the host
    ``name``; all meet at the master's address and port. ``names`` are the addresses of the workers of the
    ``others``, each with a name.

    Answered by LaunchOpened, once the way to the others is open.
    """

    name: str
    run: str
    first: int
    size: int
    master_address: str
    master_port: int
    names: tuple[tuple[str, str], ...]
    others: tuple[OtherHost, ...]


@message("api.launch.opened")
class LaunchOpened(Message):
    """The way to the other hosts is open; BeginLaunch is awaited, which all get once this came from all."""


@message("api.launch.begin")
class BeginLaunch(Message):
    """Run the script."""


@message("api.launch.lost")
class LaunchLost(Message):
    """An elastic worker is lost: the scripts of the others are to start again, see RestartLaunch."""


@message("api.launch.waits")
@dataclass(frozen=True, slots=True)
class LaunchWaits(Message):
    """Whether this host ``waits`` for lost workers and runs no other. Once all hosts that have not ended do,
    nobody is left to whom they could come back, and EndLaunch ends it.
    """

    waits: bool


@message("api.launch.restart")
class RestartLaunch(Message):
    """Start the elastic scripts again, as for a worker of this host that is lost."""


@message("api.launch.end")
class EndLaunch(Message):
    """End the script: that of another host has failed. An elastic one goes on until it ends by itself, and
    waits no longer for workers that are lost.
    """


EVERYONE = "all"
"""The name of all workers together: of files for each, and of metrics over all."""


@message("api.launch.input")
@dataclass(frozen=True, slots=True)
class LaunchInput(Message):
    """A part of a file for a ``worker``, or for each, see EVERYONE and ``launch_messages.InputPart``."""

    worker: str
    path: str
    start: int
    size: int
    wheel: bool = False


@message("api.launch.inputs_end")
@dataclass(frozen=True, slots=True)
class LaunchInputsEnd(Message):
    """All files have been sent."""


@message("api.launch.prepares")
@dataclass(frozen=True, slots=True)
class LaunchPrepares(Message):
    """Tells what the launch does before all scripts run, in words, and how many bytes of files the workers
    have of the ``total``, 0 where that is not what it does. It runs once there is no ``text``.
    """

    text: str = ""
    done: int = 0
    total: int = 0


@message("api.launch.output")
@dataclass(frozen=True, slots=True)
class LaunchOutput(Message):
    """Lines that a worker printed."""

    worker: str
    lines: tuple[str, ...]


@message("api.launch.saved")
@dataclass(frozen=True, slots=True)
class LaunchSaved(Message):
    """A part of a file that a worker has saved, see ``launch_messages.SavedPart``."""

    worker: str
    path: str
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """The end of a worker: its exit code, None if the launch ended it because of another worker; the files
    that it had saved, their bytes, and how many were left out, of which some are ``named``.
    """

    name: str
    rank: int
    exit_code: int | None
    files: int = 0
    size: int = 0
    left_out: int = 0
    named: tuple[str, ...] = ()


@message("api.launch.ended")
@dataclass(frozen=True, slots=True)
class LaunchEnded(Message):
    """All workers have ended; ``error`` names the first that failed and its failure, if one did."""

    workers: tuple[WorkerEnd, ...]
    error: str
    seconds: float


LaunchNews = LaunchPrepares | LaunchOutput | LaunchSaved | LaunchEnded
"""The answers to a StartLaunch."""
