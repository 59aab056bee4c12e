# SPDX-License-Identifier: Apache-2.0
"""Pure: computes the rows of ``tunnel.json`` from the measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from bench.rows import Row, summary
from bench.tunnel.record import Record

EMULATION = (
    "host and device are network namespaces of one machine; millpond's rings are shared memory, no PCI"
)


@dataclass(frozen=True, slots=True)
class Quantity:
    """What is measured of each route, in the part of the run called ``phase``."""

    name: str
    what: str
    unit: str
    phase: str


QUANTITIES = (
    Quantity("gbps", "TCP throughput, 4 streams, each direction in turn", "Gbit/s", "tcp"),
    Quantity("cpu_per_gb", "processor time of the processes that carry the bytes", "s/GB", "tcp"),
    Quantity("cpu_per_gb_all", "the same with the sending and the receiving program", "s/GB", "tcp"),
    Quantity("user_percent", "part of the carriers' processor time outside the kernel", "%", "tcp"),
    Quantity("sleeps_per_gb", "times that a carrier went to sleep and was woken", "1/GB", "tcp"),
    Quantity("preemptions_per_gb", "times that a carrier was made to wait for a core", "1/GB", "tcp"),
    Quantity("rtt_p50", "64-byte TCP round trip, median", "us", "rtt"),
    Quantity("rtt_p99", "64-byte TCP round trip, 99th percentile", "us", "rtt"),
    Quantity(
        "pps",
        "UDP datagrams of 64 bytes delivered, 256 under way at most, each direction in turn",
        "1/s",
        "pps",
    ),
    Quantity("idle_cpu_percent", "idle, both ends together", "% of a core", "idle"),
)
CROWD_QUANTITIES = (
    Quantity("mib_idle", "memory (PSS) of one of {crowd} idle tunnels, both ends", "MiB", "crowd"),
    Quantity("mib_idle_host", "memory (PSS) of one of {crowd} idle tunnels, the host's end", "MiB", "crowd"),
    Quantity("mib_used", "the same, both ends, idle again after all were loaded", "MiB", "crowd"),
    Quantity("crowd_idle_percent", "one of {crowd} idle tunnels, both ends", "% of a core", "crowd"),
    Quantity("crowd_gbps", "{crowd} tunnels loaded at once, together", "Gbit/s", "crowd"),
    Quantity("fairness", "{crowd} tunnels loaded at once: slowest over fastest tunnel's bytes", "x", "crowd"),
)


@dataclass(frozen=True, slots=True)
class Headline:
    """A figure that the project aims at: ``quantity`` of ``route``, over that of ``peer`` if there is one.

    DEFAULT stands for the engine that a tunnel runs when nobody chooses.
    """

    figure: str
    what: str
    quantity: str
    route: str
    peer: str | None = None
    inverse: bool = False

    @property
    def phase(self) -> str:
        """The part of the run that measures it."""
        return next(found.phase for found in (*QUANTITIES, *CROWD_QUANTITIES) if found.name == self.quantity)


DEFAULT = "default"
RELAYS = ("relay", "relay_threads")
_TCP = "TCP throughput, 4 streams, each direction in turn, over the C relay's"
_RTT = "64-byte TCP round trip, p50, over the C relay's"
_GSO = "MTU 1500: processor time per byte without GSO over with"
_PPS = "UDP datagrams of 64 bytes delivered per second, 256 under way at most, over the C relay's"
HEADLINES = (
    Headline("tcp_python_over_relay", _TCP, "gbps", "python", "relay"),
    Headline("tcp_c_over_relay", _TCP, "gbps", "c", "relay"),
    Headline("tcp_over_ssh", "TCP throughput over that of ssh -L", "gbps", DEFAULT, "ssh"),
    Headline(
        "cpu_ssh_over_ours",
        "processor time per byte: ssh -L over millpond",
        "cpu_per_gb",
        DEFAULT,
        "ssh",
        True,
    ),
    Headline("rtt_over_relay", _RTT, "rtt_p50", DEFAULT, "relay"),
    Headline("rtt_python_over_relay", _RTT, "rtt_p50", "python", "relay"),
    Headline(
        "idle_cpu_percent", "idle tunnel, both ends with all their processes", "idle_cpu_percent", DEFAULT
    ),
    Headline("gso_gain", _GSO, "cpu_per_gb", DEFAULT + "_1500", DEFAULT + "_1500_plain", True),
    Headline("gso_gain_python", _GSO, "cpu_per_gb", "python_1500", "python_1500_plain", True),
    Headline("pps_c_over_relay", _PPS, "pps", "c", "relay"),
    Headline("pps_python_over_relay", _PPS, "pps", "python", "relay"),
    Headline("mib_per_idle_tunnel", CROWD_QUANTITIES[0].what, "mib_idle", DEFAULT),
    Headline("mib_per_idle_host_end", CROWD_QUANTITIES[1].what, "mib_idle_host", DEFAULT),
    Headline("fairness", CROWD_QUANTITIES[5].what, "fairness", DEFAULT),
)


def resolve(route: str, default_engine: str) -> str:
    """The route's key, with the engine that DEFAULT stands for."""
    return route.replace(DEFAULT, default_engine)


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What the rows have to say beside their values: the routes' names, which engine is the default, ..."""

    labels: Mapping[str, str]
    default_engine: str
    congestion_control: str
    crowd: int

    def label(self, route: str) -> str:
        """Of a route's key, in which DEFAULT may stand."""
        return self.labels[resolve(route, self.default_engine)]


def headlines(record: Record, known: Circumstances) -> list[Row]:
    """One row for each figure of HEADLINES that was measured."""
    return [_headline(record, line, known) for line in HEADLINES if _values(record, line, known)]


def relay(record: Record, quantity: str) -> str:
    """The route of the C relay that does better here, as a loop or with a thread per direction."""
    measured = [route for route in RELAYS if record.values(quantity, route)]
    better = min if quantity == "rtt_p50" else max
    return better(measured, key=lambda route: median(record.values(quantity, route)), default="relay")


def _peer(record: Record, line: Headline, known: Circumstances) -> str | None:
    if line.peer == "relay":
        return relay(record, line.quantity)
    return line.peer and resolve(line.peer, known.default_engine)


def _values(record: Record, line: Headline, known: Circumstances) -> Sequence[float]:
    route = resolve(line.route, known.default_engine)
    peer = _peer(record, line, known)
    if peer is None:
        return record.values(line.quantity, route)
    return record.ratios(line.quantity, *((peer, route) if line.inverse else (route, peer)))


def _headline(record: Record, line: Headline, known: Circumstances) -> Row:
    unit = "x" if line.peer else _unit(line.quantity)
    what = f"{known.label(line.route)}: {line.what.format(crowd=known.crowd)}"
    peer = _peer(record, line, known)
    peer = peer and known.label(peer)
    return summary(line.figure, what, _values(record, line, known), unit, peer=peer, emulation=EMULATION)


def _unit(quantity: str) -> str:
    return next(found.unit for found in (*QUANTITIES, *CROWD_QUANTITIES) if found.name == quantity)


def plain(record: Record, known: Circumstances) -> list[Row]:
    """One row for each quantity of each route; one without a value for each route that is missing."""
    rows = []
    for quantity in (*QUANTITIES, *CROWD_QUANTITIES):
        note = f", {known.congestion_control}" if quantity.name == "gbps" else ""
        for route, label in known.labels.items():
            if values := record.values(quantity.name, route):
                what = f"{label}: {quantity.what.format(crowd=known.crowd)}{note}"
                figure = f"{quantity.name}.{route}"
                rows.append(summary(figure, what, values, quantity.unit, emulation=EMULATION))
    for route, reason in record.missing.items():
        what = f"{known.labels[route]}: {reason}"
        rows.append(summary(f"missing.{route}", what, (), "", emulation=EMULATION))
    return rows
