# SPDX-License-Identifier: Apache-2.0
"""Pure: a route that the benchmark sends bytes over: a peer, or a variant of millpond's tunnel."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.tunnel.namespace import Namespace

MAX_MTU, ETHERNET_MTU = 65520, 1500


class Unavailable(Exception):
    """This route cannot be had on this machine, and why."""


class RouteFailed(Exception):
    """A route did not do what was asked of it, and what it said."""


@dataclass(frozen=True, slots=True)
class Route:
    """A way between two programs, one on the host's side and one on the device's.

    The host reaches the device at ``device_address``, where it ``listens``, and the device the host at
    ``host_address``. ``interface`` is counted on both sides. ``carriers`` are the processes that carry the
    bytes, with all below them. ``datagrams`` is False where only TCP goes through and only the host connects.
    ``steady`` raises RouteFailed if the route is no longer what it was when it was made.
    """

    host: Namespace
    device: Namespace
    host_address: str
    device_address: str
    listens: str
    interface: str
    carriers: tuple[int, ...] = ()
    datagrams: bool = True
    steady: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class Tools:
    """What routes are made with; ``undo`` ends them."""

    relay: Path
    traffic: Path
    scratch: Path
    undo: ExitStack


@dataclass(frozen=True, slots=True)
class Candidate:
    """A route that can be made. ``make`` raises Unavailable or RouteFailed."""

    key: str
    label: str
    make: Callable[[Tools], Route]
