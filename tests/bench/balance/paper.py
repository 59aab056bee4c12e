# SPDX-License-Identifier: Apache-2.0
"""Pure: the machines of the Stannis paper (section V), with their speeds as given, inferred or guessed."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.train.balance.curve import Curve, Floats, Ints

HOST_SPEED, HOST_BATCH = 33.4, 180
CSD_SPEED, CSD_BATCH = 2.78, 15
"""MobileNetV2, images per second at the batch that the paper found best. The paper does not print the CSD's
speed: with this one 15 images take as long as the host's 180.
"""
LIMIT = "the limit, which is the sum of the speeds that are there"
CURVES = (
    "the paper's speed of a host with a batch of 180, the 2.78 img/s with which a CSD's batch of 15 takes as "
    "long, and our curves below these: a host with 100 "
    "has 0.973 of its speed, since the paper's busy node, with 100 at 0.57 of its speed, kept step with the "
    "180 of the others; CSDs with 2 and 5 have 1.7 and 2.3 img/s, which is a guess"
)
THREE = 93.4
"""Images per second of three equal nodes in one job (section V-A)."""
NODE_SPEED = THREE / 3
LEFT = {50: 75.6 / THREE, 75: 53.3 / THREE}
"""The part of its speed that a node keeps while so many percent of its cores are taken: untuned, everyone
waits for it.
"""
TUNED = {50: (140, 85.8), 75: (100, 83.7)}
"""What HyperTune reached in these cases: the node's batch, and images per second of all three."""
HOST_LEFT = 49.26 / 99.83
"""The part of its speed that the host keeps while 6 of its 8 cores are taken: untuned, everyone waits for it,
and the speed of host and 36 CSDs fell from 99.83 to 49.26 img/s (section V-B).
"""
SPEEDS_36 = {
    "host + 36 CSD": 99.83,
    "untuned, 6 of the host's 8 cores taken": 49.26,
    "tuned, 6 of the host's 8 cores taken": 74.89,
}
"""Images per second that the paper measured."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A worker of some kind: what it takes for a step by batch, at most that of the curve's end."""

    kind: str
    curve: Curve

    @property
    def most(self) -> int:
        """The largest batch."""
        return self.curve.batches[-1]

    @property
    def speed(self) -> float:
        """Samples per second at its best."""
        return self.curve.speed

    def scaled(self, factor: float) -> Machine:
        """It takes ``factor`` times as long."""
        seconds = tuple(factor * second for second in self.curve.seconds)
        return Machine(self.kind, Curve(self.curve.batches, seconds))

    def seconds(self, batches: Ints) -> Floats:
        """Of a step, any shape."""
        return self.curve.time(batches)


# Section V-A: with 100 instead of 180, a host at 53.3 / 93.4 of its speed no longer keeps the others waiting.
# So 100 take at most 0.571 of the time of 180, and on this line they take that.
_FIXED, _EACH = 0.19, (HOST_BATCH / HOST_SPEED - 0.19) / HOST_BATCH
_HOST_BATCHES = (20, 60, 100, HOST_BATCH)
HOST = Machine("host", Curve(_HOST_BATCHES, tuple(_FIXED + _EACH * batch for batch in _HOST_BATCHES)))
CSD = Machine("csd", Curve((2, 5, CSD_BATCH), (1.2, 2.2, CSD_BATCH / CSD_SPEED)))
NODE = HOST.scaled(HOST_SPEED / NODE_SPEED)
"""One of three equal nodes of section V-A, whose exchange is part of its step."""


@dataclass(frozen=True, slots=True)
class Server:
    """A host and its CSDs of section V-B with some network: images per second of each, ``left`` the part of
    its speed that the host keeps while 6 of its 8 cores are taken.
    """

    network: str
    host: Machine
    csd: Machine
    left: float

    def limit(self, count: int, left: float = 1.0) -> float:
        """Return the images per second that are there with so many CSDs."""
        return left * self.host.speed + count * self.csd.speed


MOBILENET = Server("MobileNetV2", HOST, CSD, HOST_LEFT)


def _for_batches(machine: Machine, factor: float) -> Machine:
    """Return a machine that does ``factor`` times as many samples in the same time."""
    batches = tuple(round(factor * batch) for batch in machine.curve.batches)
    return Machine(machine.kind, Curve(batches, machine.curve.seconds))


SHUFFLENET = Server(
    "ShuffleNet", _for_batches(HOST, 300 / HOST_BATCH), _for_batches(CSD, 25 / CSD_BATCH), HOST_LEFT
)
"""The paper has its batches, 300 and 25, and no speed: here a step takes as long as with MobileNetV2."""
