# SPDX-License-Identifier: Apache-2.0
"""What a reduction node sends of an update that is withdrawn, and overwritten, while the node sends it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import cast

import numpy as np
import pytest

from millpond.aggregate.datagram_rounds import DatagramRounds
from millpond.aggregate.kernels import Vector
from millpond.aggregate.messages import FetchSums, JoinRound, Sums
from millpond.aggregate.node import ReductionNode
from millpond.aggregate.topology import RANGE_VALUES
from millpond.base.deadline import Deadline
from millpond.base.errors import Refused, RemoteError
from millpond.wire.channel import Channel
from millpond.wire.messages import Message

BOUNDS = {"csd0": (1.0, 2.0)}


def soon() -> Deadline:
    return Deadline.after(20)


class Kept:
    """Stands for the rounds by datagrams, and keeps the vectors that would leave."""

    def __init__(self) -> None:
        self.left: list[Vector] = []

    def check(self, _request: JoinRound, update: Vector) -> None:
        self.left.append(update)

    def join(self, _request: JoinRound, update: Vector) -> Vector:
        self.left.append(update)
        return update

    def lead(self, _request: FetchSums, update: Vector, _largest: float, _below: object) -> Vector:
        return self.join(JoinRound(3, "", 0, 0, b"", 0), update)


class Withdrawing:
    """An update of ones. While a node asks for the time ``at`` whether it may leave, it is withdrawn, and the
    next one, of twos, is written over it.
    """

    def __init__(self, at: int) -> None:
        self.update, self.asked, self._at = np.ones(3 * RANGE_VALUES, np.float32), 0, at

    def __call__(self, _exchange: int) -> bool:
        self.asked += 1
        if self.asked == self._at:
            self.update[:] = 2
        return self.asked < self._at


@pytest.mark.parametrize("divisor", [0.0, 1.0])
@pytest.mark.parametrize("at", [2, 3, 4])
def test_nothing_leaves_of_an_update_that_is_withdrawn_meanwhile(at: int, divisor: float) -> None:
    offer = Withdrawing(at)
    node = ReductionNode("csd0", offer.update, np.zeros_like(offer.update), _no_dial, offer)
    left = np.concatenate([np.empty(0, np.float32), *_sums(node, len(offer.update), divisor)])
    assert len(left) == RANGE_VALUES * (at - 2) and (left == 1).all()


def _no_dial(name: str) -> Channel:
    raise AssertionError(name)


def _sums(node: ReductionNode, size: int, divisor: float) -> Iterator[Vector]:
    """The parts that a node sends of its sums, until it refuses the next one."""
    near, far = socket.socketpair()
    with Channel(near, "csd0") as parent, Channel(far, "the host") as own:
        thread = threading.Thread(target=_serve, args=(node, own))
        thread.start()
        parent.send(FetchSums("csd0", 3, 0, size, 1.0, {}, BOUNDS, divisor), soon())
        with pytest.raises(Refused, match="the update of exchange 3 was withdrawn"):
            while True:
                parent.expect(Sums, soon(), payload=None)
                yield np.frombuffer(parent.receive_payload(4 * RANGE_VALUES, soon()), np.float32)
        thread.join()


def _serve(node: ReductionNode, parent: Channel) -> None:
    with contextlib.suppress(RemoteError):
        node.serve(parent)


@pytest.mark.parametrize("root", [True, False])
def test_datagrams_are_of_a_copy_that_was_offered_as_a_whole(root: bool) -> None:
    kept, offer = Kept(), Withdrawing(1 << 30)
    node = ReductionNode("csd0", offer.update, offer.update, _no_dial, offer, cast(DatagramRounds, kept))
    request: Message = JoinRound(3, "127.0.0.1", 1, 0, bytes(32), 1)
    if root:
        request = FetchSums("csd0", 3, 0, len(offer.update), 1.0, {}, BOUNDS, 1.0, datagrams=True)
    near, far = socket.socketpair()
    with Channel(near, "csd0") as parent, Channel(far, "the host") as own:
        thread = threading.Thread(target=_serve, args=(node, own))
        thread.start()
        parent.send(request, soon())
        parent.receive(soon())
        offer.update[:] = 2  # while repairs may still be asked for
        parent.shut_down()
        thread.join()
    assert kept.left and all((vector == 1).all() for vector in kept.left)
    assert not any(np.shares_memory(vector, offer.update) for vector in kept.left)
