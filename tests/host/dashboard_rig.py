# SPDX-License-Identifier: Apache-2.0
"""A dashboard in this process, served on loopback, of a daemon whose jobs train nothing."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from urllib.parse import urlencode

import pytest

from millpond.host.api.daemon import TunnelInfo
from millpond.host.monitor.dashboard import main
from millpond.host.monitor.dashboard.access import Access, Role
from millpond.host.monitor.dashboard.server import Dashboard
from millpond.host.monitor.feed import Feed
from millpond.tunnel.datapath.stats import PacketStats
from millpond.wire.audit_log import Event, InForce, LogHead, digest_of, encode
from millpond.wire.control_messages import (
    AuditEntries,
    AuditHead,
    GetAuditEntries,
    GetAuditHead,
    GetLedger,
    Ledger,
    Log,
    LogPosition,
)

from ..waiting import eventually
from .daemon_rig import Rig

COOKIE = "millpond-test"
SECONDS = 20.0


class Answer(NamedTuple):
    """An answer of the dashboard."""

    status: int
    headers: dict[str, str]
    text: str


@dataclass
class Served:
    """A dashboard that runs, and what a browser with a ``role`` does with it."""

    rig: Rig
    feed: Feed
    access: Access
    port: int
    role: Role = Role.VIEW
    lines: dict[str, list[str]] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=lambda: {"parameters": 1_000_000, "metrics": 2000})

    audit: list[str] = field(default_factory=list)

    def note(self, event: Event) -> None:
        """Add an entry to the audit log of all devices."""
        head = LogHead(len(self.audit), digest_of(self.audit[-1])) if self.audit else LogHead()
        self.audit.append(encode(head, 1e9 + len(self.audit), event))

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def ask(
        self, path: str, *, method: str = "GET", form: dict[str, str] | None = None, **headers: str | None
    ) -> Answer:
        """Ask as a browser on the dashboard's own page, with other ``headers`` where they are given."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        with contextlib.closing(connection):
            connection.request(
                method, path, urlencode(form) if form else None, self._headers(headers, method)
            )
            found = connection.getresponse()
            head = {name.lower(): value for name, value in found.getheaders()}
            return Answer(found.status, head, found.read().decode())

    def _headers(self, given: dict[str, str | None], method: str = "GET") -> dict[str, str]:
        usual = {"Cookie": f"{COOKIE}={self.access.sessions[self.role]}", "Host": self.host}
        if method == "POST":
            usual["Origin"] = f"http://{self.host}"
        named = {name.replace("_", "-"): value for name, value in given.items()}
        return {name: value for name, value in {**usual, **named}.items() if value is not None}

    @contextlib.contextmanager
    def live(self, path: str) -> Iterator[Iterator[dict[str, Any]]]:
        """Follow the events of a page."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        with contextlib.closing(connection):
            connection.request("GET", f"/live{path}", None, self._headers({}))
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            yield (json.loads(line.removeprefix(b"data: ")) for line in answer if line.strip())


def part(events: Iterator[dict[str, Any]], name: str, text: str) -> str:
    """Return a part of a page from the first event in which it has a text."""
    for event in events:
        if text in str(event.get(name, "")):
            return str(event[name])
    raise AssertionError(f"the page has ended without '{text}' in {name}")


def _furnish(served: Served, name: str) -> None:
    """Give a stand-in for a device a tunnel, a ledger and a log."""
    device = cast(Any, served.rig.devices[name])
    counts = PacketStats(packets=3, bytes=4500)
    served.lines[name] = ["begun"]
    device.tunnel = lambda: TunnelInfo(name, "up", "", 1.0, 1, 65520, 32, 0, "C", "on", 0, counts, counts)

    def call(request: object, _reply: object, _deadline: object) -> object:
        if isinstance(request, GetLedger):
            return Ledger(dict(served.sent), {"canary": 0}, 4096, {"nodes": 5000})
        if isinstance(request, GetAuditHead):
            return AuditHead(1, len(served.audit), digest_of(served.audit[-1]), "")
        if isinstance(request, GetAuditEntries):
            return AuditEntries(tuple(served.audit[request.first - 1 :]))
        lines = served.lines[name]
        after = getattr(request, "after", None)
        return Log(tuple(lines[after.number if after else 0 :]), LogPosition("boot", len(lines)))

    device.control = lambda _deadline: contextlib.nullcontext(SimpleNamespace(call=call))


@contextlib.contextmanager
def serving(rig: Rig) -> Iterator[Served]:
    """Serve the dashboard of a rig's fleet, with both roles."""
    with main.listen("127.0.0.1", 0) as sock, Feed(rig.directory, period=0.1) as feed:
        port = sock.getsockname()[1]
        access = Access.fresh((f"http://127.0.0.1:{port}", f"http://localhost:{port}"), control=True)
        server = main.WebServer(Dashboard(feed, "rig", access, COOKIE))
        thread = threading.Thread(target=server.run, args=([sock],), name="dashboard")
        thread.start()
        try:
            served = Served(rig, feed, access, port)
            served.note(InForce("", "0" * 64, {"least_samples": 8, "code": "any"}))
            for name in rig.devices:
                _furnish(served, name)
            eventually(lambda: server.started and feed.snapshot.at, "a dashboard that answers")
            yield served
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture
def served(rig: Rig) -> Iterator[Served]:
    """A dashboard of three devices, asked with the rights to look."""
    with serving(rig) as found:
        yield found
