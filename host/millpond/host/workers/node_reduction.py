# SPDX-License-Identifier: Apache-2.0
"""Edge: means of updates that devices add among themselves, and states that they pass on to each other.

The host asks the root of each tree for the mean, and sends a state, if at all, to the roots alone. Where
anything fails it adds and sends by itself: devices hold their updates until their next task, and a device
whose state has another digest than the host's is sent the state. So a root or an inner node that dies costs
the round a second pull, and the bits are the same.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from millpond.aggregate import topology
from millpond.aggregate.kernels import Vector
from millpond.aggregate.reduction import Addend
from millpond.aggregate.sink import TreeReduction
from millpond.aggregate.topology import Network, Prediction
from millpond.base.errors import MillpondError
from millpond.host.workers.node_control import NodeControl
from millpond.host.workers.node_group import NodeGroup
from millpond.host.workers.step_guess import StepGuess
from millpond.host.workers.worker import ModelState
from millpond.train.protocol import state_digest
from millpond.train.state.layout import Tensor

LEAST_NODES = 2
_MOST_PAUSE = 63
"""Exchanges without nodes after failures, at most: 0, 1, 3, 7, ..."""


class NodeWorker(Protocol):
    """A worker on a device that can have a node."""

    name: str
    spread: tuple[ModelState, str] | None
    """The state that the device has from other nodes, and its digest."""

    @property
    def node(self) -> NodeControl | None:
        """The control of its node, None before the worker is prepared."""


class NodeReduction:
    """Reduces and spreads states of ``tensors`` over the nodes of a job. ``root`` is the device that adds,
    "auto" for any, if that is faster than the host; ``shape`` is the topology. Call from one thread.
    """

    def __init__(self, root: str, shape: str, tensors: Sequence[Tensor], log: logging.Logger) -> None:
        self._root, self._shape, self._log = root, shape, log
        self._step = StepGuess(tensors)
        self._group: NodeGroup | None = None
        self._network: Network | None = None
        self._sink: TreeReduction | None = None
        self._chosen: Prediction | None = None
        self._names: list[str] = []  # of the chosen trees
        self._failures = self._pause = self._turn = 0
        self._is_slower = False

    def spread(self, state: ModelState, workers: Sequence[NodeWorker]) -> None:
        """Pass a state on to the workers' devices, which then need no other copy. No failure is raised."""
        for worker in workers:
            worker.spread = None
        if self._pause:
            self._pause -= 1
            return
        controls = {worker.name: worker.node for worker in workers if worker.node}
        if self._is_slower or len(controls) < max(LEAST_NODES, len(workers)):
            return
        try:
            self._choose(controls, len(state.values))
            if self._chosen:
                self._spread(state, workers)
        except (MillpondError, OSError) as error:
            self._fail("the host sends the state", error)

    def _spread(self, state: ModelState, workers: Sequence[NodeWorker]) -> None:
        assert self._sink and self._chosen
        step = self._step.to(state.values)
        self._step.forget()
        if step:
            self._sink.advance(self._chosen.trees, step)
        else:
            self._sink.spread(self._chosen.trees, state.values)
        self._step.state, digest = self._step.sample(state.values), state_digest(state.memory.data)
        for worker in workers:
            worker.spread = (state, digest)

    def reduce(self, addends: Mapping[str, Addend], mean: Vector, exchange: int) -> bool:
        """Have the devices write the mean of their updates of an exchange. Returns False if they cannot, or
        have not all of the updates; then ``mean`` is of no meaning.
        """
        if not self._sink or not self._chosen or addends.keys() != set(self._names):
            return False
        bounds = {name: (each.factor, each.largest) for name, each in addends.items()}
        divisor = sum(each.weight for each in addends.values()) or 1.0
        try:
            self._sink.run(self._chosen.trees, bounds, divisor, mean, exchange)
        except (MillpondError, OSError) as error:
            self._fail("the host adds the updates", error)
            return False
        self._step.mean, self._failures = self._step.sample(mean), 0
        return True

    def _choose(self, controls: Mapping[str, NodeControl], size: int) -> None:
        """Have nodes on these devices, measure the links of new ones, and choose trees of them, or none where
        the host is faster.
        """
        self._group = self._group or NodeGroup(size)
        names = self._ordered(sorted(controls))
        new = self._group.join(controls)
        if not new and names == self._names:
            return
        self._forget()
        if self._network is None or new or not set(names) <= self._network.links.keys():
            self._network = self._group.network(names).after(self._network)
        found = topology.fastest(topology.below_one(names, size), self._network, self._shape)
        host = topology.predict("host", topology.star(names, size), self._network)
        self._is_slower = self._root == "auto" and host.seconds <= found.seconds
        self._log.info(
            "%s the updates: predicted are %.3f s an exchange for a %s with the root %s, %.3f s for the host",
            "the host adds" if self._is_slower else "devices add",
            found.seconds,
            found.topology,
            names[0],
            host.seconds,
        )
        if not self._is_slower:
            self._chosen, self._names, self._sink = found, names, TreeReduction(self._group.dial)

    def _ordered(self, names: Sequence[str]) -> list[str]:
        """Return the names from the root on: after a failure another device is the root."""
        ordered = sorted(names, key=lambda name: name != self._root)
        turn = self._turn % len(ordered)
        return ordered[turn:] + ordered[:turn]

    def _fail(self, instead: str, error: Exception) -> None:
        """Note a failure. The next exchanges do without nodes, and then begin with new ones."""
        self._log.warning("devices cannot add among themselves, %s: %s", instead, error)
        self._forget()
        self._group = None
        self._pause = min(2**self._failures - 1, _MOST_PAUSE)
        self._failures, self._turn = self._failures + 1, self._turn + 1

    def _forget(self) -> None:
        if self._sink:
            self._sink.close()
        self._sink, self._chosen, self._names = None, None, []
        self._step.forget()

    def close(self) -> None:
        """Close all connections with nodes."""
        self._forget()
