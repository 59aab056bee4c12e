# SPDX-License-Identifier: Apache-2.0
"""Pure: the messages about the links between devices, and the reductions over them."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.wire.messages import Message, message


@message("api.topology.get")
@dataclass(frozen=True, slots=True)
class GetTopology(Message):
    """Ask for the TopologyInfo of vectors of ``size`` values that all ready devices add, with the device
    ``root`` first ("": any). Reductions are run ``repeats`` times.
    """

    size: int
    root: str = ""
    repeats: int = 0


@dataclass(frozen=True, slots=True)
class LinkInfo:
    """The bytes per second and seconds of a hop of a device's link to other devices, and to the host."""

    rate: float
    latency: float
    uplink_rate: float
    uplink_latency: float


@dataclass(frozen=True, slots=True)
class ReductionInfo:
    """The seconds of a reduction and of the way back: predicted, and measured (median; none without
    repeats).
    """

    name: str
    predicted: float
    measured: float | None = None


@message("api.topology")
@dataclass(frozen=True, slots=True)
class TopologyInfo(Message):
    """The measured links by device, whether they are a LAN of the devices' own, the rate that they ``share``
    (None: no limit seen), and the reductions, the fastest by prediction first.
    """

    links: dict[str, LinkInfo]
    lan: bool
    shared: float | None
    reductions: tuple[ReductionInfo, ...]
