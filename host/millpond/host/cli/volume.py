# SPDX-License-Identifier: Apache-2.0
"""Edge (the terminal): ``millpond volume``: a device's volume, by its server and this host's mounts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from millpond.base.deadline import Deadline
from millpond.base.text import LONGEST
from millpond.fs.client.metrics import MountStats, answered_here
from millpond.fs.client.remote_fs import RemoteFs
from millpond.fs.mount.stats_socket import read_stats
from millpond.fs.proto.status import GetStatus, StatusIs
from millpond.fs.vfs.latencies import percentile
from millpond.fs.vfs.path_adapter import PathAdapter
from millpond.host.client import DaemonClient
from millpond.host.remote.volume_check import TreeWalk, check_status, probe
from millpond.host.terminal.printing import size
from millpond.wire.channel import Channel
from millpond.wire.control_messages import AtRest
from millpond.wire.texts import cleaned

_DIAL_SECONDS = 10.0
_COUNT_SECONDS = 300.0  # a large tree on slow flash
_LOG_LINES = 1000
_MOUNTED = "the volume is mounted at "


@dataclass(frozen=True, slots=True)
class Latency:
    """The latency of one kind of request: its count, and median and 99th percentile in seconds."""

    requests: int
    median: float
    p99: float


@dataclass(frozen=True, slots=True)
class OperationCount:
    """How often programs did one operation, how often it failed by errno, and its latency in seconds, waiting
    included: median, 99th percentile and the largest, to within a half.
    """

    count: int
    errors: dict[str, int]
    median: float
    p99: float
    longest: float


@dataclass(frozen=True, slots=True)
class MountInfo:
    """A mount of this host. ``kept`` has, by kind of request of its kernel, how many were answered without
    the device, and how many there were. ``ahead`` and ``ahead_used`` are bytes read ahead, and those of them
    used; ``dirty`` is always 0, as mounts write through. ``operations`` are by name, as programs see them.
    """

    mountpoint: str
    how: str
    kept: dict[str, tuple[int, int]]
    ahead: int
    ahead_used: int
    dirty: int
    latencies: dict[str, Latency]
    operations: dict[str, OperationCount]


@dataclass(frozen=True, slots=True)
class VolumeReport:
    """A device's volume. ``how`` is the binding of the device's own mount, if its log still has it; ``flash``
    and ``flash_used`` are of the whole flash, in bytes, as the agent reports them.
    """

    device: str
    status: StatusIs
    how: str
    flash: int | None
    flash_used: int | None
    private_bytes: int | None
    at_rest: AtRest | None
    mounts: tuple[MountInfo, ...]


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of a check."""

    device: str
    files: int
    sandbox: str
    at_rest: AtRest | None
    findings: tuple[str, ...]


def ask(fleet: Path, device: str) -> VolumeReport:
    """Return the volume's report now. Raises RemoteError if the device is absent."""
    status = _status(fleet, device, count=False)
    if status.used is None:
        status = _status(fleet, device, count=True)
    with DaemonClient(fleet) as client:
        found = next(info for info in client.devices() if info.name == device)
        ledger = client.ledgers().get(device)
        lines = client.log(device, _LOG_LINES)
        numbers = read_stats(client.fleet.mount_stats, device)
    return VolumeReport(
        device,
        status,
        how_mounted(lines),
        found.welcome.flash if found.welcome else None,
        found.load.flash_used if found.load else None,
        ledger.private_bytes if ledger else None,
        found.welcome.at_rest if found.welcome else None,
        tuple(of_mount(each) for each in numbers),
    )


def check(fleet: Path, device: str) -> Checked:
    """Check the volume's promises, as far as the host can see them."""
    _status(fleet, device, count=True)  # has the server count the files that the device wrote
    status = _status(fleet, device, count=True)
    with _dialled(fleet, device) as channel:
        leaks = probe(channel)
    tree = RemoteFs(lambda deadline: _dial(fleet, device, deadline))
    try:
        walk = TreeWalk(PathAdapter(tree))
        walk.check()
    finally:
        with contextlib.suppress(OSError):
            tree.close()
    with DaemonClient(fleet) as client:
        found = next(info for info in client.devices() if info.name == device)
    findings = [*leaks, *check_status(status), *walk.findings]
    at_rest = found.welcome.at_rest if found.welcome else None
    return Checked(device, walk.files, status.sandbox, at_rest, tuple(map(str, findings)))


def _dial(fleet: Path, device: str, deadline: Deadline) -> Channel:
    with DaemonClient(fleet) as client:
        return client.volume(device, deadline)


def _dialled(fleet: Path, device: str) -> Channel:
    return _dial(fleet, device, Deadline.after(_DIAL_SECONDS))


def _status(fleet: Path, device: str, *, count: bool) -> StatusIs:
    with _dialled(fleet, device) as channel:
        return cleaned(channel.call(GetStatus(count), StatusIs, Deadline.after(_COUNT_SECONDS)), LONGEST)


def how_mounted(lines: Iterable[str]) -> str:
    """Return the binding of the device's own mount from the agent's log; "" if the line is too old."""
    said = [line.partition(_MOUNTED)[2].partition(": ")[2] for line in lines if _MOUNTED in line]
    return said[-1] if said else ""


def of_mount(numbers: MountStats) -> MountInfo:
    """Return the figures of a mount from its statistics."""
    latencies = {
        kind.removeprefix("fs."): Latency(sum(took), percentile(took, 0.5), percentile(took, 0.99))
        for kind, took in sorted(numbers.took.items())
    }
    kept = answered_here(numbers)
    ahead = numbers.ahead, numbers.ahead_used
    return MountInfo(
        numbers.mountpoint,
        numbers.how,
        kept,
        *ahead,
        dirty=0,
        latencies=latencies,
        operations={name: _operation(numbers, name) for name in sorted(numbers.operations)},
    )


def _operation(numbers: MountStats, name: str) -> OperationCount:
    took = numbers.operations[name]
    figures = (percentile(took, share) for share in (0.5, 0.99, 1.0))
    return OperationCount(sum(took), numbers.errors.get(name, {}), *figures)


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
        table = _plain("operation", "count", "median", "99 %", "longest", "errors")
        table.columns[-1].justify = "left"
        for name, each in mount.operations.items():
            errors = ", ".join(f"{count} {error}" for error, count in sorted(each.errors.items()))
            durations = map(_duration, (each.median, each.p99, each.longest))
            table.add_row(name, str(each.count), *durations, errors)
        parts += [Text(f"mount {mount.mountpoint}"), table, Text()]
    return Group(*parts or [Text(f"the volume of {info.device} is not mounted on this host")])


def _plain(*headings: str) -> Table:
    table = Table(*headings, box=None, pad_edge=False, header_style="bold", show_header=bool(headings))
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _about(info: VolumeReport) -> Table:
    status, table = info.status, Table(box=None, pad_edge=False, show_header=False)
    used = "not counted" if status.used is None else f"{size(status.used)} in {status.files} files"
    table.add_row("public", f"{used}, {_quota(status)}")
    if info.private_bytes is not None:
        table.add_row("private", f"{size(info.private_bytes)}, {_cipher(info.at_rest)}")
    if info.flash is not None and info.flash_used is not None:
        free = max(0, info.flash - info.flash_used)
        table.add_row("flash", f"{size(free)} of {size(info.flash)} free")
    present = "present" if status.device else "has not reported"
    table.add_row("device's mount", f"{present}{f', {info.how}' if info.how else ''}")
    table.add_row("", f"its kernel writes {status.written} files")
    table.add_row("server", status.sandbox or "no sandbox is known")
    return table


def _cipher(at_rest: AtRest | None) -> str:
    return f"encrypted ({at_rest.cipher})" if at_rest and at_rest.cipher else "plain"


def _quota(status: StatusIs) -> str:
    if status.quota is None:
        return "no quota"
    return f"{(status.used or 0) / status.quota:.0%} of a quota of {size(status.quota)}"


def _clients(status: StatusIs) -> Table:
    table = _plain("client", "connected", "lease", "files kept", "files open")
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
    about.add_row("dirty", "write-through: nothing")
    if not mount.latencies:
        return Group(about)
    table = _plain("request", "count", "median", "99 %")
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
    return [*checked.findings, *notes, f"{checked.device}: {checked.files} files, {result}"]
