# SPDX-License-Identifier: Apache-2.0
"""Edge: carries out a plan: makes the routes, measures them in turn, records the results."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from bench.tunnel import traffic
from bench.tunnel.accounting import Usage, usage
from bench.tunnel.crowd import Crowd
from bench.tunnel.plan import FLOODED, Plan, crowd_key
from bench.tunnel.record import Record
from bench.tunnel.route import Candidate, Route, RouteFailed, Tools, Unavailable
from bench.tunnel.traffic import Seen

_GIGA = 1e9
_SETTLES = 2.0


@dataclass(slots=True)
class Run:
    """One run. ``say`` gets a line of progress now and then."""

    plan: Plan
    tools: Tools
    candidates: Mapping[str, Candidate]
    labels: Mapping[str, str]
    say: Callable[[str], None]
    record: Record = field(default_factory=Record)
    routes: dict[str, Route] = field(default_factory=dict)
    congestion_control: str = ""

    def all(self) -> Record:
        """Every phase of the plan, the crowds after all routes are closed."""
        with ExitStack() as undo:
            self._open(replace(self.tools, undo=undo))
            self._alternate()
            if "idle" in self.plan.phases:
                self._idle()
            self.routes.clear()
        if "crowd" in self.plan.phases:
            for engine in self.plan.engines:
                self._crowd(engine)
        return self.record

    @contextlib.contextmanager
    def _guarded(self, key: str) -> Iterator[None]:
        """A route that fails is left out from then on; the others go on."""
        try:
            yield
        except (Unavailable, RouteFailed) as error:
            self.routes.pop(key, None)
            self.record.missing[key] = str(error)
            if isinstance(error, RouteFailed):
                self.record.failed.add(key)
            self.say(f"{self.labels[key]}: {error}")

    def _open(self, tools: Tools) -> None:
        for key in self.plan.routes:
            with self._guarded(key):
                self.routes[key] = self.candidates[key].make(tools)
                self.congestion_control = self.routes[key].host.congestion_control
        if self.routes:
            self.say(f"{len(self.routes)} routes are open; congestion control {self.congestion_control}")

    def _alternate(self) -> None:
        for repeat in range(self.plan.durations.repeats):
            if self.plan.phases & {"tcp", "rtt"}:
                self._exchange(repeat)
            if "pps" in self.plan.phases:
                self._flood(repeat)

    def _exchange(self, repeat: int) -> None:
        durations, program = self.plan.durations, str(self.tools.traffic)
        first: dict[str, tuple[Seen | None, Seen]] = {}
        for key in self.plan.order(repeat, list(self.routes)):
            if key not in self.routes:
                continue
            with self._guarded(key):
                route, outward = self.routes[key], key not in first
                moved = None
                if "tcp" in self.plan.phases:
                    moved = traffic.throughput(program, route, durations.tcp, outward=outward)
                here = moved, traffic.round_trips(program, route, durations.rtt)
                if outward:
                    first[key] = here
                else:
                    self._keep(key, repeat, first[key], here)

    def _keep(
        self, key: str, repeat: int, out: tuple[Seen | None, Seen], back: tuple[Seen | None, Seen]
    ) -> None:
        values = {}
        if out[0] and back[0]:
            values = throughput_values(out[0], back[0])
        pings = out[1].sender, back[1].sender
        values |= {f"rtt_{name}": sum(ping[f"{name}_us"] for ping in pings) / 2 for name in ("p50", "p99")}
        self.record.add(key, **values)
        told = [f"{values['gbps']:6.2f} Gbit/s  {values['cpu_per_gb']:6.3f} s/GB"] if "gbps" in values else []
        told += [f"round trip {values['rtt_p50']:5.1f} us"]
        self._progress(repeat, key, "  ".join(told))

    def _flood(self, repeat: int) -> None:
        program, seconds = str(self.tools.traffic), self.plan.durations.pps
        first: dict[str, Seen] = {}
        flooded = [key for key in self.routes if key in FLOODED]
        for key in self.plan.order(repeat, flooded):
            if key not in self.routes:
                continue
            with self._guarded(key):
                seen = traffic.datagrams(program, self.routes[key], seconds, outward=key not in first)
                if key not in first:
                    first[key] = seen
                    continue
                pps = _rate("packets", first[key], seen)
                self.record.add(key, pps=pps)
                self._progress(repeat, key, f"{pps:8.0f} datagrams/s")

    def _progress(self, repeat: int, key: str, text: str) -> None:
        self.say(f"{repeat + 1}/{self.plan.durations.repeats}  {self.labels[key]:<32} {text}")

    def _idle(self) -> None:
        """All at once: what is idle does not disturb."""
        durations = self.plan.durations
        time.sleep(_SETTLES)
        for _ in range(durations.idle_repeats):
            began = time.monotonic()
            before = {key: usage(route.carriers) for key, route in self.routes.items() if route.carriers}
            time.sleep(durations.idle)
            for key, then in before.items():
                with self._guarded(key):
                    used = usage(self.routes[key].carriers).since(then).seconds
                    self.routes[key].steady()
                    self.record.add(key, idle_cpu_percent=100 * used / (time.monotonic() - began))
        self.say(f"idle for {durations.idle_repeats} x {durations.idle:.0f} s")

    def _crowd(self, engine: str) -> None:
        durations = self.plan.durations
        with ExitStack() as undo, self._guarded(crowd_key(engine)):
            crowd = Crowd(replace(self.tools, undo=undo), engine, durations.crowd)
            memory = crowd.memory()
            idle = crowd.idle_percent(durations.idle)
            self.record.add(engine, mib_idle=memory.both, mib_idle_host=memory.host, crowd_idle_percent=idle)
            self.say(f"{durations.crowd} idle tunnels, {engine} engine: {memory.both:.2f} MiB each")
            for _ in range(durations.crowd_repeats):
                shares = crowd.shares(durations.crowd_seconds)
                fairness = min(shares) / max(shares)
                self.record.add(engine, fairness=fairness, crowd_gbps=sum(shares) * 8 / _GIGA)
                self.say(f"all loaded: {sum(shares) * 8 / _GIGA:.2f} Gbit/s, slowest/fastest {fairness:.2f}")
            self.record.add(engine, mib_used=crowd.memory().both)


def throughput_values(out: Seen, back: Seen) -> dict[str, float]:
    """The quantities of one repeat, from its two directions."""
    used: Usage = out.carriers.plus(back.carriers)
    gigabytes = (out.receiver["bytes"] + back.receiver["bytes"]) / _GIGA
    programs = sum(
        program[kind]
        for seen in (out, back)
        for program in (seen.sender, seen.receiver)
        for kind in ("user", "system")
    )
    ticks = used.user_ticks + used.system_ticks
    values = {
        "gbps": _rate("bytes", out, back) * 8 / _GIGA,
        "cpu_per_gb": used.seconds / gigabytes,
        "cpu_per_gb_all": (used.seconds + programs) / gigabytes,
        "sleeps_per_gb": used.sleeps / gigabytes,
        "preemptions_per_gb": used.preemptions / gigabytes,
    }
    return values | ({"user_percent": 100 * used.user_ticks / ticks} if ticks else {})


def _rate(unit: str, *seen: Seen) -> float:
    amount = sum(each.receiver[f"{unit}_in_time"] for each in seen)
    return amount / sum(each.receiver["seconds_in_time"] for each in seen)
