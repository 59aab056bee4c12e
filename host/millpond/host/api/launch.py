# SPDX-License-Identifier: Apache-2.0
"""Pure: the messages between the 'launch' command and the host daemon, over the daemon's Unix socket."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.wire.messages import Message, message


@message("api.launch")
@dataclass(frozen=True, slots=True)
class StartLaunch(Message):
    """Run ``script``, one of ``files``, on ``devices`` (all of the fleet if none is named) and the host.

    Answered by LaunchOutput repeatedly, then LaunchEnded. The launch ends with the connection.
    """

    script: str
    arguments: tuple[str, ...]
    files: dict[str, bytes]
    devices: tuple[str, ...]
    host: bool


@message("api.launch.output")
@dataclass(frozen=True, slots=True)
class LaunchOutput(Message):
    """Lines that a worker printed."""

    worker: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """The end of a worker: its exit code, None if the launch ended it because of another worker."""

    name: str
    rank: int
    exit_code: int | None


@message("api.launch.ended")
@dataclass(frozen=True, slots=True)
class LaunchEnded(Message):
    """All workers have ended; ``error`` names the first that failed and its failure, if one did."""

    workers: tuple[WorkerEnd, ...]
    error: str
    seconds: float
