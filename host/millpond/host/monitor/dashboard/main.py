# SPDX-License-Identifier: Apache-2.0
"""Edge (a process): listens, prints the URLs of the dashboard, and serves it until a signal."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import uvicorn

from millpond.base.errors import LocalError
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.monitor.dashboard.access import Access, Role
from millpond.host.monitor.dashboard.server import Dashboard
from millpond.host.monitor.feed import Feed

END_SECONDS: Final = 3
START_SECONDS: Final = 5.0
IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
"""Time in which answers end that are under way; open pages are cut off."""


def run(fleet: Path, address: str, port: int, url: str, *, control: bool) -> None:
    """Serve the fleet's dashboard. Raises LocalError where no daemon runs, and for a wrong address or URL."""
    with DaemonClient(fleet) as client:
        name = client.fleet.config.name
    with listen(address, port) as server, Feed(fleet) as feed:
        feed.wait(0, START_SECONDS)  # pages of devices are not refused in the first second
        ip, port = _ip(address), server.getsockname()[1]
        urls = _urls(ip, port, url)
        access = Access.fresh(urls, control=control)
        for role, token in access.tokens.items():
            does = "shows the fleet" if role is Role.VIEW else "also stops, resumes and prunes jobs"
            print(f"{urls[0]}/?token={token}  {does}", flush=True)
        if not ip.is_loopback:
            print("what the dashboard sends is not encrypted: let a proxy do that", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            WebServer(Dashboard(feed, name, access, f"millpond-{port}")).run(sockets=[server])


class WebServer(uvicorn.Server):
    """Serves a dashboard until a signal. It logs no requests: URLs may have tokens."""

    def __init__(self, dashboard: Dashboard) -> None:
        config = uvicorn.Config(
            dashboard.asgi,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            timeout_graceful_shutdown=END_SECONDS,
        )
        super().__init__(config)
        self._dashboard = dashboard

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End all answers, those too that would go on."""
        self._dashboard.end()
        await super().shutdown(sockets)


def _urls(ip: IpAddress, port: int, behind: str) -> tuple[str, ...]:
    """Return the URLs by which a browser may know the dashboard, first that which a person is told."""
    name = f"[{ip}]" if ip.version == 6 else str(ip)
    own = ("localhost",) if ip.is_unspecified else (name, "localhost")
    return (*([_checked(behind)] if behind else ()), *(f"http://{each}:{port}" for each in own))


def _ip(address: str) -> IpAddress:
    try:
        return ipaddress.ip_address(address)
    except ValueError:
        raise LocalError(f"'{address}' is no IP address, such as 127.0.0.1") from None


def _checked(url: str) -> str:
    found = urlsplit(url)
    if found.scheme not in ("http", "https") or not found.hostname or found.path.strip("/") or found.query:
        raise LocalError(f"--url: '{url}' is no URL such as https://fleet.example")
    return url.rstrip("/")


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens at an IP address. Raises LocalError."""
    ip = _ip(address)
    try:
        family = socket.AF_INET6 if ip.version == 6 else socket.AF_INET
        return socket.create_server((str(ip), port), family=family)
    except OSError as error:
        raise LocalError(f"{ip}, port {port}: {error.strerror}: choose another one by --port") from None
