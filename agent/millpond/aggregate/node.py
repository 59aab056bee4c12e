# SPDX-License-Identifier: Apache-2.0
"""Edge (the clock, threads): a node of reduction trees, which adds its vector to the sums of its children.

A node answers its parent's requests range by range, and asks its children for the next range while its
parent takes the last one: no node has more than a range of any other node's vector. The caller of ``serve``
checks whose channel it is.

The node's own vector changes from exchange to exchange. Each part of it is copied, and used only if its
exchange is still offered then: it was whole and unchanged as long as that was so.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from millpond.aggregate.datagram_rounds import DatagramRounds, own_weight
from millpond.aggregate.exact import all_finite
from millpond.aggregate.kernels import Totals, Vector
from millpond.aggregate.masking.messages import WIDTHS
from millpond.aggregate.masking.words import WordVector, sum_of_figures, words_of
from millpond.aggregate.messages import (
    Advance,
    FetchSums,
    FetchWords,
    GetState,
    JoinRound,
    LinkBytes,
    LinkProbed,
    NodeState,
    ProbeLink,
    RoundJoined,
    Spread,
    Sums,
    Unrepaired,
    Values,
    WordsSummed,
)
from millpond.aggregate.progress import STALL_SECONDS, ProgressTeller, expect
from millpond.aggregate.subtree import SubtreeSum, WordSum, below_of, receive_values
from millpond.aggregate.topology import ranges
from millpond.aggregate.unrepaired import difference, state_after
from millpond.base.deadline import NEVER, Deadline
from millpond.base.errors import MillpondError, ProtocolError
from millpond.wire.channel import Channel
from millpond.wire.messages import Failure, Message, Ok

MOST_NODES = 512
"""The most nodes of a tree, which may be a chain."""
MOST_PROBED = 64 << 20
"""The most bytes of one probe of a link."""
Dial = Callable[[str], Channel]


class ChildConnections:
    """The channels to the children of one thread, dialled when they are needed."""

    def __init__(self, dial: Dial) -> None:
        self._dial, self._open, self._ended = dial, dict[str, Channel](), False

    def __getitem__(self, node: str) -> Channel:
        if node not in self._open:
            self._open[node] = self._dial(node)
            if self._ended:  # meanwhile, by another thread
                self._open[node].shut_down()
        return self._open[node]

    def end(self) -> None:
        """End all connections, from any thread. The descriptors stay until ``close``: another socket could
        get the number of one that a thread waits for.
        """
        self._ended = True
        for channel in tuple(self._open.values()):
            channel.shut_down()

    def close(self) -> None:
        """Close all connections, which no other thread uses any more."""
        for channel in self._open.values():
            channel.close()


class ReductionNode:
    """A node with the vector ``update``; a spread overwrites ``state``, which is as long. ``offers`` returns
    whether the update of an exchange may leave, and is whole; on a LAN it leaves by ``datagrams``, too.
    A longer update is one of masked words, of the values of ``state``. ``serve`` may run in several threads,
    for parents in different trees.
    """

    def __init__(
        self,
        name: str,
        update: Vector,
        state: Vector,
        dial: Dial,
        offers: Callable[[int], bool] = lambda _exchange: True,
        datagrams: DatagramRounds | None = None,
    ) -> None:
        self.name, self._update, self._state = name, update, state
        self._dial, self._offers, self._datagrams = dial, offers, datagrams
        self._is_masked = len(update) > len(state)
        self._all_keep = False  # the nodes of a star: the mean
        self._mean: Vector = np.empty(0, np.float32)  # as long as the vector once a mean is asked for

    def serve(self, parent: Channel, permitted: Callable[[], bool] = lambda: True) -> None:
        """Answer the requests of a parent until it closes the channel; one that is not ``permitted`` may only
        probe the link. Raises RemoteError.
        """
        children = ChildConnections(self._dial)
        try:
            while True:
                request = parent.receive(NEVER)
                try:
                    if request.payload_size:
                        raise ProtocolError("a request in a reduction has no payload")
                    if not isinstance(request.message, ProbeLink) and not permitted():
                        raise ProtocolError(f"{self.name} has no such parent in a tree of the host")
                    self._answer(parent, request.message, children)
                except MillpondError as error:
                    parent.send(Failure("subtree", str(error)), Deadline.after(STALL_SECONDS))
                    raise
        finally:
            children.close()

    def _answer(self, parent: Channel, request: Message, children: ChildConnections) -> None:
        is_plain = isinstance(request, FetchSums) or (isinstance(request, JoinRound) and not request.bits)
        if self._is_masked and is_plain:
            raise ProtocolError(f"{self.name} has masked words, and no values")
        if isinstance(request, FetchSums):
            self._check(request)
            self._check_offered(request.exchange)
            if request.datagrams:
                self._lead(parent, request, children)
            else:
                self._send_sums(parent, request, children)
        elif isinstance(request, FetchWords):
            self._check_words(request)
            self._check_offered(request.exchange)
            (self._lead_words if request.datagrams else self._send_words)(parent, request, children)
        elif isinstance(request, JoinRound):
            self._join(parent, request)
        elif isinstance(request, Spread):
            self._check(request)
            self._pass_on(parent, request, children)
        elif isinstance(request, GetState):
            self._describe(parent, request)
        elif isinstance(request, ProbeLink):
            self._probe(parent, request, children)
        else:
            raise ProtocolError(f"'{request.NAME}' has no place in a reduction")

    def _check(self, request: FetchSums | FetchWords | Spread) -> None:
        below = [child for children in request.children.values() for child in children]
        is_tree = len({self.name, *below}) == 1 + len(below) <= MOST_NODES
        if not is_tree or not {self.name, *below} >= request.children.keys():
            raise ProtocolError(f"{self.name} is asked for a tree that is none")
        if isinstance(request, FetchSums):
            if request.keep and not request.divisor:
                raise ProtocolError("only a root keeps what it adds")
            if missing := sorted({self.name, *below} - request.bounds.keys()):
                raise ProtocolError(f"{self.name} is asked for sums without bounds of {missing[0]:.40}")
            self._check_unrepaired(request.unrepaired, {self.name, *below})
        if request.node != self.name or not 0 <= request.start < request.stop <= len(self._state):
            raise ProtocolError(f"{self.name} is asked for what it does not have")

    def _check_words(self, request: FetchWords) -> None:
        self._check(request)
        self._check_width(request.bits)

    def _check_width(self, bits: int) -> None:
        if bits not in WIDTHS or WordVector.bytes_of(len(self._state), bits) > self._update.nbytes:
            raise ProtocolError(f"{self.name} has no masked update of {bits} bits")

    def _check_unrepaired(self, given: Unrepaired | None, names: Collection[str]) -> None:
        """Check the weights of all nodes of a round without repair. Raises ProtocolError."""
        weights = () if given is None else [given.weights.get(name, 0.0) for name in names]
        if not all(0 < weight < math.inf for weight in weights):
            raise ProtocolError(f"{self.name} is asked for a round without repair of nodes without weights")

    def _check_offered(self, exchange: int) -> None:
        if not self._offers(exchange):
            raise ProtocolError(f"{self.name} has no update of exchange {exchange}")

    def _offered(self, exchange: int, start: int, stop: int) -> Vector:
        """Return a copy of a part of the update of an exchange. Raises ProtocolError if that is not offered
        any more.
        """
        found = self._update[start:stop].copy()
        self._check_still_offered(exchange)
        return found

    def _check_still_offered(self, exchange: int) -> None:
        """Raise ProtocolError if what was copied of the update of an exchange may be of another."""
        if not self._offers(exchange):
            raise ProtocolError(f"{self.name}: the update of exchange {exchange} was withdrawn")

    def _lead(self, parent: Channel, request: FetchSums, children: ChildConnections) -> None:
        """Have the children's updates come by UDP, and send the mean. Raises RemoteError."""
        own = request.children.get(self.name, ())
        factors = {request.bounds[name][0] for name in (self.name, *own)}
        if (request.start, request.stop) != (0, len(self._update)) or factors != {1.0} or not request.divisor:
            raise ProtocolError("by datagrams a root has whole means of updates that are not scaled")
        below, rounds, progress = (
            {child: children[child] for child in own},
            self._rounds(),
            ProgressTeller(parent),
        )
        given, largest = request.unrepaired, request.bounds[self.name][1]
        pool = ThreadPoolExecutor(1, "round by datagrams")
        try:
            update = self._offered(request.exchange, 0, len(self._update))
            if given:
                largest = state_after(update, self._state, given.weights[self.name], given.added)
            mean = progress.result(pool.submit(rounds.lead, request, update, largest, below))
            self._keep(mean, given)
        finally:
            pool.shutdown(wait=False)
        self._all_keep = True
        for start, stop in ranges(0, len(self._mean)) if not request.keep else ():
            parent.send(Sums(start), Deadline.after(STALL_SECONDS), self._mean[start:stop].data)
        if request.keep:
            parent.send(Ok(), Deadline.after(STALL_SECONDS))

    def _join(self, parent: Channel, request: JoinRound) -> None:
        """Take part in a round by UDP. Raises RemoteError."""
        self._check_offered(request.exchange)
        rounds = self._rounds()
        if request.bits:
            self._check_width(request.bits)
            words, figures = self._offered_words(request.exchange, request.bits)
            rounds.check(request, words)
            parent.send(RoundJoined(0.0, figures), Deadline.after(STALL_SECONDS))
            rounds.join(request, words)
            parent.send(Ok(), Deadline.after(STALL_SECONDS))
            return
        update = self._offered(request.exchange, 0, len(self._update))
        given, largest = request.unrepaired, 0.0
        if given:
            largest = state_after(update, self._state, own_weight(request), given.added)
        rounds.check(request, update)
        parent.send(RoundJoined(largest), Deadline.after(STALL_SECONDS))
        self._keep(rounds.join(request, update), given)
        parent.send(Ok(), Deadline.after(STALL_SECONDS))

    def _offered_words(self, exchange: int, bits: int) -> tuple[Vector, bytes]:
        """Return a copy of the masked words of an exchange, seen as float32, and their figures. Raises
        ProtocolError if these are not offered any more.
        """
        own = WordVector(len(self._state), bits, self._update.data.cast("B"))
        words, figures = own.values.view(np.float32).copy(), own.figures.tobytes()
        self._check_still_offered(exchange)
        return words, figures

    def _lead_words(self, parent: Channel, request: FetchWords, children: ChildConnections) -> None:
        """Have the children's masked words come by UDP, and send the sum. Raises RemoteError."""
        own = request.children.get(self.name, ())
        if (request.start, request.stop) != (0, len(self._state)) or request.children.keys() - {self.name}:
            raise ProtocolError("by datagrams a root has whole sums of its children")
        below, progress = {child: children[child] for child in own}, ProgressTeller(parent)
        words, figures = self._offered_words(request.exchange, request.bits)
        pool = ThreadPoolExecutor(1, "round by datagrams")
        try:
            led = pool.submit(self._rounds().lead_words, request, words, below)
            found, others = progress.result(led)
        finally:
            pool.shutdown(wait=False)
        sums = found.view(words_of(request.bits))
        for start, stop in ranges(0, len(self._state)):
            parent.send(Sums(start), Deadline.after(STALL_SECONDS), sums[start:stop].data)
        total = sum_of_figures([figures, *others.values()])
        parent.send(WordsSummed((self.name, *others), total), Deadline.after(STALL_SECONDS))

    def _keep(self, mean: Vector, given: Unrepaired | None) -> None:
        """Keep the mean of a round by datagrams, as differences from this node's state."""
        if given:
            difference(mean, self._state, given.added)
        self._mean = mean

    def _rounds(self) -> DatagramRounds:
        if self._datagrams is None:
            raise ProtocolError(f"{self.name} lets no updates leave on a LAN unencrypted (policy.plain_lan)")
        return self._datagrams

    def _send_sums(self, parent: Channel, request: FetchSums, children: ChildConnections) -> None:
        own = request.children.get(self.name, ())
        if not own and not request.divisor:
            for start, stop in ranges(request.start, request.stop):
                values = self._offered(request.exchange, start, stop)
                parent.send(Sums(start), Deadline.after(STALL_SECONDS), values.data)
            return
        if request.divisor and not len(self._mean):
            self._mean = np.zeros(len(self._update), np.float32)
        self._all_keep = False
        summing = SubtreeSum(request, {child: children[child] for child in own})
        progress = ProgressTeller(parent)
        factor, largest = request.bounds[self.name]
        for start, stop in ranges(request.start, request.stop):
            summing.begin(request.scale)
            summing.add_of(self.name, self._offered(request.exchange, start, stop), factor, largest)
            found: Totals | Vector = summing.add_children(start, stop)
            if request.divisor:
                found = self._mean[start:stop]
                summing.divide(request.divisor, found)
            if request.keep:
                progress.tick()
            else:
                parent.send(Sums(start), Deadline.after(STALL_SECONDS), found.data)
        if request.keep:
            parent.send(Ok(), Deadline.after(STALL_SECONDS))

    def _send_words(self, parent: Channel, request: FetchWords, children: ChildConnections) -> None:
        below = {child: children[child] for child in request.children.get(self.name, ())}
        own = WordVector(len(self._state), request.bits, self._update.data.cast("B"))
        summing = WordSum(request, below)
        for start, stop in ranges(request.start, request.stop):
            words = own.values[start:stop].copy()
            self._check_still_offered(request.exchange)
            summing.add_children(words, start)
            parent.send(Sums(start), Deadline.after(STALL_SECONDS), words.data)
        figures = own.figures.tobytes()
        self._check_still_offered(request.exchange)
        parent.send(summing.end(figures, self.name), Deadline.after(STALL_SECONDS))

    def _pass_on(self, parent: Channel, request: Spread, children: ChildConnections) -> None:
        progress = ProgressTeller(parent)
        if request.advance:
            self._advance(request, request.advance)
        if request.describe:
            parent.send(self._described(), Deadline.after(STALL_SECONDS))
        below = [children[child] for child in request.children.get(self.name, ())]
        advance = request.advance if self._all_keep else None
        for child, channel in zip(request.children.get(self.name, ()), below, strict=True):
            channel.send(replace(below_of(request, child), advance=advance), Deadline.after(STALL_SECONDS))
        for start, stop in ranges(request.start, request.stop) if not advance else ():
            piece = self._state[start:stop]
            if not request.advance:
                receive_values(parent, Values, start, piece.data.cast("B"))
            for channel in below:
                channel.send(Values(start), Deadline.after(STALL_SECONDS), piece.data)
            progress.tick()
        for channel in below:
            expect(channel, Ok, tick=progress.tick)
        parent.send(Ok(), Deadline.after(STALL_SECONDS))

    def _advance(self, request: Spread, step: Advance) -> None:
        """Change the state of a request by the mean."""
        if not len(self._mean):
            raise ProtocolError(f"{self.name} keeps no mean")
        own = slice(request.start, request.stop)
        mean = self._mean[own].copy()
        for start, stop in step.added:
            part = slice(max(start - own.start, 0), max(stop - own.start, 0))
            np.negative(mean[part], out=mean[part])
        self._state[own] -= mean

    def _describe(self, parent: Channel, request: GetState) -> None:
        """Send the digest of the state, and the state if wanted."""
        if request.node != self.name:
            raise ProtocolError(f"{self.name} is asked for what it does not have")
        parent.send(self._described(), Deadline.after(STALL_SECONDS))
        for start, stop in ranges(0, len(self._state)) if request.values else ():
            parent.send(Values(start), Deadline.after(STALL_SECONDS), self._state[start:stop].data)

    def _described(self) -> NodeState:
        return NodeState(hashlib.sha256(self._state.data).hexdigest(), all_finite(self._state))

    def _probe(self, parent: Channel, request: ProbeLink, children: ChildConnections) -> None:
        if request.node != self.name or not 0 < request.size <= MOST_PROBED:
            raise ProtocolError(f"{self.name} is asked for a probe that it does not have")
        deadline = Deadline.after(STALL_SECONDS)
        if request.source:
            parent.send(probe(children[request.source], request.source, request.size), deadline)
        else:
            parent.send(LinkBytes(), deadline, bytes(request.size))


def probe(channel: Channel, node: str, size: int) -> LinkProbed:
    """Return the seconds of ``size`` bytes from a node, of at least 2. Raises RemoteError."""
    deadline = Deadline.after(STALL_SECONDS)
    began = time.perf_counter()
    channel.send(ProbeLink(node, size), deadline)
    channel.expect(LinkBytes, deadline, payload=size)
    channel.receive_next(memoryview(bytearray(1)), deadline)
    first = time.perf_counter() - began
    buffer = memoryview(bytearray(min(size, 1 << 18)))
    while left := channel.payload_left:
        channel.receive_next(buffer[:left], deadline)
    return LinkProbed(time.perf_counter() - began, first)
