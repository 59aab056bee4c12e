# SPDX-License-Identifier: Apache-2.0
"""The agent's relay to a real worker process: what is served and refused, what leaves, and how it ends."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import numpy as np
import pytest

from millpond.agent import job_worker
from millpond.agent.gate import CanaryError, Pattern, ledger
from millpond.base.errors import ConnectionLost, Refused
from millpond.linux.zygote.client import Zygote
from millpond.train.protocol import PART_VALUES, Fetch, Part, Ready, Update, Work, WorkProgress
from millpond.train.strategies import LocalRule
from millpond.train.worker import handle
from millpond.train.worker.handle import HostLeft
from millpond.wire.channel import Buffer

from ..waiting import eventually
from .worker_rig import (
    CANARY,
    CLAIM,
    DIE,
    GOOD,
    HANG,
    LEAK,
    LEAK_LATER,
    MARK,
    RAISE,
    SIZE,
    SPEAK,
    TELL,
    Agent,
    agent,
    agent_in,
    alike,
    module_agent,
    sent,
    soon,
)

__all__ = ["agent", "module_agent"]


def test_a_state_goes_in_and_an_update_comes_out_counted(agent: Agent) -> None:
    assert agent.ready == Ready((50,), (0,), 2)
    before = sent(agent)
    with agent.host() as host:
        update, values = agent.step(host)
        assert agent.fetch(host, 200) == values[:800]  # again
    assert (update.exchange, update.samples) == (1, 10)
    loss = pytest.approx(10 * np.log(8), rel=1e-4)  # of weights that are all 0
    assert (update.metrics, update.weight) == ({"loss": (loss, 10)}, 10)
    assert np.abs(np.frombuffer(values, np.float32)).max() == update.largest > 0
    assert sent(agent) - before == 4 * SIZE + 800
    assert isinstance(agent.error, ConnectionLost)


def test_a_model_that_raises_tells_where_and_nothing_more(agent: Agent) -> None:
    before = sent(agent)
    with agent.host() as host:
        with pytest.raises(
            Refused, match=r"ValueError at net.py:\d+ in forward; its message stays"
        ) as caught:
            agent.step(host, RAISE)
        assert caught.value.code == "model"
        with pytest.raises(Refused, match="samples 49 to 59 are wanted; there are 50") as caught:
            host.send(agent.work(start=49), soon(), bytes(4 * SIZE))
            host.expect(Update, soon())
        assert caught.value.code == "data"
        assert sent(agent) == before
        agent.step(host)
    eventually(lambda: CANARY.decode() in agent.log.read_text(), "the output has been copied to the log")


def test_a_request_that_the_policy_forbids_is_refused_and_the_worker_lives_on(agent: Agent) -> None:
    with agent.host() as host:
        host.send(agent.work(count=1), soon(), bytes(4 * SIZE))
        with pytest.raises(Refused, match=r"policy\.least_samples: samples 0 to 1 of ") as caught:
            host.expect(Update, soon())
        assert caught.value.code == "policy"
        agent.step(host)


@pytest.mark.parametrize("stop", [-1, 0, SIZE + 1])
def test_values_that_there_are_not_end_the_connection(agent: Agent, stop: int) -> None:
    with agent.host() as host:
        agent.step(host)
        host.send(Fetch(stop), soon())
        with pytest.raises(ConnectionLost):
            host.receive(soon())
    assert f"wants {stop} values of an update" in str(agent.error)


def test_before_there_is_an_update_none_can_be_fetched(agent: Agent) -> None:
    with agent.host() as host:
        with pytest.raises(Refused):
            agent.step(host, RAISE)
        host.send(Fetch(SIZE), soon())
        with pytest.raises(ConnectionLost):
            host.receive(soon())


@pytest.mark.parametrize("size", [0, 4, -4])
def test_a_state_of_another_size_ends_the_connection_alone(agent: Agent, size: int) -> None:
    whole = 4 * SIZE
    with agent.host() as host, pytest.raises(ConnectionLost):  # by either: the other closes at the head
        host.send(agent.work(), soon(), bytes(size and whole + size))
        host.receive(soon())
    assert str(agent.error) == f"the host sent {size and whole + size} bytes of state, not {whole}"
    with agent.host() as host:
        agent.step(host)


def test_a_payload_behind_a_request_that_has_none_ends_the_connection(agent: Agent) -> None:
    with agent.host() as host:
        agent.step(host)
        host.send(Fetch(8), soon(), bytes(4))
        with pytest.raises(ConnectionLost):
            host.receive(soon())
    assert str(agent.error) == "'fetch' has no place on a bulk connection"


def test_samples_that_are_made_up_need_no_private_ones(agent: Agent) -> None:
    """Only their time and memory leave, so what the policy says of private samples is not asked."""
    with agent.host() as host:
        host.send(Work(0, GOOD, 0, (), synthetic=1), soon(), bytes(4 * SIZE))
        update = host.expect(Update, soon())
        assert (update.samples, update.metrics, update.norm) == (1, {"loss": (0.0, 1.0)}, 0.0)
        assert update.seconds > 0 and update.peak > 0
        host.send(Fetch(8), soon())
        with pytest.raises(ConnectionLost):
            host.receive(soon())
    assert "was not answered" in str(agent.error)


@pytest.mark.expected_log("job steps: the worker process hangs")
def test_a_worker_that_hangs_is_told_and_a_host_that_leaves_is_not_waited_for(
    tmp_path: Path, zygote: Zygote, monkeypatch: pytest.MonkeyPatch
) -> None:
    with agent_in(tmp_path, zygote) as agent:
        with monkeypatch.context() as patient, agent.host() as host:
            patient.setattr(handle, "HANG_SECONDS", 60.0)  # the host leaves before
            host.send(agent.work(HANG), soon(), bytes(4 * SIZE))
            time.sleep(0.2)
        assert isinstance(agent.error, HostLeft)
        with agent.host() as host:
            with pytest.raises(Refused, match="hangs: it neither computes nor reads") as caught:
                agent.step(host)
            assert caught.value.code == "worker"
        assert isinstance(agent.error, ConnectionLost)


def test_a_worker_that_dies_in_a_step_is_told(tmp_path: Path, zygote: Zygote) -> None:
    with agent_in(tmp_path, zygote) as agent, agent.host() as host:
        with pytest.raises(Refused, match="the worker process died") as caught:
            agent.step(host, DIE)
        assert caught.value.code == "worker"


def test_a_task_keeps_no_more_than_the_policy_allows(agent: Agent) -> None:
    large = agent.kept / "large"
    with agent.host() as host:
        try:
            with large.open("wb") as file:
                file.truncate((1 << 30) + 1)  # a hole
            host.send(agent.work(), soon(), bytes(4 * SIZE))
            with pytest.raises(Refused) as refused:
                host.expect(Update, soon())
        finally:
            large.unlink()
        text = f"policy.largest_state: the task keeps more than {1 << 30} bytes on the device"
        assert (refused.value.code, refused.value.text) == ("policy", text)
        assert agent.step(host)[0].samples == 10


def test_the_folder_of_states_stays_while_another_worker_of_the_job_has_it(
    tmp_path: Path, zygote: Zygote
) -> None:
    """A new worker may come before the agent has ended the last one: its state would have no place."""
    agent = Agent(tmp_path, zygote)
    newer = agent.another()
    agent.worker.stop()
    assert agent.kept.is_dir()
    newer.stop()
    assert not agent.kept.exists()
    last = agent.another()
    (agent.kept / "state.safetensors").touch()
    last.stop()
    assert agent.kept.is_dir()


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


@pytest.mark.parametrize(("period", "told"), [(0.0, [50, 60, 99]), (60.0, [])])
def test_how_far_a_worker_is_leaves_in_percents_that_grow_and_not_often(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, period: float, told: list[int]
) -> None:
    """The model says 50, 40, 60, 60 and 200: what is left of it can hide little."""
    monkeypatch.setattr(job_worker, "PROGRESS_SECONDS", period)
    found = list[int]()
    with agent.host() as host:
        host.send(agent.work(TELL), soon(), bytes(4 * SIZE))
        while isinstance(message := host.receive(soon()).message, WorkProgress):
            found.append(message.percent)
    assert isinstance(message, Update) and found == told
