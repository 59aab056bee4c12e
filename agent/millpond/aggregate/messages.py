# SPDX-License-Identifier: Apache-2.0
"""Pure: the messages between the nodes of a reduction tree, from parent to child and back.

A conversation is one of requests of the parent. Values lie in the vector's order from ``start`` to ``stop``.
"""

from __future__ import annotations

from dataclasses import dataclass

from millpond.wire.messages import Kind, Message, message

Ranges = tuple[tuple[int, int], ...]
"""Places of a vector, from the first one of a pair to before the second one."""


@dataclass(frozen=True, slots=True)
class Unrepaired:
    """Averages states, and sends no datagram again. ``weights`` are those of all nodes: each part of the mean
    is over the weights that have come. A state after an update is the one before less the update over its
    weight, but plus it in the places ``added``, which are buffers.
    """

    weights: dict[str, float]
    added: Ranges = ()


@message("sums.fetch")
@dataclass(frozen=True, slots=True)
class FetchSums(Message):
    """Ask node ``node`` for the sums of its subtree in ``exchange``: the values of each node there times its
    factor, rounded to whole multiples of ``1 / scale``. ``children`` are those of the nodes that have some,
    ``bounds`` the factor and the largest value of each. Answered by Sums, one after the other, or by Failure;
    Progress may come before any answer.

    With a ``divisor`` the node divides its sums by it, keeps the mean, and answers with that. With
    ``datagrams`` it is the root of a star on a LAN, whose nodes send their values by UDP and keep the mean.
    ``unrepaired`` says that lost datagrams are not sent again. With ``keep`` it answers with Ok instead of
    the mean.
    """

    node: str
    exchange: int
    start: int
    stop: int
    scale: float
    children: dict[str, tuple[str, ...]]
    bounds: dict[str, tuple[float, float]]
    divisor: float = 0.0
    datagrams: bool = False
    keep: bool = False
    unrepaired: Unrepaired | None = None


@message("words.fetch")
@dataclass(frozen=True, slots=True)
class FetchWords(Message):
    """Ask node ``node`` for the sums of its subtree's masked words, of so many ``bits``, in ``exchange``:
    those of the values from ``start`` to ``stop``. ``children`` are those of the nodes that have some. With
    ``datagrams`` it is the root of a star on a LAN, whose nodes send their words by UDP.
    Answered by Sums, one after the other, and WordsSummed, or by Failure.
    """

    node: str
    exchange: int
    start: int
    stop: int
    bits: int
    children: dict[str, tuple[str, ...]]
    datagrams: bool = False


@message("words.summed", Kind.METRICS)
@dataclass(frozen=True, slots=True)
class WordsSummed(Message):
    """All sums of a subtree have been sent: the ``contributors`` are the nodes whose words are in each of
    them. ``figures`` are the sums of their two masked figures, 8 bytes each.
    """

    contributors: tuple[str, ...]
    figures: bytes


@message("round.join")
@dataclass(frozen=True, slots=True)
class JoinRound(Message):
    """Send the update of ``exchange`` as ``client`` to the aggregator at ``address``, ``port``, in datagrams
    of so many ``values``, authenticated by ``key``, and keep the mean that comes back; answered by
    RoundJoined at once, and by Ok when the mean is there. ``unrepaired``, with the client's own weight, says
    that lost datagrams are not sent again. With ``bits`` the update is one of masked words.
    """

    exchange: int
    address: str
    port: int
    client: int
    key: bytes
    values: int
    unrepaired: Unrepaired | None = None
    bits: int = 0


@message("round.joined")
@dataclass(frozen=True, slots=True)
class RoundJoined(Message):
    """No value that is sent is beyond ``largest``; or the ``figures`` of masked words, see WordsSummed."""

    largest: float
    figures: bytes = b""


@message("progress")
@dataclass(frozen=True, slots=True)
class Progress(Message):
    """The request is still being worked on."""


@message("sums", payload=Kind.PARAMETERS)
@dataclass(frozen=True, slots=True)
class Sums(Message):
    """Payload: the next sums, float64, of a node with children; float32 means, or of a leaf its values. Where
    words are wanted, masked words.
    """

    start: int


@dataclass(frozen=True, slots=True)
class Advance:
    """The step from one state to the next: the mean is subtracted, but added from ``start`` to ``stop`` of
    each of ``added``, which are buffers.
    """

    added: Ranges = ()


@message("spread")
@dataclass(frozen=True, slots=True)
class Spread(Message):
    """Announce a state, float32, that follows as Values; answered by Ok when all nodes of the subtree have
    it. With an ``advance`` no values follow: the node moves the state that it has by the mean that it keeps,
    answers with NodeState if it is to ``describe`` that, and then sends the state on; nodes below that keep
    the mean, too, move their own.
    """

    node: str
    start: int
    stop: int
    children: dict[str, tuple[str, ...]]
    advance: Advance | None = None
    describe: bool = False


@message("state.get")
@dataclass(frozen=True, slots=True)
class GetState(Message):
    """Ask node ``node`` for its state; answered by NodeState, and then by Values if wanted."""

    node: str
    values: bool = False


@message("state")
@dataclass(frozen=True, slots=True)
class NodeState(Message):
    """The SHA-256 of a state, and whether all of it is finite."""

    digest: str
    finite: bool


@message("values", payload=Kind.PARAMETERS)
@dataclass(frozen=True, slots=True)
class Values(Message):
    """Payload: the next values, float32."""

    start: int


@message("link.probe")
@dataclass(frozen=True, slots=True)
class ProbeLink(Message):
    """Ask node ``node`` for ``size`` bytes that mean nothing: its own, answered by LinkBytes, or, to be timed
    and thrown away, those of the node ``source``, answered by LinkProbed.
    """

    node: str
    size: int
    source: str = ""


@message("link.bytes", payload=Kind.PARAMETERS)
@dataclass(frozen=True, slots=True)
class LinkBytes(Message):
    """Payload: zeros."""


@message("link.probed")
@dataclass(frozen=True, slots=True)
class LinkProbed(Message):
    """The ``seconds`` that the bytes took, and those that the ``first`` one took."""

    seconds: float
    first: float


# The messages below are between a host and an agent, on a control connection.


@message("node.start")
@dataclass(frozen=True, slots=True)
class StartNode(Message):
    """Start a node of reductions, of the updates of this connection's job or, without one, of ``size`` zeros;
    answered by NodeReady. It ends with the connection.

    The host's word that nodes may talk to each other is ``authority``, a certificate of this group of nodes
    alone; ``certificate`` and ``key``, signed by it, are the node's own (PEM).
    """

    authority: str
    certificate: str
    key: str
    size: int


@message("node.ready")
@dataclass(frozen=True, slots=True)
class NodeReady(Message):
    """Other nodes reach the node at ``address``, ``port``: on a network of the devices' own if it is ``lan``,
    or through the host.
    """

    address: str
    port: int
    lan: bool


@message("node.peers")
@dataclass(frozen=True, slots=True)
class SetPeers(Message):
    """The addresses and ports of the other nodes, which this node may connect to, and the names of its
    ``parents``, whose requests it answers as it does the host's; from others only probes of links. Answered
    by Ok.
    """

    peers: dict[str, tuple[str, int]]
    parents: tuple[str, ...] = ()


@message("node.ticket")
@dataclass(frozen=True, slots=True)
class GetNodeTicket(Message):
    """Ask for a connection of the host with the node; answered by Ticket, encrypted if ``tls``."""

    tls: bool = False
