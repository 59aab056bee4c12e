# SPDX-License-Identifier: Apache-2.0
"""Reduction nodes as confined processes: exact means over mutual TLS, and all that they must refuse."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

from millpond.agent.config import AgentConfig, LinkConfig
from millpond.agent.gate import LedgerCounters, Pattern
from millpond.agent.node.handle import NodeProcess
from millpond.agent.node.memory import NodeMemory, OfferedExchange
from millpond.agent.policy.settings import Policy
from millpond.aggregate import topology
from millpond.aggregate.kernels import Vector
from millpond.aggregate.messages import (
    Advance,
    FetchSums,
    GetState,
    JoinRound,
    LinkBytes,
    NodeState,
    ProbeLink,
    SetPeers,
    StartNode,
    Sums,
)
from millpond.aggregate.topology import RANGE_VALUES
from millpond.aggregate.tree_client import TreeReduction
from millpond.base.deadline import Deadline
from millpond.base.errors import MillpondError, Refused, RemoteError
from millpond.host.fleet.authority import Authority
from millpond.linux import memory
from millpond.train.protocol import state_digest
from millpond.wire import tls
from millpond.wire.channel import Channel
from millpond.wire.messages import Ok

SIZE = RANGE_VALUES + 100
NAMES = ("csd0", "csd1", "csd2")
CANARY = Pattern("secret", b"cana" * 5, True)  # five equal values, which no rounding changes


class Node:
    """A node's process, and the update of exchange 3 that it offers."""

    def __init__(
        self, name: str, authority: Authority, patterns: tuple[Pattern, ...] = (), *, plain: bool = True
    ) -> None:
        self.authority = authority
        self.descriptor = memory.make("values")
        self.values = np.frombuffer(memory.map_first(self.descriptor, 4 * SIZE).data, np.float32)
        self.values[:] = np.random.default_rng(int(name[-1])).normal(size=SIZE)
        self.offered = OfferedExchange.make()
        self.memory = NodeMemory(self.descriptor, 4 * SIZE, SIZE, self.offered)
        self.tally = LedgerCounters.in_memory()
        link = LinkConfig("127.0.0.1/8", "unused", peers="127.0.0.0/8")
        config = AgentConfig(name, link, lan="127.0.0.1/8", policy=Policy(plain_lan=plain))
        certificate, key = (text.decode() for text in authority.sign(name))
        request = StartNode(authority.pem.decode(), certificate, key, SIZE)
        self.process = NodeProcess(
            config, request, self.memory, patterns, self.tally, LedgerCounters.in_memory()
        )
        self.offered.offer(3)

    def connect(self) -> Channel:
        ours, theirs = socket.socketpair()
        self.process.hand_over(theirs)
        return Channel(ours, "a node")

    def stop(self) -> None:
        self.process.stop()
        os.close(self.descriptor)


Nodes = dict[str, Node]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    authority = Authority.make("nodes of a test")
    with contextlib.ExitStack() as stack:
        made = {}
        for name in NAMES:
            made[name] = Node(name, authority)
            stack.callback(made[name].stop)
        places = {name: (node.process.ready.address, node.process.ready.port) for name, node in made.items()}
        for node in made.values():
            node.process.allow(SetPeers(places, NAMES))
        yield made


@pytest.fixture
def sink(nodes: Nodes) -> Iterator[TreeReduction]:
    with contextlib.closing(TreeReduction(lambda name: nodes[name].connect())) as made:
        yield made


def reduced(nodes: Nodes, sink: TreeReduction, trees: tuple[topology.ReductionTree, ...]) -> Vector:
    mean = np.empty(SIZE, np.float32)
    bounds = {name: (1.0, float(np.abs(node.values).max())) for name, node in nodes.items()}
    sink.run(trees, bounds, 3.0, mean, 3)
    return mean


def test_nodes_reduce_and_spread_by_themselves(nodes: Nodes, sink: TreeReduction) -> None:
    expected = sum(node.values.astype(np.float64) for node in nodes.values()) / 3
    state = np.arange(SIZE, dtype=np.float32)
    found = set()
    for trees in topology.candidates(NAMES, SIZE).values():
        mean = reduced(nodes, sink, trees)
        assert np.allclose(mean, expected, atol=1e-6)
        found.add(mean.tobytes())
        if len(trees[0].children[topology.SINK]) == 1:
            sink.spread(trees, state)
            sink.advance(trees, Advance())
            assert {bytes(node.memory.state) for node in nodes.values()} == {(state - mean).tobytes()}
    assert len(found) == 1


def by_datagrams(nodes: Nodes, sink: TreeReduction) -> Vector:
    mean = np.empty(SIZE, np.float32)
    bounds = {name: (1.0, float(np.abs(node.values).max())) for name, node in nodes.items()}
    sink.run(topology.below_one(NAMES, SIZE)["star"], bounds, 3.0, mean, 3, datagrams=True)
    return mean


def test_on_a_lan_updates_come_by_datagrams_to_the_same_bits(nodes: Nodes, sink: TreeReduction) -> None:
    trees, state = topology.below_one(NAMES, SIZE)["star"], np.arange(SIZE, dtype=np.float32)
    expected = reduced(nodes, sink, trees)
    before = {name: node.tally[2] for name, node in nodes.items()}
    for _ in range(2):
        assert by_datagrams(nodes, sink).tobytes() == expected.tobytes()
    sink.spread(trees, state)
    sink.advance(trees, Advance())  # all have the mean: no values follow
    assert {bytes(node.memory.state) for node in nodes.values()} == {(state - expected).tobytes()}
    sent = [(nodes[name].tally[2] - before[name]) / (4 * SIZE) for name in NAMES]
    assert [round(vectors, 1) for vectors in sent] == [2 * 3 + 2, 2, 2]  # to two nodes and the host, a state


def test_what_does_not_come_by_datagrams_is_told_by_name(nodes: Nodes, sink: TreeReduction) -> None:
    nodes["csd2"].offered.withdraw()
    with pytest.raises(RemoteError, match="csd2 has no update of exchange 3"):
        by_datagrams(nodes, sink)
    nodes["csd2"].offered.offer(3)
    nodes["csd1"].values[5] = 1e9  # beyond what its head has announced
    bounds = dict.fromkeys(NAMES, (1.0, 10.0))
    mean, trees = np.empty(SIZE, np.float32), topology.below_one(NAMES, SIZE)["star"]
    for _ in range(2):  # the nodes still wait for the first round when the second begins
        with pytest.raises(RemoteError, match="csd1: its values are beyond those it has announced"):
            sink.run(trees, bounds, 3.0, mean, 3, datagrams=True)
    with pytest.raises(RemoteError, match="csd1: its values are beyond those it has announced"):
        sink.step(trees[0], bounds, 3.0, Advance(), 3, datagrams=True)
    nodes["csd1"].values[5] = 1.0
    with pytest.raises(RemoteError, match="updates that are not scaled"):
        sink.run(trees, dict.fromkeys(NAMES, (0.5, 10.0)), 3.0, mean, 3, datagrams=True)
    encrypted = Node("csd0", nodes["csd0"].authority, plain=False)
    try:
        alone = TreeReduction(lambda _name: encrypted.connect())
        with pytest.raises(RemoteError, match="on a LAN unencrypted"):
            alone.run(topology.tree(NAMES[:1], SIZE), bounds, 1.0, mean, 3, datagrams=True)
    finally:
        encrypted.stop()


@pytest.mark.parametrize(
    ("children", "told"),
    [
        ({"csd0": ("csd1",), "csd1": ("csd0",)}, "a tree that is none"),
        ({"csd0": ("csd1", "csd1")}, "a tree that is none"),
        ({"csd0": ("csd0",)}, "a tree that is none"),
        ({"csd1": ("csd2",)}, "a tree that is none"),
        ({str(n): (str(n + 1),) for n in range(600)} | {"csd0": ("0",)}, "a tree that is none"),
        ({"csd0": ("csd7",)}, "without bounds of csd7"),
    ],
)
def test_what_is_no_tree_is_refused(nodes: Nodes, children: dict[str, tuple[str, ...]], told: str) -> None:
    bounds = dict.fromkeys(NAMES, (1.0, 10.0))
    with contextlib.closing(nodes["csd0"].connect()) as channel:
        channel.send(FetchSums("csd0", 3, 0, SIZE, 1.0, children, bounds, 3.0), Deadline.after(30))
        with pytest.raises(RemoteError, match=told):
            channel.expect(Sums, Deadline.after(30))


@pytest.mark.parametrize(
    ("address", "port", "client", "key", "told"),
    [
        ("127.0.0.1", 40000, 1 << 16, bytes(32), "with a key of"),
        ("127.0.0.1", 40000, -1, bytes(32), "with a key of"),
        ("127.0.0.1", 40000, 0, bytes(31), "with a key of"),
        ("127.0.0.1", 53, 0, bytes(32), "port 53 is no node's"),
        ("127.0.0.1", 1 << 16, 0, bytes(32), "port 65536 is no node's"),
        ("192.0.2.1", 40000, 0, bytes(32), r"192\.0\.2\.1 is not on the LAN 127\.0\.0\.0/8"),
        ("a name", 40000, 0, bytes(32), "is not on the LAN"),
    ],
)
def test_a_client_of_a_round_that_cannot_be_is_refused(
    nodes: Nodes, address: str, port: int, client: int, key: bytes, told: str
) -> None:
    sent = nodes["csd1"].tally[2]
    with contextlib.closing(nodes["csd1"].connect()) as channel:
        channel.send(JoinRound(3, address, port, client, key, 360), Deadline.after(30))
        with pytest.raises(RemoteError, match=told):
            channel.expect(Ok, Deadline.after(30))
    assert nodes["csd1"].tally[2] == sent


def test_other_nodes_than_parents_only_probe_links(nodes: Nodes) -> None:
    """Also over a connection from before the host has changed the trees."""
    process = nodes["csd1"].process
    places = {name: (node.process.ready.address, node.process.ready.port) for name, node in nodes.items()}
    context = _context(nodes["csd0"].authority)
    secure = tls.connect(socket.create_connection(places["csd1"], 30), context, "csd1", Deadline.after(30))
    with Channel(secure, "csd1") as parent:
        parent.call(GetState("csd1"), NodeState, Deadline.after(30))
        process.allow(SetPeers(places, ("csd2",)))
        try:
            parent.send(ProbeLink("csd1", 100), Deadline.after(30))
            parent.expect(LinkBytes, Deadline.after(30), payload=100)
            parent.receive_payload(100, Deadline.after(30))
            with pytest.raises(RemoteError, match="csd1 has no such parent in a tree of the host"):
                parent.call(GetState("csd1"), NodeState, Deadline.after(30))
        finally:
            process.allow(SetPeers(places, NAMES))


@pytest.mark.parametrize("name", ["star", "ring"])
def test_a_root_keeps_the_mean_and_the_state_that_it_makes(
    nodes: Nodes, sink: TreeReduction, name: str
) -> None:
    state, bounds = np.arange(SIZE, dtype=np.float32), dict.fromkeys(NAMES, (1.0, 10.0))
    trees = topology.below_one(NAMES, SIZE)[name]
    mean = reduced(nodes, sink, trees)
    sink.spread(trees, state)
    if name == "star":
        told = sink.step(trees[0], bounds, 3.0, Advance(), 3)
        sink.settle(trees[0])
        assert told == sink.state(trees)
    else:
        reduced(nodes, sink, trees)
        sink.advance(trees, Advance())
    found, fetched = sink.state(trees), np.empty(SIZE, np.float32)
    assert found.finite and found.digest == state_digest((state - mean).data)
    for node in NAMES:
        assert sink.fetch_state(node, fetched) == found and (fetched == state - mean).all()


def test_only_an_offered_update_leaves(nodes: Nodes, sink: TreeReduction) -> None:
    trees = topology.tree(NAMES, SIZE)
    nodes["csd2"].offered.withdraw()
    with pytest.raises(RemoteError, match="csd2 has no update of exchange 3"):
        reduced(nodes, sink, trees)
    nodes["csd2"].offered.offer(3)
    reduced(nodes, sink, trees)


def test_a_node_talks_to_named_nodes_of_its_own_authority_alone(nodes: Nodes, sink: TreeReduction) -> None:
    ready, places = nodes["csd1"].process.ready, {"csd1": ("127.0.0.1", nodes["csd1"].process.ready.port)}
    nodes["csd0"].process.allow(SetPeers({}))
    with pytest.raises(RemoteError, match="csd1: the host has not named this node"):
        reduced(nodes, sink, topology.tree(NAMES, SIZE))
    with pytest.raises(Refused, match=r"csd1 has the address 192\.0\.2\.1, on no network of the fleet"):
        nodes["csd0"].process.allow(SetPeers({"csd1": ("192.0.2.1", 40000)}))
    with pytest.raises(Refused, match="on no network"):
        nodes["csd0"].process.allow(SetPeers({"csd1": ("a name", 40000)}))
    for port in (22, 7700, 0, -1, 1 << 16):  # a device could name another's SSH server
        with pytest.raises(Refused, match=f"csd1 has the port {port}, which is no node's"):
            nodes["csd0"].process.allow(SetPeers({"csd1": ("127.0.0.1", port)}))
    stranger = Node("csd0", Authority.make("another job"))
    try:
        stranger.process.allow(SetPeers(places))
        other = TreeReduction(lambda _name: stranger.connect())
        with pytest.raises(RemoteError, match="csd1: certificate refused"):
            reduced(nodes, other, topology.tree(NAMES[:2], SIZE))
        with socket.create_connection((ready.address, ready.port), 30) as plain:
            plain.sendall(b"\0" * 64)
            plain.settimeout(30)
            with contextlib.suppress(ConnectionResetError):
                while plain.recv(100):  # an alert, and the end
                    pass
        context = _context(Authority.make("a third"))
        with pytest.raises(RemoteError):
            secure = tls.connect(
                socket.create_connection((ready.address, ready.port)), context, "csd1", Deadline.after(30)
            )
            Channel(secure, "csd1").receive(Deadline.after(30))
    finally:
        stranger.stop()
    everything = {name: (node.process.ready.address, node.process.ready.port) for name, node in nodes.items()}
    nodes["csd0"].process.allow(SetPeers(everything, NAMES))
    reduced(nodes, sink, topology.tree(NAMES, SIZE))


def _context(authority: Authority) -> tls.ssl.SSLContext:
    certificate, key = authority.sign("csd0")
    descriptor = os.memfd_create("identity")
    try:
        os.write(descriptor, certificate + key)
        return tls.context_of(authority.pem.decode(), Path(f"/proc/self/fd/{descriptor}"), server=False)
    finally:
        os.close(descriptor)


def test_what_nodes_send_passes_their_gate() -> None:
    authority = Authority.make("nodes of a test")
    node = Node("csd0", authority, (CANARY,))
    try:
        node.process.allow(SetPeers({}))
        with contextlib.closing(TreeReduction(lambda _name: node.connect())) as sink:
            hidden = np.frombuffer(CANARY.data, np.float32)
            bounds = {"csd0": (1.0, float(hidden[0]))}
            sink.run(topology.star(["csd0"], SIZE), bounds, 1.0, np.empty(SIZE, np.float32), 3)
            sent = node.tally[2]
            assert 4 * SIZE <= sent < 5 * SIZE
            node.values[1000:1005] = hidden
            with pytest.raises(MillpondError):
                sink.run(topology.star(["csd0"], SIZE), bounds, 1.0, np.empty(SIZE, np.float32), 3)
    finally:
        node.stop()


def test_a_nodes_process_is_confined(nodes: Nodes) -> None:
    """No volume, no torch, no network of its own, a user of its own, and no private data."""
    outermost = psutil.Process(nodes["csd0"].process.process.pid)
    process = [outermost, *outermost.children(recursive=True)][-1]
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    assert "numpy" in maps and "torch" not in maps
    assert Path(f"/proc/{process.pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()
    root = Path(f"/proc/{process.pid}/root")
    assert not (root / "volume").exists() and not (root / "flash").exists() and not (root / "home").exists()
    if os.geteuid() == 0:
        assert process.uids().real == 64005


def test_several_threads_look_at_once_what_is_offered() -> None:
    """The datapath's own barrier, with a lock that is held between calls, is for one thread."""
    offered = OfferedExchange.make()
    offered.offer(7)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            looked = [threads.submit(lambda: [7 in offered for _ in range(20_000)]) for _ in range(4)]
    finally:
        sys.setswitchinterval(before)
    assert all(all(each.result()) for each in looked)
