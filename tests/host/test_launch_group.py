# SPDX-License-Identifier: Apache-2.0
"""The exchanges of a private launch on the host: exact in every order, over at the first fault, by name."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import numpy as np
import pytest
import torch

from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost
from millpond.host.api.launch import (
    EndLaunch,
    LaunchEnded,
    LaunchLost,
    LaunchOutput,
    LaunchPrepares,
    LaunchWaits,
)
from millpond.host.fleet.device import Device
from millpond.host.launch.group import LaunchGroup, serve_channel
from millpond.host.launch.inputs import LaunchInputs
from millpond.host.launch.run import LaunchRun
from millpond.host.launch.workers import HostPlace, LaunchWorker
from millpond.linux.zygote.client import Zygote
from millpond.train.distributed.channel import ChannelCollectives
from millpond.train.distributed.collectives import SLOTS, ExchangeStep
from millpond.train.distributed.group_messages import (
    PART_BYTES,
    Contribution,
    Gather,
    GroupPart,
    MeanOfStep,
    ReportMetric,
    VectorWanted,
)
from millpond.train.distributed.launch_messages import ElasticAgents, Launch
from millpond.wire.channel import Channel
from millpond.wire.messages import Message

from ..waiting import eventually

RANKS = 3
SIZE = PART_BYTES // 4 + 100
"""More than one part."""


def soon() -> Deadline:
    return Deadline.after(30)


@dataclass
class Group:
    """The host's side, with a channel of each rank."""

    channels: list[Channel]
    notes: list[str] = field(default_factory=list)
    faults: list[tuple[int, str]] = field(default_factory=list)

    def all(self, do: Callable[[ChannelCollectives, int], object]) -> list[object]:
        """What all ranks get that do something at once."""
        found: list[object] = [None] * RANKS

        def run(rank: int) -> None:
            found[rank] = do(ChannelCollectives(self.channels[rank], rank, RANKS, 0, (1,) * RANKS), rank)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return found


@pytest.fixture
def group() -> Iterator[Group]:
    found = Group([])
    host = LaunchGroup(RANKS, found.notes.append, lambda rank, text: found.faults.append((rank, text)))
    threads = []
    with contextlib.ExitStack() as stack:
        stack.callback(host.end)
        for rank in range(RANKS):
            near, far = (Channel(end, f"rank {rank}") for end in socket.socketpair())
            found.channels.append(stack.enter_context(near))
            stack.enter_context(far)
            threads.append(threading.Thread(target=serve_channel, args=(host, rank, far)))
            threads[-1].start()
        yield found
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


@pytest.mark.parametrize("counts", [(3, 0, 40), (100, 0, 7)])
def test_the_mean_is_exact_whatever_the_order_and_the_batches(
    group: Group, counts: tuple[int, int, int]
) -> None:
    """Over what the losses count, such as tokens."""
    source = np.random.default_rng(1)
    values = [source.standard_normal(SIZE).astype(np.float32) for _ in range(RANKS)]
    samples, means = (3, 0, 40), []
    expected = (values[0].astype(np.float64) + values[2]) / sum(counts)
    for _ in range(3):
        vectors = [torch.cat([torch.from_numpy(own.copy()), torch.zeros(SLOTS * RANKS)]) for own in values]
        steps = group.all(
            lambda own, rank, v=vectors: own.mean(v[rank], samples[rank], counts[rank], rank / 2)
        )
        assert steps == [ExchangeStep(samples, (0.0, 0.5, 1.0))] * RANKS
        means += [vector[:SIZE].numpy() for vector in vectors]
    assert all(np.array_equal(one, other) for one, other in itertools.pairwise(means))
    assert np.abs(means[0] - expected).max() < 1e-7


def test_a_devices_vector_is_asked_for_when_all_have_come(group: Group) -> None:
    """Before, it would wait in the connection, which the kernel gives up after half a minute."""
    host = LaunchGroup(2, group.notes.append, lambda rank, text: group.faults.append((rank, text)))
    with contextlib.ExitStack() as stack:
        stack.callback(host.end)
        ends = []
        for rank in range(2):
            near, far = (stack.enter_context(Channel(end, f"rank {rank}")) for end in socket.socketpair())
            request = Contribution(0, 2, 1, 0.0, 4.0)
            near.send(request, soon())
            serve = partial(host.serve, rank, far, far.receive(soon()), asked=True)
            if rank:
                assert ends[0].is_quiet
            threading.Thread(target=serve).start()
            ends.append(near)
        for near in ends:
            near.expect(VectorWanted, soon())
        for rank, near in enumerate(ends):
            near.send(GroupPart(0), soon(), np.float32([rank, 4.0 * rank]).data.cast("B"))
        for near in ends:
            assert near.expect(MeanOfStep, soon()).samples == (1, 1)
            near.expect(GroupPart, soon(), 8)
            assert np.frombuffer(near.receive_payload(8, soon()), np.float32).tolist() == [0.5, 2.0]
    assert not group.faults


def test_counts_metrics_and_the_model_of_rank_0_go_to_all(group: Group) -> None:
    assert group.all(lambda own, rank: own.gather(10 * rank)) == [(0, 10, 20)] * RANKS
    assert group.all(lambda own, rank: own.add("loss", rank / 2, rank)) == [(1.5, 3)] * RANKS
    assert group.notes == ["loss 0.5 of 3 samples"]
    states = [
        [torch.full((SIZE,), float(rank)), torch.tensor([rank], dtype=torch.int64), torch.tensor(rank > 0)]
        for rank in range(RANKS)
    ]
    group.all(lambda own, rank: own.share(states[rank]))
    for state in states:
        assert [float(tensor.double().sum()) for tensor in state] == [0.0, 0.0, 0.0]


FINE = Contribution(0, 4, 1, 0.1, 1.0)
FAULTS: list[tuple[Message, bytes | None, str]] = [
    (Gather(1), None, "it gathers counts while rank 0 is in a step"),
    (ReportMetric("a", 1.0, 1), None, "it reports a metric while rank 0 is in a step"),
    (Contribution(1, 4, 1, 0.1, 1.0), None, "it is in a step of another model than rank 0"),
    (Contribution(0, 1 << 40, 1, 0.1, 1.0), None, "it is in a step of another model than rank 0"),
    (Contribution(0, 4, -1, 0.1, 1.0), None, "it claims -1 samples, which count -1, of a model of 4 values"),
    (Contribution(0, 4, 1, 0.1, 1.0, 1 << 17), None, "it claims 1 samples, which count 131072, of a model"),
    (Contribution(0, 4, 1, 0.1, float("nan")), None, "its gradients are not finite"),
    (FINE, np.full(4, 2, np.float32).tobytes(), "beyond those it has announced"),
    (FINE, np.full(4, np.nan, np.float32).tobytes(), "its gradients are not finite"),
    (FINE, bytes(1000), "sent 1000 bytes behind 'group.part', not 16"),
    (GroupPart(0), None, "it sends 'group.part' while rank 0 is in a step"),
]


@pytest.mark.parametrize(("wrong", "part", "text"), FAULTS)
def test_a_rank_at_fault_is_named(group: Group, wrong: Message, part: bytes | None, text: str) -> None:
    soon = Deadline.after(30)
    for rank, channel in enumerate(group.channels):
        channel.send(wrong if rank == 1 else FINE, soon)
        if rank != 1 or part is not None:
            channel.send(GroupPart(0), soon, bytes(16) if rank != 1 or part is None else part)
    eventually(lambda: group.faults, "somebody is at fault")
    ((rank, said),) = group.faults
    assert rank == 1 and text in said


class Gone:
    """A device that cannot be reached."""

    def control(self, _deadline: Deadline) -> Channel:
        raise ConnectionLost("csd0: No route to host")

    def wait_ready(self, _deadline: Deadline) -> bool:
        return False


def test_a_device_that_a_launch_loses_is_named_once() -> None:
    worker = LaunchWorker("csd0", Launch("a.py", (), {"a.py": b""}, 0, 1, "", 0), "lo")
    near, far = (Channel(end, "a command") for end in socket.socketpair())
    with near, far:
        devices = {"csd0": cast(Device, Gone())}
        ended = LaunchRun(
            [worker], devices, HostPlace(cast(Zygote, None), {}, cast(LaunchInputs, None)), near
        ).run()
    assert ended.error == "csd0 (rank 0): No route to host"


class Slow:
    """A device whose agent takes the launch, and loads torch for as long as the connection lasts."""

    def __init__(self) -> None:
        self.ends: list[Channel] = []

    def control(self, _deadline: Deadline) -> Channel:
        self.ends = [Channel(end, "an agent") for end in socket.socketpair()]
        return self.ends[0]


@pytest.mark.timeout(20)
def test_a_failure_does_not_wait_for_files_of_workers_that_have_not_begun() -> None:
    workers = [
        LaunchWorker(name, Launch("a.py", (), {"a.py": b""}, rank, 2, "", 0, most_saved=1), "lo")
        for rank, name in enumerate(("csd0", "csd1"))
    ]
    near, far = (Channel(end, "a command") for end in socket.socketpair())
    slow, place = Slow(), HostPlace(cast(Zygote, None), {}, cast(LaunchInputs, None))
    with near, far:
        devices = {"csd0": cast(Device, Gone()), "csd1": cast(Device, slow)}
        ended = LaunchRun(workers, devices, place, near).run()
    for end in slow.ends:
        end.close()
    assert ended.error == "csd0 (rank 0): No route to host; the others were ended"


def test_a_host_that_has_lost_workers_alone_says_so_and_is_ended() -> None:
    elastic = ElasticAgents(2, 4)
    worker = LaunchWorker("csd0", Launch("a.py", (), {"a.py": b""}, 1, 4, "", 0, elastic=elastic), "lo")
    near, far = (Channel(end, "a command") for end in socket.socketpair())
    place, ends = HostPlace(cast(Zygote, None), {}, cast(LaunchInputs, None)), list[LaunchEnded]()
    run = LaunchRun([worker], {"csd0": cast(Device, Gone())}, place, near)
    thread = threading.Thread(target=lambda: ends.append(run.run(joined=True)))
    with near, far:
        thread.start()
        while (told := far.receive(Deadline.after(30)).message) != LaunchWaits(True):
            assert isinstance(told, LaunchLost | LaunchOutput | LaunchPrepares)
        far.send(EndLaunch(), Deadline.after(30))
        thread.join(30)
    assert [end.error for end in ends] == ["csd0: No route to host"]


def test_the_end_does_not_wait_for_a_metric_that_nobody_takes() -> None:
    """As long as the one who ends the group is the one who has to take it."""
    reached, taken = threading.Event(), threading.Event()

    def note(_: str) -> None:
        reached.set()
        taken.wait(30)

    host = LaunchGroup(1, note, lambda *_: None)
    near, far = (Channel(end, "rank 0") for end in socket.socketpair())
    thread = threading.Thread(target=serve_channel, args=(host, 0, far))
    with near, far:
        thread.start()
        near.send(ReportMetric("a", 1.0, 1), Deadline.after(30))
        assert reached.wait(30)
        host.end(0.01)
        assert not taken.is_set() and thread.is_alive()
        taken.set()
        thread.join(30)
    assert not thread.is_alive()
