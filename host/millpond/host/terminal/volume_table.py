# SPDX-License-Identifier: Apache-2.0
"""Edge (the terminal): what ``millpond volume`` shows: a device's volume, this host's mounts, a check."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from millpond.base.text import counted
from millpond.fs.proto.status import StatusIs
from millpond.host.records.volume import Checked, MountInfo, VolumeReport
from millpond.host.terminal.printing import size
from millpond.host.terminal.tables import figures
from millpond.wire.control_messages import AtRest


def show(info: VolumeReport) -> Group:
    """Return the volume's report as tables."""
    parts: list[RenderableType] = [_about(info)]
    if info.status.clients:
        parts += [Text(), _clients(info.status)]
    for mount in info.mounts:
        parts += [Text(), _mount(mount)]
    return Group(*parts)


def show_operations(info: VolumeReport) -> Group:
    """Return the operations of this host's mounts as tables."""
    parts: list[RenderableType] = []
    for mount in info.mounts:
        table = figures("operation", "count", "median", "99 %", "longest", "errors")
        table.columns[-1].justify = "left"
        for name, each in mount.operations.items():
            errors = ", ".join(f"{count} {error}" for error, count in sorted(each.errors.items()))
            durations = map(_duration, (each.median, each.p99, each.longest))
            table.add_row(name, str(each.count), *durations, errors)
        parts += [Text(f"mount {mount.mountpoint}"), table, Text()]
    return Group(*parts or [Text(f"the volume of {info.device} is not mounted on this host")])


def _about(info: VolumeReport) -> Table:
    status, table = info.status, Table(box=None, pad_edge=False, show_header=False)
    used = "not counted"
    if status.used is not None and status.files is not None:
        used = f"{size(status.used)} in {counted(status.files, 'file')}"
    table.add_row("public", f"{used}, {_quota(status)}")
    if info.private_bytes is not None:
        table.add_row("private", f"{size(info.private_bytes)}, {_cipher(info.at_rest)}")
    if info.flash is not None and info.flash_used is not None:
        free = max(0, info.flash - info.flash_used)
        table.add_row("flash", f"{size(free)} of {size(info.flash)} free")
    present = "present" if status.device else "has not reported"
    table.add_row("device's mount", f"{present}{f', {info.how}' if info.how else ''}")
    table.add_row("", f"its kernel writes {counted(status.written, 'file')}")
    table.add_row("server", status.sandbox or "no sandbox is known")
    return table


def _cipher(at_rest: AtRest | None) -> str:
    return f"encrypted ({at_rest.cipher})" if at_rest and at_rest.cipher else "plain"


def _quota(status: StatusIs) -> str:
    if status.quota is None:
        return "no quota"
    return f"{(status.used or 0) / status.quota:.0%} of a quota of {size(status.quota)}"


def _clients(status: StatusIs) -> Table:
    table = figures("client", "connected", "lease", "files kept", "files open")
    for client in status.clients:
        lease = "over" if client.heard is None else f"{client.heard:.1f} of {status.lease:.0f} s"
        connected = "yes" if client.connected else "no"
        table.add_row(str(client.number), connected, lease, str(client.kept), str(client.open))
    return table


def _mount(mount: MountInfo) -> Group:
    about = Table(box=None, pad_edge=False, show_header=False)
    about.add_row("mount", mount.mountpoint)
    about.add_row("", mount.how)
    kept = [f"{name} {here} of {asked}" for name, (here, asked) in mount.kept.items() if asked]
    about.add_row("answered here", ", ".join(kept) or "nothing was asked")
    about.add_row("read ahead", f"{size(mount.ahead)}, {size(mount.ahead_used)} of it used")
    about.add_row("dirty", f"{size(mount.dirty)} of new files are not on the device yet")
    if not mount.latencies:
        return Group(about)
    table = figures("request", "count", "median", "99 %")
    for kind, latency in mount.latencies.items():
        table.add_row(kind, str(latency.requests), _duration(latency.median), _duration(latency.p99))
    return Group(about, table)


def _duration(seconds: float) -> str:
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def lines(checked: Checked) -> list[str]:
    """Return the lines of a check's result for users."""
    at_rest = checked.at_rest
    why = f": {at_rest.reason}" if at_rest and at_rest.reason else ""
    notes = [
        f"server: {checked.sandbox or 'no sandbox is known'}",
        f"private data at rest: {_cipher(at_rest)}{why}",
    ]
    result = f"findings: {len(checked.findings)}" if checked.findings else "clean"
    return [*checked.findings, *notes, f"{checked.device}: {counted(checked.files, 'file')}, {result}"]
