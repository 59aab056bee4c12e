# SPDX-License-Identifier: Apache-2.0
"""Rounds by datagrams whose losses are not repaired: nodes in one process, sockets on loopback, and a kernel
that drops the datagrams that a test names.
"""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Collection, Iterator, Mapping

import numpy as np
import pytest

from millpond.aggregate import datagram_rounds, topology
from millpond.aggregate.datagram_rounds import DatagramRounds
from millpond.aggregate.kernels import Vector
from millpond.aggregate.messages import Advance, JoinRound, Unrepaired
from millpond.aggregate.node import ReductionNode
from millpond.aggregate.tree_client import TreeReduction
from millpond.aggregate.udp import native
from millpond.base.deadline import Deadline
from millpond.base.errors import RemoteError
from millpond.wire.messages import Ok

from .joined_nodes import JoinedNodes
from .udp.fake_link import lose_values, open_socket

NAMES, WEIGHTS = ("csd0", "csd1", "csd2"), {"csd0": 10.0, "csd1": 30.0, "csd2": 20.0}
VALUES, BLOCKS = 100, 10
SIZE, MTU, ADDED = VALUES * BLOCKS - 7, 28 + 32 + 4 * VALUES, ((900, 950),)
Places = Collection[tuple[str, int]]
"""Datagrams with values that do not come: of a node's update, or of the mean to that node."""


class Team(JoinedNodes):
    """Three nodes with states that are equal at first, and the updates of the exchange under way."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(3)
        self.states = {name: np.ones(SIZE, np.float32) for name in NAMES}
        self.updates = {name: np.zeros(SIZE, np.float32) for name in NAMES}
        self.sockets = contextlib.ExitStack()
        self.hub = self._socket()
        self.own = {name: self._socket() for name in NAMES}
        self.nodes = {name: self._node(name) for name in NAMES}

    def _socket(self) -> socket.socket:
        return self.sockets.enter_context(open_socket(("127.0.0.1", 0)))

    def _node(self, name: str) -> ReductionNode:
        hub = self.hub if name == "csd0" else self._socket()
        nothing = (lambda _: None, lambda _: None)
        rounds = DatagramRounds(hub, self.own[name], MTU, "127.0.0.0/8", *nothing)
        return ReductionNode(name, self.updates[name], self.states[name], self.dial, datagrams=rounds)

    def trained(self) -> dict[str, Vector]:
        """Let all nodes have new updates; returns the states after these, each from its node's own."""
        found = {}
        for name, weight in WEIGHTS.items():
            change = self.rng.standard_normal(SIZE).astype(np.float32)
            self.updates[name][:] = np.float32(weight) * change
            signed = -change
            signed[slice(*ADDED[0])] *= -1
            found[name] = self.states[name] + signed
        return found

    def lose(self, updates: Places = (), means: Places = ()) -> None:
        lose_values(self.hub, [(NAMES.index(name), index) for name, index in updates])
        for name in NAMES:
            lose_values(self.own[name], [(NAMES.index(name), index) for each, index in means if each == name])


@pytest.fixture
def team(monkeypatch: pytest.MonkeyPatch) -> Iterator[Team]:
    monkeypatch.setattr(native, "is_usable", lambda: False)
    made = Team()
    yield made
    made.have_ended()
    made.sockets.close()


def run(team: Team, sink: TreeReduction) -> Vector:
    """Do an exchange. Returns the mean that the host has."""
    trees, mean = topology.below_one(NAMES, SIZE)["star"], np.empty(SIZE, np.float32)
    bounds = {name: (1.0, float(np.abs(update).max())) for name, update in team.updates.items()}
    given = Unrepaired(WEIGHTS, ADDED)
    sink.run(trees, bounds, sum(WEIGHTS.values()), mean, datagrams=True, unrepaired=given)
    sink.advance(trees, Advance(ADDED))
    return mean


def check(team: Team, trained: Mapping[str, Vector], updates: Places, means: Places) -> None:
    """Check the states after an exchange: each part is the mean of those that have come, or a node's own."""
    for index in range(BLOCKS):
        part = slice(VALUES * index, VALUES * (index + 1))
        came = [name for name in NAMES if (name, index) not in updates]
        sums = sum(WEIGHTS[name] * trained[name][part].astype(np.float64) for name in came)
        for name, state in team.states.items():
            kept = not came or (name, index) in means
            wanted = trained[name][part] if kept else sums / sum(WEIGHTS[each] for each in came)
            assert np.allclose(state[part], wanted, rtol=1e-6, atol=1e-6), (name, index)


def test_a_lost_part_is_left_out_of_its_own_divisor_or_a_nodes_own_until_the_next_mean(team: Team) -> None:
    losses: list[tuple[Places, Places]] = [
        ({("csd1", 5), ("csd0", 7), ("csd2", 7)}, {("csd1", 2), ("csd1", 3), ("csd2", 9)}),
        ({(name, 4) for name in NAMES}, {("csd2", 0)}),
        ((), ()),
    ]
    with contextlib.closing(TreeReduction(team.dial)) as sink:
        for updates, means in losses:
            team.lose(updates, means)
            before, trained = team.states["csd0"].copy(), team.trained()
            mean = run(team, sink)
            check(team, trained, updates, means)
            mean[slice(*ADDED[0])] *= -1
            assert (before - mean == team.states["csd0"]).all()  # the host makes the root's step


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf])
def test_a_round_without_weights_is_refused_by_name(team: Team, wrong: float) -> None:
    trees, mean = topology.below_one(NAMES, SIZE)["star"], np.empty(SIZE, np.float32)
    given = Unrepaired({**WEIGHTS, "csd2": wrong})
    with (
        contextlib.closing(TreeReduction(team.dial)) as sink,
        pytest.raises(RemoteError, match="without repair of nodes without weights"),
    ):
        sink.run(trees, dict.fromkeys(NAMES, (1.0, 1.0)), 60.0, mean, datagrams=True, unrepaired=given)
    join = JoinRound(0, "127.0.0.1", 40000, 1, bytes(32), VALUES, Unrepaired({"csd1": wrong}))
    with (
        contextlib.closing(team.dial("csd1")) as channel,
        pytest.raises(RemoteError, match="is joined with a weight"),
    ):
        channel.call(join, Ok, Deadline.after(5))


def test_a_state_beyond_all_others_does_not_set_the_unit_of_the_sum(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datagram_rounds, "round_seconds", lambda _: 1.0)  # in which the others give it up
    team.trained()
    team.states["csd1"][5] = 1e30
    with (
        contextlib.closing(TreeReduction(team.dial)) as sink,
        pytest.raises(RemoteError, match=r"csd1 has announced values up to 3e\+31, and not"),
    ):
        run(team, sink)
