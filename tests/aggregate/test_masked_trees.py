# SPDX-License-Identifier: Apache-2.0
"""Masked words that nodes add in trees and rings: the bits of the sum without masks, and one cohort a sum."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections.abc import Collection, Iterator

import numpy as np
import pytest

from millpond.aggregate import topology
from millpond.aggregate.datagram_rounds import DatagramRounds
from millpond.aggregate.masking import keys
from millpond.aggregate.masking.exchange import CohortFailed, MaskedExchange
from millpond.aggregate.masking.member import CohortMember
from millpond.aggregate.masking.roster import CohortRoster
from millpond.aggregate.masking.stream import MaskedVector
from millpond.aggregate.messages import FetchWords, Sums, WordsSummed
from millpond.aggregate.node import ReductionNode
from millpond.aggregate.topology import RANGE_VALUES, SINK, ReductionTree, ranges
from millpond.aggregate.tree_client import TreeReduction
from millpond.aggregate.udp import native
from millpond.base.deadline import Deadline
from millpond.base.errors import MillpondError, Refused, RemoteError
from millpond.wire.channel import Channel

from .joined_nodes import JoinedNodes
from .udp.fake_link import open_socket

SIZE, EXCHANGE, LEAST, MTU = RANGE_VALUES + 77, 5, 3, 1500


class Cohort(JoinedNodes):
    """A cohort and its nodes, with masked updates of one exchange: whole numbers, as rounded ones are."""

    def __init__(self, count: int, bits: int, size: int = SIZE) -> None:
        super().__init__()
        self.size, self.bits, self.names = size, bits, [f"n{number}" for number in range(count)]
        secrets = {name: os.urandom(32) for name in self.names}
        public = {name: keys.LastingKey(secret).public for name, secret in secrets.items()}
        roster = CohortRoster(LEAST, public)
        self.members = {
            name: CohortMember(name, secret, roster, os.urandom, set[bytes]().add)
            for name, secret in secrets.items()
        }
        self.host = MaskedExchange(public, os.urandom(16))
        for name, member in self.members.items():
            assert not self.host.offered(name, member.open(self.host.opening()))
        for name, request in self.host.dealing(1.0).items():
            self.host.taken(name, self.members[name].take(request))
        rng = np.random.default_rng(1)
        self.whole = {name: rng.integers(-(1 << 20), 1 << 20, size) for name in self.names}
        self.memory = {name: bytearray(MaskedVector.bytes_of(size, 64)) for name in self.names}
        self.words = {name: MaskedVector(size, bits, memoryview(own)) for name, own in self.memory.items()}
        for number, (name, words) in enumerate(self.words.items(), 1):
            words.values[:], words.figures[:] = self.whole[name].astype(words.values.dtype), number
            words.add_masks(self.members[name].masks())
        self.sockets = contextlib.ExitStack()
        self.hubs, self.own = ({name: self._socket() for name in self.names} for _ in range(2))
        self.withdrawn: dict[str, int] = {}  # after how many looks a node's update is not offered any more
        self.nodes = {name: self._node(name) for name in self.names}

    def _socket(self) -> socket.socket:
        return self.sockets.enter_context(open_socket(("127.0.0.1", 0)))

    def have_ended(self) -> None:
        super().have_ended()
        self.sockets.close()

    def _node(self, name: str) -> ReductionNode:
        update, state = np.frombuffer(self.memory[name], np.float32), np.zeros(self.size, np.float32)
        looks = iter(range(1 << 20))

        def offers(exchange: int) -> bool:
            return exchange == EXCHANGE and next(looks) < self.withdrawn.get(name, 1 << 20)

        nothing = (lambda _: None, lambda _: None)
        rounds = DatagramRounds(self.hubs[name], self.own[name], MTU, "127.0.0.0/8", *nothing)
        return ReductionNode(name, update, state, self.dial, offers, rounds)

    def added_in(self, trees: tuple[ReductionTree, ...], *, datagrams: bool = False) -> MaskedVector:
        """Return the sum of a reduction by nodes."""
        words = MaskedVector(self.size, self.bits)
        with contextlib.closing(TreeReduction(self.dial)) as sink:
            sink.add_words(trees, words, EXCHANGE, datagrams=datagrams)
        return words

    def added_by_host(self, names: Collection[str]) -> MaskedVector:
        words = MaskedVector(self.size, self.bits)
        for name in names:
            words.add(self.words[name])
        return words

    def unmask(self, words: MaskedVector, survivors: Collection[str], silent: Collection[str] = ()) -> None:
        """Remove the masks of the survivors, of whom the ``silent`` do not answer any more."""
        request, left = self.host.agreeing(survivors), [name for name in survivors if name not in silent]
        for name in left:
            self.host.agreed(name, self.members[name].agree(request))
        asked = self.host.unmasking()
        for name in left:
            assert not self.host.shared(name, self.members[name].unmask(asked[name]))
        words.add_masks(list(self.host.masks()))

    def is_sum(self, words: MaskedVector, names: Collection[str]) -> bool:
        expected = sum(self.whole[name] for name in names).astype(words.values.dtype)  # type: ignore[union-attr]
        figure = sum(self.names.index(name) + 1 for name in names)
        return bool((words.values == expected).all() and (words.figures == figure).all())


@pytest.fixture(params=[64, 32])
def cohort(request: pytest.FixtureRequest) -> Iterator[Cohort]:
    made = Cohort(6, request.param)
    yield made
    made.have_ended()


def test_all_topologies_add_the_same_words_and_masks_cancel(cohort: Cohort) -> None:
    shapes = topology.candidates(cohort.names, SIZE)
    found = {name: cohort.added_in(trees) for name, trees in shapes.items()}
    assert {"star", "tree 1", "tree 2", "ring"} <= found.keys()
    assert {words.data.tobytes() for words in found.values()} == {found["star"].data.tobytes()}
    assert not cohort.is_sum(found["tree 2"], cohort.names)
    cohort.unmask(found["tree 2"], cohort.names)
    assert cohort.is_sum(found["tree 2"], cohort.names)


@pytest.mark.parametrize("engine", ["python", "c"])
def test_datagrams_carry_the_same_words(cohort: Cohort, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if engine == "c" and not native.is_usable():
        pytest.skip("without a C compiler there is the Python engine alone")
    monkeypatch.setattr(native, "is_usable", lambda: engine == "c")
    trees = topology.below_one(cohort.names, SIZE)["star"]
    words = cohort.added_in(trees, datagrams=True)
    assert words.data.tobytes() == cohort.added_in(trees).data.tobytes()
    cohort.unmask(words, cohort.names)
    assert cohort.is_sum(words, cohort.names)


@pytest.mark.parametrize("shape", ["star", "tree 1", "tree 2", "ring"])
def test_a_node_lost_in_mid_sum_and_the_host_adds_the_updates_of_the_others(
    cohort: Cohort, shape: str
) -> None:
    """What nodes have added is of no use then. A sum of others than the survivors is never unmasked."""
    cohort.withdrawn["n4"] = 2
    with pytest.raises(RemoteError, match=r"n4.* (was withdrawn|has no update)"):
        cohort.added_in(topology.candidates(cohort.names, SIZE)[shape])
    survivors = [name for name in cohort.names if name != "n4"]
    words = cohort.added_by_host(survivors)
    cohort.unmask(words, survivors)
    assert cohort.is_sum(words, survivors)
    other = cohort.host.agreeing(cohort.names[:5])
    for name in survivors:
        with pytest.raises(Refused, match="'agree' is not the next step"):
            cohort.members[name].agree(other)


def _survivors(cohort: Cohort, rng: random.Random, lost: list[str]) -> tuple[MaskedVector, list[str]]:
    """Return the sum, and of whom it is: by nodes, or by the host if one is lost meanwhile."""
    shape = rng.choice(list(topology.below_one(cohort.names, cohort.size).values()))
    cohort.gone |= {name for name in lost if rng.random() < 0.5}
    cohort.withdrawn |= {name: rng.randint(0, 3) for name in lost if name not in cohort.gone}
    with contextlib.suppress(MillpondError):
        return cohort.added_in(shape), cohort.names
    left = [name for name in cohort.names if name not in lost]
    return cohort.added_by_host(left), left


def test_any_nodes_lost_at_any_time_and_the_sum_is_that_of_the_survivors_or_there_is_none() -> None:
    ended = 0
    for schedule in range(200):
        rng = random.Random(schedule)
        cohort = Cohort(rng.randint(3, 8), rng.choice([32, 64]), 40)
        most = (len(cohort.names) - 1) // 3 + (schedule % 8 == 0)
        lost = rng.sample(cohort.names, rng.randint(0, most))
        late = {name for name in lost if rng.random() < 0.3}  # after the sum is there
        words, survivors = _survivors(cohort, rng, [name for name in lost if name not in late])
        try:
            cohort.unmask(words, survivors, late)
        except (CohortFailed, Refused):
            assert not cohort.is_sum(words, survivors)
        else:
            assert len(survivors) >= LEAST and cohort.is_sum(words, survivors)
            ended += 1
        cohort.have_ended()
    assert ended > 150


class Liar:
    """Answers as a node of a subtree of others."""

    def serve(self, parent: Channel) -> None:
        request = parent.expect(FetchWords, Deadline.after(5))
        for start, stop in ranges(request.start, request.stop):
            parent.send(Sums(start), Deadline.after(5), bytes((stop - start) * request.bits // 8))
        parent.send(WordsSummed(("n0", "n2"), bytes(16)), Deadline.after(5))


def test_the_contributors_of_a_sum_are_those_of_its_tree(cohort: Cohort) -> None:
    cohort.nodes["n0"] = Liar()  # type: ignore[assignment]
    with pytest.raises(RemoteError, match="n0 has added the words of others than its subtree's"):
        cohort.added_in(topology.tree(cohort.names, SIZE))


def test_nodes_add_words_of_masked_updates_alone(cohort: Cohort) -> None:
    trees, state = topology.star(cohort.names, SIZE), np.zeros(SIZE, np.float32)
    with contextlib.closing(TreeReduction(cohort.dial)) as sink:
        bounds = dict.fromkeys(cohort.names, (1.0, 1.0))
        with pytest.raises(RemoteError, match="has masked words, and no values"):
            sink.run(trees, bounds, 1.0, state.copy(), EXCHANGE)
    with contextlib.closing(cohort.dial("n0")) as channel:
        channel.send(FetchWords("n0", EXCHANGE, 0, SIZE, 16, {SINK: ()}), Deadline.after(5))
        with pytest.raises(RemoteError, match="n0"):
            channel.expect(Sums, Deadline.after(5))
    plain = ReductionNode("n1", state, state, cohort.dial)
    cohort.nodes["n1"] = plain
    with pytest.raises(RemoteError, match="n1 has no masked update of"):
        cohort.added_in(topology.tree(cohort.names, SIZE))
