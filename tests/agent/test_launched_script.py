# SPDX-License-Identifier: Apache-2.0
"""A launched script on a device: bounded, counted, searched, and ended with the host's connection."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from millpond.agent import launched_script as launches
from millpond.agent.config import AgentConfig, LinkConfig
from millpond.agent.gate import CanaryError, Gate, LedgerCounters, Pattern, ledger
from millpond.agent.launched_script import LaunchedScripts
from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, Refused
from millpond.wire.channel import Channel
from millpond.wire.launch_messages import Exited, Launch, Output
from millpond.wire.messages import Message

CANARY = b"canary-of-the-tests"
WAITING = "import time\nprint('begun', flush=True)\ntime.sleep(600)\n"


class Agent:
    """A gate and launches, as an agent has them, and the host's end of a connection that they serve."""

    def __init__(self, folder: Path, crossed: Callable[[], int]) -> None:
        (folder / "volume" / "public").mkdir(parents=True)
        config = AgentConfig(
            "csd0", LinkConfig(str(folder / "s"), "10.77.0.2/30"), volume=str(folder / "volume")
        )
        self.gate = Gate([Pattern("c", CANARY, True)], LedgerCounters.in_memory())
        self.launches = LaunchedScripts(config, self.gate, [], crossed)
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
def agent(tmp_path: Path) -> Iterator[Agent]:
    yield Agent(tmp_path, lambda: 0)
    own = psutil.Process(os.getpid()).children(recursive=True)
    assert not [process for process in own if "millpond.launch.entry" in process.cmdline()]


def script(code: str) -> Launch:
    return Launch("a.py", (), {"a.py": code.encode()}, 0, 1, "127.0.0.1", 40000)


def soon() -> Deadline:
    return Deadline.after(30)


def said(host: Channel) -> tuple[list[str], int]:
    """All lines, and the exit code."""
    lines: list[str] = []
    while True:
        found: Message = host.receive(soon()).message
        if isinstance(found, Exited):
            return lines, found.code
        assert isinstance(found, Output), found
        lines += found.lines


def test_a_script_says_its_lines_and_its_exit_code(agent: Agent) -> None:
    host, thread = agent.serve(
        script("import sys\nprint('one')\nprint('two', file=sys.stderr)\nsys.exit(5)\n")
    )
    with host:
        assert said(host) == (["one", "two"], 5)
    thread.join(10)
    sent, _ = ledger(agent.gate, [])
    assert sent["launched"] > len("onetwo") and not sent["metrics"]


def test_more_output_than_may_leave_is_dropped_and_told(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launches, "MOST_OUTPUT", 50_000)
    host, thread = agent.serve(script("for n in range(30_000):\n    print('x' * 9)\nraise SystemExit(3)\n"))
    with host:
        lines, code = said(host)
    thread.join(10)
    assert code == 3
    assert 50_000 <= sum(len(line) + 1 for line in lines[:-1]) < 50_000 + (1 << 15)
    assert lines[-1].startswith("(more than 0 MiB of output")


def test_a_script_ends_with_the_hosts_connection(agent: Agent) -> None:
    host, thread = agent.serve(script(WAITING))
    assert host.expect(Output, soon()).lines == ("begun",)
    assert agent.launches.names == ["a.py"]
    host.close()
    thread.join(10)
    assert not thread.is_alive() and isinstance(agent.error, ConnectionLost)
    assert agent.launches.names == []


def test_one_script_at_a_time_and_none_with_odd_files(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "PLACE_SECONDS", 0.2)
    first, thread = agent.serve(script(WAITING))
    first.expect(Output, soon())
    for request, code in ((script(""), "busy"), (Launch("../a", (), {"../a": b""}, 0, 1, "", 1), "launch")):
        second, other = agent.serve(request)
        with second, pytest.raises(Refused) as caught:
            second.expect(Exited, soon())
        other.join(10)
        assert caught.value.code == code
    first.close()
    thread.join(10)


def test_a_canary_in_the_output_ends_the_script(agent: Agent) -> None:
    host, thread = agent.serve(script(f"print('a')\nprint({CANARY.decode()!r}, flush=True)\n" + WAITING))
    with host:
        thread.join(20)
    assert isinstance(agent.error, CanaryError)
    assert ledger(agent.gate, [])[1]["c"] == 1


def test_what_leaves_beside_the_gate_is_counted(tmp_path: Path) -> None:
    crossings = itertools.chain([1000], itertools.repeat(51_000))
    agent = Agent(tmp_path, lambda: next(crossings))
    host, thread = agent.serve(script("print('one')\n"))
    with host:
        said(host)
    thread.join(10)
    # What the gate counted at the end has not crossed this counter, which stands still.
    assert 50_000 <= sum(ledger(agent.gate, [])[0].values()) < 50_200
