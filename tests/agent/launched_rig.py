# SPDX-License-Identifier: Apache-2.0
"""An agent that serves launched scripts, and the host's end of a launch."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from millpond.agent.config import AgentConfig, LinkConfig, Privacy
from millpond.agent.gate import CanaryError, Gate, LedgerCounters, Pattern
from millpond.agent.launched_script import LaunchedScripts
from millpond.agent.policy.settings import Policy
from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost
from millpond.linux.zygote.client import Zygote
from millpond.train.distributed.launch_messages import (
    AllSaved,
    Exited,
    Launch,
    Output,
    SavedPart,
    Taken,
)
from millpond.wire.channel import Channel
from millpond.wire.messages import Message

from ..audited import unlogged_sessions
from ..waiting import eventually

CANARY = b"canary-of-the-tests"


WAITING = "import time\nprint('begun', flush=True)\ntime.sleep(600)\n"


class Agent:
    """A gate and launches, as an agent has them, and the host's end of a connection that they serve."""

    def __init__(
        self, folder: Path, zygote: Zygote, crossed: Callable[[], int], **settings: Policy | Privacy
    ) -> None:
        (folder / "volume" / "public").mkdir(parents=True)
        link = LinkConfig(str(folder / "s"), "10.77.0.2/30")
        config = replace(AgentConfig("csd0", link, volume=str(folder / "volume")), **settings)
        self.gate = Gate([Pattern("c", CANARY, True)], LedgerCounters.in_memory())
        self.launches = LaunchedScripts(config, self.gate, [], crossed, zygote, unlogged_sessions)
        self.error: Exception | None = None

    def serve(self, launch: Launch) -> tuple[Channel, threading.Thread]:
        """The host's channel to a launch, and the thread that serves it."""
        near, far = socket.socketpair()
        host = Channel(far, "host", outlet=self.gate.outlet())

        def run() -> None:
            with host:
                try:
                    self.launches.serve(launch, host)
                except (ConnectionLost, CanaryError) as error:
                    self.error = error

        thread = threading.Thread(target=run)
        thread.start()
        return Channel(near, "csd0"), thread


@pytest.fixture
def agent(tmp_path: Path, zygote: Zygote) -> Iterator[Agent]:
    yield Agent(tmp_path, zygote, lambda: 0)
    eventually(lambda: not processes(), "no process of a script is left")


def processes() -> list[psutil.Process]:
    found = []
    for process in psutil.Process(os.getpid()).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            found += [process] if process.name() == "launch.entry" else []
    return found


def script(code: str, most_saved: int = 0, **files: bytes) -> Launch:
    sent = {"a.py": code.encode(), **files}
    return Launch("a.py", (), sent, 0, 1, "127.0.0.1", 40000, "127.0.0.1", most_saved)


def soon() -> Deadline:
    return Deadline.after(30)


def output(host: Channel) -> tuple[str, ...]:
    """Take lines."""
    found = host.expect(Output, soon()).lines
    host.send(Taken(), soon())
    return found


def said(host: Channel) -> tuple[list[str], int]:
    """All lines, and the exit code."""
    lines: list[str] = []
    while True:
        found: Message = host.receive(soon()).message
        if isinstance(found, Exited):
            assert host.expect(AllSaved, soon()) == AllSaved(0, 0, 0)
            return lines, found.code
        assert isinstance(found, Output), found
        lines += found.lines
        host.send(Taken(), soon())


def collected(host: Channel, begun: dict[str, bytes] | None = None) -> tuple[dict[str, bytes], AllSaved]:
    """The files that came, with what has come of them already, and the count of them."""
    files = dict(begun or {})
    while True:
        head = host.receive(soon())
        if isinstance(head.message, AllSaved):
            return files, head.message
        assert isinstance(head.message, SavedPart), head.message
        part, before = head.message, files.get(head.message.path, b"")
        assert part.start == len(before)
        files[part.path] = before + host.receive_payload(1 << 20, soon())
        host.send(Taken(), soon())
