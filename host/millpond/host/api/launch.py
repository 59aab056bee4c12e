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

    Answered by LaunchOutput and LaunchSaved repeatedly, then LaunchEnded. The launch ends with the
    connection.
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
