# SPDX-License-Identifier: Apache-2.0
"""States and means that devices pass on among themselves: the engine and nodes in one process."""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from millpond.aggregate.datagram_rounds import DatagramRounds
from millpond.aggregate.kernels import Vector
from millpond.aggregate.messages import Advance, NodeReady, SetPeers, StartNode
from millpond.aggregate.node import ReductionNode
from millpond.aggregate.udp import native
from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, MillpondError, Refused
from millpond.host.jobs.training.collection import LatePolicy
from millpond.host.jobs.training.exchange_engine import ExchangeEngine, ExchangeOutcome
from millpond.host.jobs.training.roster import JobRoster
from millpond.host.jobs.training.shards import Shard, WholeShards
from millpond.host.workers.dispatcher import Dispatcher
from millpond.host.workers.node_reduction import NodeReduction, StateLost
from millpond.host.workers.worker import DeviceWorker, ModelState
from millpond.linux import memory
from millpond.train.protocol import OWN_STATE, SPREAD, Update, Work, state_digest
from millpond.wire.channel import Channel

from ..aggregate.udp.fake_link import lose_values, open_socket
from ..waiting import eventually
from .steps import Given

SIZE, ADDED = 1000, (900, 1000)
STEP = Advance((ADDED,))
SAMPLES = (10, 30, 20)
DROPS = LatePolicy(counts=False)


class Device(DeviceWorker):
    """A device whose node runs in this process; it takes and refuses states as a device's worker does."""

    def __init__(self, world: World, rank: int) -> None:
        self.name, self.rank, self.world = f"csd{rank}", rank, world
        self.holds, self.spread, self.node = False, None, None
        self.update, self.state = np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)
        self.offered, self.port = -1, 40000
        self.sockets = [world.stack.enter_context(open_socket(("127.0.0.1", 0))) for _ in range(2)]
        rounds = DatagramRounds(*self.sockets, 460, "127.0.0.0/8", lambda _: None, lambda _: None)
        self.reduction = ReductionNode(
            self.name, self.update, self.state, world.dial, lambda exchange: exchange == self.offered, rounds
        )
        self.node = Control(self)  # type: ignore[assignment]
        self.permits: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.waits = False
        self.began: list[tuple[int, Vector, str]] = []  # exchange, state, and where it came from
        self._next = 0

    def train(self, request: Work, state: ModelState, _deadline: Deadline) -> Update:
        spread, how, base = self.spread, "host", state.values.copy()
        if spread and spread.state is state:
            if spread.digest in (OWN_STATE, state_digest(self.state.data)):
                how, base = "node", self.state.copy()
            elif spread.ahead:
                raise Refused(self.name, SPREAD, "another state")
        self.offered = -1
        self.began.append((request.exchange, base, how))
        if self.waits:
            self.permits.get(timeout=60)
        samples = SAMPLES[self.rank]
        buffers = base[slice(*ADDED)]
        optimum = np.float32(self.rank + 1)
        self.update[:] = np.float32(0.1) * (base - optimum) * samples
        moved = self.world.moved(self.rank, request.exchange, buffers)
        self.update[slice(*ADDED)] = samples * (moved - buffers)
        self.offered, self.holds = request.exchange, False
        largest, norm = float(np.abs(self.update).max()), float(np.linalg.norm(self.update))
        told = {"loss": (1.0, float(samples))}
        return Update(
            request.exchange, samples, samples, largest, norm, 0.1, math.nan, 0, told, shift=largest
        )

    def fetch(self, _stop: int, _deadline: Deadline) -> None:
        self._next = 0

    def read(self, out: Vector, _deadline: Deadline) -> None:
        out[:] = self.update[self._next : self._next + len(out)]
        self._next += len(out)

    def close(self) -> None:
        self.permits.put(None)


class Control:
    """A NodeControl of a device in this process."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.parents: tuple[str, ...] = ()

    def start(self, _request: StartNode, _deadline: Deadline) -> NodeReady:
        return NodeReady("127.0.0.1", self.device.port, True)

    def allow(self, peers: SetPeers, _deadline: Deadline) -> None:
        self.parents = peers.parents

    def connect(self, _deadline: Deadline) -> Channel:
        return self.device.world.dial(self.device.name)


class World:
    """A host's engine and parameter server, and devices. ``step`` is what the parameter server declares."""

    def __init__(
        self, shape: str = "star", step: Advance | None = STEP, *, ahead: bool = True, repair: bool = True
    ) -> None:
        self.stack = contextlib.ExitStack()
        self.devices = [Device(self, rank) for rank in range(len(SAMPLES))]
        self.slots = [ModelState(memory.map_first(memory.make("state"), 4 * SIZE)) for _ in range(4)]
        self.state, self.mean = self.slots[0], np.zeros(SIZE, np.float32)
        self.log: list[str] = []
        log = logging.Logger("nodes")
        log.addFilter(lambda record: self.log.append(record.getMessage()) or True)
        self.nodes = NodeReduction("csd0", shape, log, step, self if ahead else None, repair=repair)
        shards = WholeShards(len(SAMPLES))
        # by rank, exchange and values before: the buffers that training leads to; they begin to move late
        self.moved: Callable[[int, int, Vector], Vector] = lambda _, number, before: before + (number > 3)
        self.on_wait: Callable[[], None] = lambda: None
        self.roster = JobRoster(len(SAMPLES), range(len(SAMPLES)), 0.0)
        self.engine = ExchangeEngine(
            self.roster,
            self.mean,
            shards,
            lambda: self.on_wait(),
            late=DROPS,
            nodes=self.nodes,
            parameters=ADDED[0],
        )
        shards.begin(1)
        for rank, device in enumerate(self.devices):
            shards.add(rank, [Shard(device.name, False, SAMPLES[rank])])
            self.roster.join(rank, Dispatcher(rank, device, self.roster.events))
        self.number = 0

    def reload(self) -> None:
        """As of ParameterServer."""

    def dial(self, name: str) -> Channel:
        ours, theirs = socket.socketpair()
        node = next(device for device in self.devices if device.name == name).reduction

        def serve() -> None:
            with Channel(theirs, "a parent") as channel, contextlib.suppress(MillpondError, OSError):
                node.serve(channel)

        threading.Thread(target=serve, daemon=True).start()
        return Channel(ours, name)

    def step(self, deadline: float = math.inf) -> ExchangeOutcome:
        self.number += 1
        plan = Given(*SAMPLES, deadline=deadline)
        outcome = self.engine.run(self.number, 7, self.state, plan, np.zeros(len(SAMPLES), np.int64))
        if not self.nodes.advanced:
            self._apply()
        return outcome

    def _apply(self) -> None:
        values = self.state.values - self.mean
        values[slice(*ADDED)] = self.state.values[slice(*ADDED)] + self.mean[slice(*ADDED)]
        self.state = next(slot for slot in self.slots if slot not in self.roster.states_in_use)
        self.state.values[:] = values

    def model(self) -> bytes:
        self.nodes.catch_up()
        return self.state.values.tobytes()

    def close(self) -> None:
        for dispatcher in self.roster.present.values():
            dispatcher.worker.close()
            dispatcher.end()
        self.nodes.close()
        self.stack.close()


Made = Callable[..., World]


@pytest.fixture
def made() -> Iterator[Made]:
    with contextlib.ExitStack() as stack:

        def make(*arguments: Any, **options: Any) -> World:
            world = World(*arguments, **options)
            stack.callback(world.close)
            return world

        yield make


def trained(world: World, exchanges: int = 7) -> bytes:
    for _ in range(exchanges):
        assert world.step().counted == dict(enumerate(SAMPLES))
    return world.model()


@pytest.mark.parametrize("shape", ["star", "tree", "ring"])
def test_devices_make_the_states_of_the_host(made: Made, shape: str) -> None:
    """Also of a buffer that moves for the first time when the devices are ahead."""
    expected = trained(made(shape, None, ahead=False))
    assert trained(made(shape, ahead=False)) == expected
    world = made(shape)
    assert trained(world) == expected
    assert world.nodes.advanced is (shape != "ring") and len(world.log) == 1
    for device in world.devices:
        assert [how for *_, how in device.began] == 7 * ["node"]


@pytest.mark.parametrize("ahead", [True, False])
def test_without_repair_devices_go_on_from_what_has_come(
    made: Made, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """The job's state is the root's; a device that has missed a part is not sent the state by the host."""
    monkeypatch.setattr(native, "is_usable", lambda: False)
    expected = np.frombuffer(trained(made(), 6), np.float32)
    world = made("udp", ahead=ahead, repair=False)
    for number in range(6):
        for rank, device in enumerate(world.devices):
            lose_values(device.sockets[1], [(rank, (number + rank) % 10)] if rank and number < 5 else [])
        world.step()
    assert len(world.log) == 1 and world.nodes.advanced is ahead
    for device in world.devices:
        assert [how for *_, how in device.began] == 6 * ["node"]
    apart = [np.flatnonzero(device.began[-1][1] != world.devices[0].began[-1][1]) for device in world.devices]
    assert [len(found) for found in apart] == [0, 100, 100]  # of the exchange before; older losses are mended
    assert np.allclose(np.frombuffer(world.model(), np.float32), expected, atol=0.1)


def test_without_repair_no_variance_falls_below_0_where_the_host_adds(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root has missed the others' large variances, and these fall then by more than its own is."""
    monkeypatch.setattr(native, "is_usable", lambda: False)
    world = made("udp", repair=False)
    world.moved = lambda rank, number, before: before * 0 + (5.0 if number < 4 and rank else 0.1)
    for number in range(3):
        lose_values(world.devices[0].sockets[1], [(0, 9)] if number == 2 else [])
        world.step()
    assert world.devices[0].state[-1] < 0.2 and world.devices[1].state[-1] > 4
    world.devices[2].waits = True
    world.step(deadline=0.2)
    assert not world.nodes.ahead and world.state.values[-1] >= 0


def test_without_repair_no_other_devices_state_stands_for_a_lost_roots(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "is_usable", lambda: False)
    world = made("udp", repair=False)
    for rank, device in enumerate(world.devices):
        lose_values(device.sockets[1], [(rank, rank)] if rank else [])
    for _ in range(4):
        world.step()
    world.devices[0].state[0] += 1
    with pytest.raises(StateLost, match="no device has the state of the last exchange"):
        world.model()


def test_a_declared_step_that_is_wrong_is_not_made_again(made: Made) -> None:
    wrong = made(step=Advance(((0, SIZE),)))
    assert trained(wrong) == trained(made(step=None, ahead=False))
    assert not wrong.nodes.advanced


def test_nodes_answer_their_parents_alone(made: Made) -> None:
    world = made("star")
    world.step()
    assert [device.node.parents for device in world.devices] == [(), ("csd0",), ("csd0",)]  # type: ignore[union-attr]


def test_a_device_that_begins_in_mid_exchange_has_the_newest_state(made: Made) -> None:
    """It owed an answer that does not count any more; the others are ahead of the host meanwhile."""
    world = made()
    others, late = world.devices[:2], world.devices[2]
    late.waits = True
    for _ in range(5):
        world.step(deadline=0.2)
    assert world.nodes.ahead and len(late.began) == 1
    state = others[0].state.tobytes()
    for device in others:
        device.waits = True

    def let_others_answer() -> None:
        if len(late.began) == 2:
            for device in world.devices:
                device.permits.put(None)

    world.on_wait = let_others_answer
    late.permits.put(None)
    outcome = world.step(deadline=30)
    assert outcome.counted.keys() == {0, 1, 2}
    assert {device.began[-1][1].tobytes() for device in world.devices} == {state}


def test_a_device_that_was_left_out_has_no_older_state(made: Made) -> None:
    """The host uses its memory of states again: what a device was told about one is not true of the next."""
    world = made(ahead=False)
    late = world.devices[2]
    late.waits = True
    for number in range(2, 8):
        world.step(deadline=0.1)
        late.permits.put(None)
        eventually(lambda number=number: len(late.began) >= number - 1, "it begins")
    states = {exchange: base.tobytes() for exchange, base, _ in world.devices[0].began}
    for exchange, base, _ in late.began:
        assert states[exchange] == base.tobytes()


def test_a_new_state_that_only_the_root_has_is_fetched(made: Made) -> None:
    """The node of a leaf dies while the root passes the state on."""
    world = made("star")
    for _ in range(4):
        world.step()
    leaf = world.devices[2].reduction

    def die(*_: object) -> None:
        raise ConnectionLost("the node has died")

    leaf._pass_on = die  # type: ignore[method-assign]
    leaf._describe = die  # type: ignore[method-assign]
    world.step()
    assert "a device has the new state" in world.log[-1] and not world.nodes.ahead
    assert world.model() == trained(made(step=None, ahead=False), 5)


def test_a_state_that_no_device_has_any_more_is_lost_by_name(made: Made) -> None:
    world = made("star")
    for _ in range(4):
        world.step()
    for device in world.devices:
        device.state[0] += 1
    with pytest.raises(StateLost, match="no device has the state of the last exchange"):
        world.model()


@pytest.mark.parametrize("port", [22, 7700, 0, 1 << 16])
def test_a_device_names_no_port_that_is_another_services(made: Made, port: int) -> None:
    """All other devices connect to the port that a device names."""
    world = made()
    world.devices[1].port = port
    world.step()
    assert f"csd1 has its node at port {port}, which is no node's" in "".join(world.log)
