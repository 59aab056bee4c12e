# SPDX-License-Identifier: Apache-2.0
"""Pure: the messages between the nodes of a reduction tree, from parent to child and back.

A conversation is one of requests of the parent. Values lie in the vector's order from ``start`` to ``stop``.
"""

from __future__ import annotations

from dataclasses import dataclass

from millpond.wire.messages import Kind, Message, message


@message("sums.fetch")
@dataclass(frozen=True, slots=True)
class FetchSums(Message):
    """Ask node ``node`` for the sums of its subtree: the values of each node there times its factor, rounded
    to whole multiples of ``1 / scale``. ``children`` are those of the nodes that have some, ``bounds`` the
    factor and the largest value of each. Answered by Sums, one after the other, or by Failure.
    """

    node: str
    start: int
    stop: int
    scale: float
    children: dict[str, tuple[str, ...]]
    bounds: dict[str, tuple[float, float]]


@message("sums", payload=Kind.PARAMETERS)
@dataclass(frozen=True, slots=True)
class Sums(Message):
    """Payload: the next sums, float64, of a node with children; of a leaf its values, float32."""

    start: int


@message("spread")
@dataclass(frozen=True, slots=True)
class Spread(Message):
    """Announce values, float32, that follow as Values; answered by Ok when all nodes of the subtree have
    them.
    """

    node: str
    start: int
    stop: int
    children: dict[str, tuple[str, ...]]


@message("values", payload=Kind.PARAMETERS)
@dataclass(frozen=True, slots=True)
class Values(Message):
    """Payload: the next values, float32."""

    start: int
