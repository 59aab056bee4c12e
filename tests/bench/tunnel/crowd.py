# SPDX-License-Identifier: Apache-2.0
"""Edge: a fleet's worth of tunnels on one host: their idle memory, and their shares under load."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.tunnel import traffic
from bench.tunnel.accounting import proportional_memory, usage
from bench.tunnel.namespace import Namespace
from bench.tunnel.our_routes import End, Wishes, arguments, start_end, wait_for_all
from bench.tunnel.route import RouteFailed, Tools
from millpond.tunnel.datapath.stats_shm import make_stats
from millpond.tunnel.endpoint.zygote_client import EndpointZygote

_LEAD, _LEAD_PER_TUNNEL = 0.3, 0.05
"""Seconds that it takes to start two programs per tunnel."""

_SETTLES = 2.0


@dataclass(frozen=True, slots=True)
class Member:
    """One tunnel of the crowd."""

    number: int
    namespace: Namespace
    host: End
    device: End

    @property
    def interface(self) -> str:
        """Its name on the host's side; on the device's it is pond0."""
        return f"pond{self.number}"

    @property
    def device_address(self) -> str:
        """Where the device listens."""
        return f"10.77.{self.number}.2"


@dataclass(frozen=True, slots=True)
class Memory:
    """MiB (PSS) per tunnel, of both ends and of the host's end alone."""

    both: float
    host: float


class Crowd:
    """``count`` tunnels between one namespace, the host's, and one per device. ``tools.undo`` ends them."""

    def __init__(self, tools: Tools, engine: str, count: int) -> None:
        self._program = str(tools.traffic)
        self._host = Namespace()
        tools.undo.callback(self._host.close)
        self._zygote = EndpointZygote()
        tools.undo.callback(self._zygote.close)
        self._members = [self._join(tools, Wishes(engine), number) for number in range(count)]
        wait_for_all([end for member in self._members for end in (member.host, member.device)])
        time.sleep(_SETTLES)

    def _join(self, tools: Tools, wishes: Wishes, number: int) -> Member:
        namespace = Namespace()
        tools.undo.callback(namespace.close)
        socket = tools.scratch / f"crowd-{wishes.engine}-{number}"
        address = f"10.77.{number}"
        device = start_end(tools, namespace, "device", socket, wishes, "pond0", f"{address}.2")
        host = self._start_host(tools, arguments("host", socket, wishes, f"pond{number}", f"{address}.1"))
        return Member(number, namespace, host, device)

    def _start_host(self, tools: Tools, told: Sequence[str]) -> End:
        """As the host's daemon does; a device's end is alone on its device."""
        reader, status = os.pipe()
        tools.undo.callback(os.close, reader)
        counters = make_stats()
        try:
            with self._host.entered():
                self._zygote.start(told, status, counters)
        finally:
            os.close(status)
            os.close(counters)
        return End(0, reader)

    def _processes(self) -> list[int]:
        return [self._zygote.pid, *(member.device.pid for member in self._members)]

    def memory(self) -> Memory:
        """At this moment."""
        zygote, *devices = self._processes()
        host, device = proportional_memory([zygote]), proportional_memory(devices)
        self._check_steady()
        return Memory((host + device) / len(devices), host / len(devices))

    def idle_percent(self, seconds: float) -> float:
        """Percent of a core per tunnel, while nothing is sent."""
        pids = self._processes()
        before, began = usage(pids), time.monotonic()
        time.sleep(seconds)
        used = usage(pids).since(before).seconds
        return 100 * used / (time.monotonic() - began) / len(self._members)

    def shares(self, seconds: float) -> list[float]:
        """Bytes per second through each tunnel, all loaded at once by one TCP stream each to its device."""
        lead = _LEAD + _LEAD_PER_TUNNEL * len(self._members)
        begin = str(time.monotonic() + lead)
        tail = (str(traffic.PORT), "1", begin, str(seconds))
        before = self._counters()
        sinks = [
            traffic.start(self._program, member.namespace, "receive", "listen", member.device_address, *tail)
            for member in self._members
        ]
        for sink in sinks:
            assert sink.stdout
            sink.stdout.readline()
        sources = [
            traffic.start(self._program, self._host, "send", "connect", member.device_address, *tail)
            for member in self._members
        ]
        received = [traffic.finish(sink, lead + seconds) for sink in sinks]
        for source in sources:
            traffic.finish(source, lead + seconds)
        self._check(before, [answer["bytes"] for answer in received])
        return [answer["bytes_in_time"] / answer["seconds_in_time"] for answer in received]

    def _check_steady(self) -> None:
        for member in self._members:
            member.host.check_steady()
            member.device.check_steady()

    def _counters(self) -> list[int]:
        return [self._host.traffic(member.interface).sent for member in self._members]

    def _check(self, before: Sequence[int], received: Sequence[float]) -> None:
        self._check_steady()
        for member, then, now, count in zip(self._members, before, self._counters(), received, strict=True):
            if now - then < count:
                raise RouteFailed(f"{count:.0f} bytes came, but {member.interface} counted {now - then}")
