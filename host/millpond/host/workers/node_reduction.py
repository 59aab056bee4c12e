# SPDX-License-Identifier: Apache-2.0
"""Edge: means of updates that devices add among themselves, and states that they pass on to each other.

The host asks the root of each tree for the mean, and sends a state, if at all, to the roots alone. Where
anything fails it adds and sends by itself: devices hold their updates until their next task, and a device
whose state has another digest than the host's is sent the state. So a root or an inner node that dies costs
the round a second pull, and the bits are the same.

Where the parameter server has declared that a step follows from the mean alone, the devices make it, and no
state is sent. Where no process keeps anything else, and one device has the whole mean, the devices go on by
themselves once the digest of a state has shown that they make the same step: neither means nor states cross
the host's links. The host knows the digest of the state that it does not have, and fetches it from any device
when it needs it, or when a node fails.

Masked updates are added as the words that they are. The host alone removes the masks, so it makes each step.

Without repair of lost datagrams (see ``aggregate.unrepaired``) each device has a state of its own: what has
come of the mean, and its own values elsewhere. The root's is the job's.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from millpond.aggregate import topology
from millpond.aggregate.kernels import Vector
from millpond.aggregate.masking.words import WordVector
from millpond.aggregate.messages import Advance, NodeState, Unrepaired
from millpond.aggregate.reduction import Addend
from millpond.aggregate.topology import Network, Prediction
from millpond.aggregate.tree_client import TreeReduction
from millpond.base.errors import MillpondError, RemoteError
from millpond.host.workers.node_control import NodeControl
from millpond.host.workers.node_group import NodeGroup
from millpond.host.workers.parameter_server import ParameterServer
from millpond.host.workers.worker import DeviceWorker, ModelState, SpreadState
from millpond.train.protocol import OWN_STATE, state_digest

LEAST_NODES = 2
DATAGRAMS = "udp"
"""The topology of a star whose nodes talk by UDP."""
_MOST_PAUSE = 63
"""Exchanges without nodes after failures, at most: 0, 1, 3, 7, ..."""


class StateLost(RemoteError):
    """The newest state is nowhere any more."""


class NodeReduction:
    """Reduces and spreads states over the nodes of a job. ``root`` is the device that adds, "auto" for any,
    if that is faster than the host; ``shape`` is the topology. ``step`` makes a state of the last one and the
    mean, if that can be. With a ``holder`` of the host's copy, the devices may be ahead of that. Without
    ``repair``, which takes a ``step`` and datagrams, lost ones are not sent again. Call from one thread.
    """

    def __init__(
        self,
        root: str,
        shape: str,
        log: logging.Logger,
        step: Advance | None = None,
        holder: ParameterServer | None = None,
        *,
        repair: bool = True,
    ) -> None:
        self._repair, self._differ = repair, False  # whether devices have states of their own
        self._root, self._shape, self._log = root, shape, log
        self._step, self._holder = step, holder
        self._digest = ""  # of the state that the nodes have
        self._has_mean = self._proven = False
        self.ahead = self.advanced = False
        self.apart = False  # whether workers have begun an exchange from states of their own
        self._group: NodeGroup | None = None
        self._network: Network | None = None
        self._sink: TreeReduction | None = None
        self._chosen: Prediction | None = None
        self._names: list[str] = []  # of the chosen trees
        self._failures = self._pause = self._turn = 0
        self._is_slower = False

    def spread(self, state: ModelState, workers: Sequence[DeviceWorker]) -> None:
        """Pass a state on to the workers' devices, which then need no other copy. Raises RemoteError if they
        were ahead, and none has the state any more.
        """
        for worker in workers:
            worker.spread = None
        self.advanced = self.apart = False
        self._try_to_spread(state, workers)
        if not workers or any(worker.spread is None for worker in workers):
            self.catch_up()

    def _try_to_spread(self, state: ModelState, workers: Sequence[DeviceWorker]) -> None:
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

    def _spread(self, state: ModelState, workers: Sequence[DeviceWorker]) -> None:
        digest = self._digest if self.ahead else state_digest(state.memory.data)
        if digest != self._digest:
            self._bring(state, digest)
        self.apart, told = self._differ, OWN_STATE if self._differ else digest
        for worker in workers:
            worker.spread = SpreadState(state, told, self.ahead or not self._repair)

    def _bring(self, state: ModelState, digest: str) -> None:
        """Have the nodes make the step to a state, or send it, if it does not follow from theirs."""
        assert self._sink and self._chosen
        trees, can_step = self._chosen.trees, self._has_mean and bool(self._digest)
        self._digest, self._has_mean = "", False
        if can_step and self._makes(digest):
            self._proven = self._holder is not None and len(trees) == 1
            self._differ = not self._repair
        else:
            self._sink.spread(trees, state.values)
            self._differ = False
        self._digest = digest

    def _makes(self, digest: str) -> bool:
        """Have the nodes make the declared step, if there is one. Returns whether it leads to this state."""
        assert self._sink and self._chosen
        if self._step is None:
            return False
        self._sink.advance(self._chosen.trees, self._step)
        return self._sink.state(self._chosen.trees).digest == digest

    def release(self, worker: DeviceWorker) -> None:
        """Have the host send the state to a worker, which was not among those that a state was passed on to.
        Raises RemoteError if the devices were ahead, and none has the state any more.
        """
        worker.spread = None
        self.catch_up()
        if not self._repair:  # its node has another state than the one that its update begins from
            self._forget()

    def reduce(self, addends: Mapping[str, Addend], mean: Vector, exchange: int) -> bool:
        """Have the devices write the mean of their updates of an exchange, or move their state by it: then
        they are ``advanced``. Returns False if they cannot, or have not all of the updates; then ``mean`` is
        of no meaning. Raises RemoteError if they were ahead, and none has the state any more.
        """
        if self._try_to_reduce(addends, mean, exchange):
            return True
        self.catch_up()
        return False

    def _try_to_reduce(self, addends: Mapping[str, Addend], mean: Vector, exchange: int) -> bool:
        if not self._sink or not self._chosen or addends.keys() != set(self._names):
            return False
        bounds = {name: (each.factor, max(each.largest, each.shift)) for name, each in addends.items()}
        divisor = sum(each.weight for each in addends.values()) or 1.0
        trees, datagrams, self._has_mean = self._chosen.trees, self._shape == DATAGRAMS, False
        unrepaired = None
        if not self._repair and self._step:
            weights = {name: each.weight for name, each in addends.items()}
            unrepaired = Unrepaired(weights, self._step.added)
        try:
            if self._proven and self._step:
                found = self._sink.step(
                    trees[0],
                    bounds,
                    divisor,
                    self._step,
                    exchange,
                    datagrams=datagrams,
                    unrepaired=unrepaired,
                )
                self._go_ahead(found)
            else:
                self._sink.run(
                    trees, bounds, divisor, mean, exchange, datagrams=datagrams, unrepaired=unrepaired
                )
                self._has_mean = True
        except (MillpondError, OSError) as error:
            self._fail("the host adds the updates", error)
            return self.advanced
        self._failures = 0
        return True

    def add_words(self, names: Collection[str], words: WordVector, exchange: int) -> bool:
        """Have the devices write the sum of their masked updates of an exchange to ``words``. Returns False
        if they cannot, or have not all of the updates; then ``words`` are of no meaning.
        """
        if not self._sink or not self._chosen or set(names) != set(self._names):
            return False
        try:
            trees, datagrams = self._chosen.trees, self._shape == DATAGRAMS
            self._sink.add_words(trees, words, exchange, datagrams=datagrams)
        except (MillpondError, OSError) as error:
            self._fail("the host adds the updates", error)
            return False
        self._failures = 0
        return True

    def _go_ahead(self, found: NodeState) -> None:
        """Note the state that the root has made, which is the job's from now on, and wait until all devices
        have it. Raises RemoteError.
        """
        assert self._sink and self._chosen
        self._digest, self.ahead, self.advanced = found.digest, True, True
        self._differ = not self._repair
        self._sink.settle(self._chosen.trees[0])
        if not found.finite:
            self.catch_up()

    def catch_up(self) -> None:
        """Fetch the state from the devices if they are ahead. Raises RemoteError if none has it any more."""
        if not self.ahead:
            return
        assert self._sink and self._holder
        for name in self._names:
            values = self._holder.state.values
            try:
                self._sink.fetch_state(name, values)
            except (MillpondError, OSError) as error:
                self._log.warning("%s does not send the state: %s", name, error)
                continue
            if state_digest(values.data) == self._digest:
                self.ahead = False
                self._holder.reload()
                return
        raise StateLost("no device has the state of the last exchange any more")

    def _choose(self, controls: Mapping[str, NodeControl], size: int) -> None:
        """Have nodes on these devices, measure the links of new ones, and choose trees of them, or none where
        the host is faster.
        """
        self._group = self._group or NodeGroup(size)
        names = self._ordered(sorted(controls))
        new = self._group.join(controls)
        if not new and names == self._names:
            return
        self.catch_up()
        self._forget()
        if self._network is None or new or not set(names) <= self._network.links.keys():
            self._network = self._group.network(names).after(self._network)
        shape = "star" if self._shape == DATAGRAMS else self._shape
        found = topology.fastest(topology.below_one(names, size), self._network, shape)
        found = replace(found, topology="star by udp" if self._shape == DATAGRAMS else found.topology)
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
            self._group.set_trees(names, found.trees)
            self._chosen, self._names, self._sink = found, names, TreeReduction(self._group.dial)

    def _ordered(self, names: Sequence[str]) -> list[str]:
        """Return the names from the root on: after a failure another device is the root."""
        ordered = sorted(names, key=lambda name: name != self._root)
        turn = self._turn % len(ordered)
        return ordered[turn:] + ordered[:turn]

    def _fail(self, instead: str, error: Exception) -> None:
        """Note a failure. The next exchanges do without nodes, and then begin with new ones."""
        instead = "a device has the new state" if self.advanced else instead
        self._log.warning("devices cannot add among themselves, %s: %s", instead, error)
        self.catch_up()
        self._forget()
        self._group = None
        self._pause = min(2**self._failures - 1, _MOST_PAUSE)
        self._failures, self._turn = self._failures + 1, self._turn + 1

    def _forget(self) -> None:
        if self._sink:
            self._sink.close()
        self._sink, self._chosen, self._names = None, None, []
        self._digest, self._has_mean, self._proven = "", False, False

    def close(self) -> None:
        """Close all connections with nodes."""
        self._forget()
