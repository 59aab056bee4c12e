# SPDX-License-Identifier: Apache-2.0
"""What leaves a job's worker: vectors, searched and counted, and nothing that the model says itself."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import numpy as np
import pytest

from millpond.agent.gate import CanaryError, Pattern, ledger
from millpond.base.errors import ConnectionLost
from millpond.linux.zygote.client import Zygote
from millpond.train.protocol import PART_VALUES, Fetch, Part, Update
from millpond.train.strategies import LocalRule
from millpond.wire.channel import Buffer

from .worker_rig import (
    CANARY,
    CLAIM,
    LEAK,
    LEAK_LATER,
    MARK,
    SIZE,
    SPEAK,
    Agent,
    agent,
    agent_in,
    alike,
    module_agent,
    sent,
    soon,
)

__all__ = ["agent", "module_agent"]


class Traced:
    """The places in memory that one socket of this process sends from and receives into."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sock: socket.socket | None = None
        self.into: list[tuple[int, int]] = []
        self.out: list[tuple[int, int]] = []
        sendall, recv_into = socket.socket.sendall, socket.socket.recv_into

        def sends(sock: socket.socket, data: Buffer) -> None:
            if sock is self.sock:
                self.out.append((address(data), memoryview(data).nbytes))
            sendall(sock, data)

        def receives(sock: socket.socket, buffer: memoryview) -> int:
            count = recv_into(sock, buffer)
            if sock is self.sock:
                self.into.append((address(buffer), count))
            return count

        patch.setattr(socket.socket, "sendall", sends)
        patch.setattr(socket.socket, "recv_into", receives)


def address(buffer: Buffer) -> int:
    return np.frombuffer(buffer, np.uint8).ctypes.data


def within(places: list[tuple[int, int]], memory: memoryview) -> int:
    """Return how many bytes were sent from, or received into, ``memory``."""
    begin = address(memory)
    return sum(count for at, count in places if begin <= at <= at + count <= begin + len(memory))


@pytest.mark.parametrize("searched", [False, True])
def test_an_agent_copies_vectors_only_to_search_them(
    tmp_path: Path, zygote: Zygote, monkeypatch: pytest.MonkeyPatch, searched: bool
) -> None:
    """The kernel writes a state into the memory that the worker maps, and sends values from the release
    buffer, into which they are copied once. With the worker's copy of the state, there are three copies in
    user space per exchange, see test_gradients for those of the worker.
    """
    patterns = [Pattern("c", CANARY, True)] if searched else []
    with agent_in(tmp_path, zygote, *patterns, classes=4032) as agent:
        size = 65 * 4032  # two parts; one of 16 KiB would be copied to its head
        with agent.host() as host:
            trace = Traced(monkeypatch)
            trace.sock = agent.socket
            host.send(agent.work(), soon(), bytes(4 * size))
            host.expect(Update, soon())
            host.send(Fetch(size), soon())
            for start in range(0, size, PART_VALUES):
                part = host.expect(Part, soon(), payload=None)
                values = host.receive_payload(4 * PART_VALUES, soon())
                assert part.start == start and len(values) == 4 * min(PART_VALUES, size - start)
            monkeypatch.undo()
        state, sent_from = agent.worker._state.data, agent.worker._release.part(0, 4 * size)
        assert within(trace.into, state) == 4 * size
        assert within(trace.out, sent_from) == (0 if searched else 4 * size)
        heads = sum(count for _, count in (*trace.into, *trace.out)) - 8 * size
        assert 0 < heads < 4096  # nothing was sent or received twice


def test_forbidden_bytes_among_sums_do_not_leave(agent: Agent) -> None:
    before, seen = sent(agent), ledger(agent.gate, [])[1]["c"]
    with agent.host() as host, pytest.raises(ConnectionLost):
        agent.step(host, LEAK)
    assert isinstance(agent.error, CanaryError)
    assert sent(agent) == before
    assert ledger(agent.gate, [])[1]["c"] == seen + 1


def test_what_is_written_after_the_search_is_not_what_is_sent(agent: Agent) -> None:
    sums_there = agent.worker._values.data
    written: list[bool] = []

    def searched() -> None:
        """Now the worker writes to the sums, and is done before anything is sent."""
        sums_there[:4] = np.float32(MARK).tobytes()
        end = time.monotonic() + 20
        while CANARY not in bytes(sums_there) and time.monotonic() < end:
            time.sleep(0.001)
        written.append(CANARY in bytes(sums_there))

    agent.outlet.searched = searched
    with agent.host() as host:
        _, sums = agent.step(host, LEAK_LATER, count=50)
        agent.outlet.searched = lambda: None
        assert written == [True]
        assert CANARY not in sums
        assert alike(sums, agent.step(host, count=50)[1])


def test_where_nothing_is_searched_the_same_sums_leave_counted(
    agent: Agent, tmp_path: Path, zygote: Zygote
) -> None:
    with agent.host() as host:
        expected = agent.step(host, count=50)[1]
    with agent_in(tmp_path, zygote) as other, other.host() as host:
        assert agent.outlet.searches and not other.outlet.searches
        assert all(alike(other.step(host, count=50)[1], expected) for _ in range(2))
        assert ledger(other.gate, [])[0]["parameters"] == 2 * 4 * SIZE


@pytest.mark.parametrize("normalized", [False, True])
def test_the_number_of_local_steps_leaves_only_where_it_is_needed(
    tmp_path: Path, zygote: Zygote, normalized: bool
) -> None:
    local = LocalRule(normalized=normalized)
    with agent_in(tmp_path, zygote, local=local) as agent, agent.host() as host:
        update, _ = agent.step(host, CLAIM)
        assert update.local_steps == (7.0 if normalized else 1.0)


def test_what_a_model_says_itself_does_not_leave(tmp_path: Path, zygote: Zygote) -> None:
    with agent_in(tmp_path, zygote) as agent:
        with agent.host() as host, pytest.raises(ConnectionLost):
            agent.step(host, SPEAK)
        assert str(agent.error) == "the worker sent 'update', which may not leave"
        assert sent(agent) == 0
