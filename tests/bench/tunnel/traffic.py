# SPDX-License-Identifier: Apache-2.0
"""Edge: measures one route once: bytes, round trips or datagrams, and their cost."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from typing import Any

from bench.tunnel.accounting import Usage, usage
from bench.tunnel.namespace import Namespace
from bench.tunnel.route import Route, RouteFailed

PORT = 7000
STREAMS = 4
_AT_ONCE = "0"
_PATIENCE = 10.0
"""Seconds beyond its own duration after which a program is stuck."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What sender and receiver reported, and what the carriers used from the first byte to the last."""

    sender: dict[str, float]
    receiver: dict[str, float]
    carriers: Usage


@dataclass(frozen=True, slots=True)
class Job:
    """Who does what: ``listener`` on the device's side and ``caller`` on the host's, unless ``swapped``."""

    listener: str
    caller: str
    streams: int
    seconds: float
    swapped: bool = False


def throughput(program: str, route: Route, seconds: float, *, outward: bool) -> Seen:
    """TCP, ``STREAMS`` connections, host to device if ``outward``."""
    roles = ("receive", "send") if outward else ("send", "receive")
    with _counted(route, outward) as counted:
        listener, caller, used = _run(program, route, Job(*roles, STREAMS, seconds))
        receiver, sender = (listener, caller) if outward else (caller, listener)
        counted.expect(receiver["bytes"])
    return Seen(sender, receiver, used)


def round_trips(program: str, route: Route, seconds: float) -> Seen:
    """64 bytes to the device and back over TCP, one after the other."""
    with _counted(route, outward=True) as counted:
        listener, caller, used = _run(program, route, Job("echo", "ping", 1, seconds))
        counted.expect(caller["packets"] * 64)
    return Seen(caller, listener, used)


def datagrams(program: str, route: Route, seconds: float, *, outward: bool) -> Seen:
    """UDP datagrams of 64 bytes, as many as get through with a window of 256."""
    with _counted(route, outward) as counted:
        listener, caller, used = _run(program, route, Job("drain", "flood", 1, seconds, swapped=not outward))
        counted.expect(listener["packets"] * 64)
    return Seen(caller, listener, used)


class _counted:  # noqa: N801 - used as a statement
    """Holds the route's interfaces to what the programs say came through: nothing else has carried it."""

    def __init__(self, route: Route, outward: bool) -> None:
        self._route = route
        self._sides = (route.host, route.device) if outward else (route.device, route.host)
        self._expected = 0.0

    def __enter__(self) -> _counted:
        self._before = self._counters()
        return self

    def expect(self, count: float) -> None:
        """So many bytes crossed from the first side to the second."""
        self._expected = count

    def _counters(self) -> tuple[int, int]:
        name = self._route.interface
        sender, receiver = self._sides
        return sender.traffic(name).sent, receiver.traffic(name).received

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return
        self._route.steady()
        sent, received = (now - then for now, then in zip(self._counters(), self._before, strict=True))
        if min(sent, received) < self._expected or self._expected == 0:
            raise RouteFailed(
                f"{self._expected:.0f} bytes came, but {self._route.interface} counted {sent} and {received}"
            )


def _run(program: str, route: Route, job: Job) -> tuple[dict[str, float], dict[str, float], Usage]:
    here, there = route.host, route.device
    to, at = route.device_address, route.listens
    if job.swapped:
        here, there, to, at = there, here, route.host_address, route.host_address
    tail = [str(PORT), str(job.streams), _AT_ONCE, str(job.seconds)]
    before = usage(route.carriers)
    listener = there.start([program, job.listener, "listen", at, *tail])
    callers: list[subprocess.Popen[bytes]] = []
    try:
        assert listener.stdout
        listener.stdout.readline()
        callers.append(here.start([program, job.caller, "connect", to, *tail]))
        answer = _result(callers[0], job.seconds), _result(listener, job.seconds)
        return answer[1], answer[0], usage(route.carriers).since(before)
    finally:
        for process in (*callers, listener):
            _end(process)


def _result(process: subprocess.Popen[bytes], seconds: float) -> dict[str, float]:
    try:
        out, errors = process.communicate(timeout=seconds + _PATIENCE)
    except subprocess.TimeoutExpired:
        raise RouteFailed(f"{process.args!r} did not end") from None
    if process.returncode:
        raise RouteFailed(errors.decode(errors="replace").strip() or f"exit code {process.returncode}")
    answer: dict[str, Any] = json.loads(out.splitlines()[-1])
    return {name: float(value) for name, value in answer.items()}


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
    for stream in (process.stdout, process.stderr):
        if stream:
            stream.close()


def start(program: str, namespace: Namespace, *arguments: str) -> subprocess.Popen[bytes]:
    """A traffic program for whoever joins more of them than two; see ``traffic.c`` for its arguments."""
    return namespace.start([program, *arguments])


def finish(process: subprocess.Popen[bytes], seconds: float) -> dict[str, float]:
    """What it reports in the end. Raises RouteFailed."""
    try:
        return _result(process, seconds)
    finally:
        _end(process)
