"""Pure: what the 'launch' command and the host daemon say to each other, over the daemon's Unix socket."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.wire.messages import Message, message


@message("api.launch")
@dataclass(frozen=True, slots=True)
class StartLaunch(Message):
    """Run ``script``, one of ``files``, on ``devices`` (all of the fleet if none is named) and the host.

    Answered by LaunchOutput again and again, then LaunchEnded. It runs for as long as the connection is open.
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
    """How a worker ended: its exit code, None if it was ended because of another one."""

    name: str
    rank: int
    exit_code: int | None


@message("api.launch.ended")
@dataclass(frozen=True, slots=True)
class LaunchEnded(Message):
    """All workers have ended; ``error`` says which one failed first and how, if one did."""

    workers: tuple[WorkerEnd, ...]
    error: str
    seconds: float
