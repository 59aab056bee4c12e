# SPDX-License-Identifier: Apache-2.0
"""Entry: the commands that show the fleet and its links: 'devices', 'topology' and 'tunnel'."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Annotated, NoReturn

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from millpond.base.schema import dump
from millpond.host.api.daemon import TunnelInfo
from millpond.host.cli.options import (
    DEFAULT_FLEET,
    DeviceArgument,
    FleetOption,
    FormatOption,
    new_app,
)
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.remote.doctor import device_checks
from millpond.host.terminal import printing, tables
from millpond.host.terminal.printing import Format, size
from millpond.host.terminal.progress_lines import waiting
from millpond.host.terminal.tables import state
from millpond.tunnel.datapath.stats import PacketStats
from millpond.tunnel.ring.link_params import CSUM, TSO4, TSO6

app = new_app()
INTERVAL_SECONDS = 1.0
_DROPS = ("malformed", "foreign_source", "foreign_destination", "refused")
_OFFLOADS = {CSUM: "checksums", TSO4: "TSO", TSO6: "TSO6"}


@app.command()
def devices(
    fleet_directory: FleetOption = DEFAULT_FLEET,
    ledger: Annotated[
        bool, typer.Option("--ledger", help="Show instead how many bytes of each kind have left each device.")
    ] = False,
    output: FormatOption = Format.TEXT,
) -> None:
    """List the devices: state, load and traffic."""
    with DaemonClient(fleet_directory) as client:
        if ledger:
            with waiting("devices", "tell their ledgers", shows=output is Format.TEXT):
                names, ledgers = [info.name for info in client.devices()], client.ledgers()
            printing.show(output, ledgers, lambda: tables.ledgers(ledgers, names))
            return
        found = client.overview()
    printing.show(output, found, lambda: tables.devices(found.devices, tables.console().width))
    if output is Format.TEXT:
        for line in (*device_checks.concerns(found.devices), *found.warnings):
            tables.console().print(line, soft_wrap=True)


@app.command()
def topology(
    fleet_directory: FleetOption = DEFAULT_FLEET,
    explain: Annotated[
        bool, typer.Option("--explain", help="Run each topology, and show its time beside the prediction.")
    ] = False,
    values: Annotated[int, typer.Option(min=1, help="The number of values of the model.")] = 1_000_000,
    root: Annotated[str, typer.Option(help="The device that adds: the root.")] = "",
    repeats: Annotated[int, typer.Option(min=1, max=100, help="How often each topology is run.")] = 5,
    output: FormatOption = Format.TEXT,
) -> None:
    """Measure the links between devices, and compare topologies.

    For each topology it predicts the time of adding the devices' updates.
    """
    from millpond.host.terminal import topology_table

    shows = output is Format.TEXT
    with DaemonClient(fleet_directory) as client, waiting("topology", "measures the links", shows=shows):
        found = client.topology(values, root, repeats if explain else 0)
    printing.show(output, found, lambda: topology_table.show(found, values))


@app.command()
def tunnel(
    device: DeviceArgument,
    fleet_directory: FleetOption = DEFAULT_FLEET,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show it again every second, until Ctrl-C.")
    ] = False,
    output: FormatOption = Format.TEXT,
) -> None:
    """Show the tunnel to a device: link, packets, drops, waits."""
    with DaemonClient(fleet_directory) as client:
        if watch:
            _watch(functools.partial(client.tunnel, device), as_json=output is Format.JSON)
        found = client.tunnel(device)
    printing.show(output, found, lambda: show(found))


def show(tunnel: TunnelInfo, before: TunnelInfo | None = None) -> Group:
    """Return the tunnel as a table: totals, or with ``before`` rates per second since then."""
    heading = ["", "packets", "bytes", "notifications", "sleeps", "ring use", "ring full", "dropped"]
    table = tables.figures(*heading)
    pairs = [("to device", tunnel.to_device), ("from device", tunnel.from_device)]
    earlier = (before.to_device, before.from_device) if before else (PacketStats(), PacketStats())
    seconds = max(tunnel.time - before.time, 0.001) if before else 1.0
    for (name, now), then in zip(pairs, earlier, strict=True):
        table.add_row(name, *_cells(now.since(then), seconds, tunnel.depth, rate=before is not None))
    return Group(_summary(tunnel), table)


def _summary(tunnel: TunnelInfo) -> Text:
    line = Text(f"{tunnel.device}: ").append(state(tunnel.state))
    if tunnel.state != "up":
        return line.append(f", {tunnel.reason}; {tunnel.resets} resets")
    offloads = " ".join(name for bit, name in _OFFLOADS.items() if tunnel.offloads & bit) or "none"
    link = f", generation {tunnel.generation}, {tunnel.resets} resets, MTU {tunnel.mtu}"
    line.append(f"{link}, queues of {tunnel.depth}, offloads {offloads}, {tunnel.engine} engine")
    return line.append(f", confinement {tunnel.confinement}")


def _cells(counts: PacketStats, seconds: float, depth: int, *, rate: bool) -> list[str]:
    unit = "/s" if rate else ""
    numbers = [counts.packets, counts.notifications, counts.sleeps, counts.full]
    packets, notifications, sleeps, full = (f"{number / seconds:.0f}{unit}" for number in numbers)
    use = counts.backlog / counts.packets if counts.packets else 0.0
    ring = f"{use:.1f} of {depth - 1}" if counts.backlog else "-"
    causes = [f"{getattr(counts, name)} {name.replace('_', ' ')}" for name in _DROPS if getattr(counts, name)]
    return [
        packets,
        f"{size(counts.bytes / seconds)}{unit}",
        notifications,
        sleeps,
        ring,
        full,
        ", ".join(causes) or "0",
    ]


def _watch(ask: Callable[[], TunnelInfo], *, as_json: bool) -> NoReturn:
    """Print the tunnel every second, until interrupted: rates, or totals as lines of JSON."""
    console, now = tables.console(), ask()
    if as_json:
        while True:
            print(json.dumps(dump(now)), flush=True)
            time.sleep(INTERVAL_SECONDS)
            now = ask()
    with Live(console=console, auto_refresh=False) if console.is_terminal else nullcontext() as live:
        while True:
            time.sleep(INTERVAL_SECONDS)
            before, now = now, ask()
            if live is None:
                console.print(show(now, before))
            else:
                live.update(show(now, before), refresh=True)
