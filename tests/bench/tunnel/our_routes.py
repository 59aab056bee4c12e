# SPDX-License-Identifier: Apache-2.0
"""Edge: millpond's own tunnel, started by its command line as any user can."""

from __future__ import annotations

import functools
import json
import os
import select
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.tunnel.namespace import Namespace
from bench.tunnel.plain_routes import DEVICE, HOST, PREFIX, ends_with, two_namespaces
from bench.tunnel.route import ETHERNET_MTU, MAX_MTU, Candidate, Route, RouteFailed, Tools, Unavailable

_STARTS_WITHIN = 60.0
"""Seconds; 72 ends that start at once on two cores take most of it."""


@dataclass(frozen=True, slots=True)
class End:
    """A running end of a tunnel and its process; ``status`` is where it tells of every change."""

    pid: int
    status: int

    def wait_up(self) -> None:
        """Until it has its peer. Raises Unavailable if it cannot work, RouteFailed if it is too late."""
        deadline = time.monotonic() + _STARTS_WITHIN
        heard = b""
        while b'"up"' not in heard:
            if not select.select([self.status], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise RouteFailed(f"not up within {_STARTS_WITHIN} s: {heard.decode()}")
            text = os.read(self.status, 65536)
            if not text:
                raise Unavailable(_reason(heard))
            heard += text

    def check_steady(self) -> None:
        """Raises RouteFailed if the link was lost since it came up: what was measured then is no one link."""
        while select.select([self.status], [], [], 0)[0]:
            text = os.read(self.status, 65536)
            if not text or b'"down"' in text:
                raise RouteFailed(f"the link was lost: {text.decode(errors='replace').strip()}")


def _reason(heard: bytes) -> str:
    lines = heard.splitlines()
    if lines:
        return str(json.loads(lines[-1]).get("reason", "it ended"))
    return "the tunnel ended without a word"


@dataclass(frozen=True, slots=True)
class Wishes:
    """The variant: which engine, which MTU, which offloads."""

    engine: str
    mtu: int = MAX_MTU
    offload: str = "all"


def start_end(
    tools: Tools, namespace: Namespace, role: str, socket: Path, wishes: Wishes, interface: str, address: str
) -> End:
    """An end that is still on its way up, as a program of its own."""
    reader, writer = os.pipe()
    tools.undo.callback(os.close, reader)
    argv = [sys.executable, "-P", "-m", "millpond.tunnel"]
    argv += arguments(role, socket, wishes, interface, address)
    log = tools.undo.enter_context((tools.scratch / "ends.log").open("ab"))
    process = namespace.start([*argv, "--status-fd", str(writer)], stdout=log, stderr=log, keep=(writer,))
    os.close(writer)
    return End(ends_with(tools, process).pid, reader)


def arguments(role: str, socket: Path, wishes: Wishes, interface: str, address: str) -> list[str]:
    """What the program ``millpond.tunnel`` is told."""
    told = [role, "--socket", str(socket), "--interface", interface, "--address", f"{address}/{PREFIX}"]
    return [*told, "--mtu", str(wishes.mtu), "--engine", wishes.engine, "--offload", wishes.offload]


def _tunnel(wishes: Wishes, tools: Tools) -> Route:
    host, device = two_namespaces(tools)
    socket = tools.scratch / f"millpond-{wishes.engine}-{wishes.mtu}-{wishes.offload}"
    ends = [
        start_end(tools, device, "device", socket, wishes, "pond0", DEVICE),
        start_end(tools, host, "host", socket, wishes, "pond0", HOST),
    ]
    wait_for_all(ends)
    pids = tuple(end.pid for end in ends)
    return Route(host, device, HOST, DEVICE, DEVICE, "pond0", pids, steady=functools.partial(_check, ends))


def wait_for_all(ends: Sequence[End]) -> None:
    """Until each is up. Raises as ``End.wait_up`` does."""
    for end in ends:
        end.wait_up()


def _check(ends: Sequence[End]) -> None:
    for end in ends:
        end.check_steady()


def _variants(engine: str, name: str) -> tuple[Candidate, ...]:
    return tuple(
        Candidate(engine + suffix, f"millpond {name}, {text}", functools.partial(_tunnel, wishes))
        for suffix, text, wishes in (
            ("", "MTU 65520", Wishes(engine)),
            ("_1500", "MTU 1500 GSO", Wishes(engine, ETHERNET_MTU)),
            ("_1500_plain", "MTU 1500", Wishes(engine, ETHERNET_MTU, "none")),
        )
    )


OURS = (*_variants("c", "C"), *_variants("python", "Python"))
