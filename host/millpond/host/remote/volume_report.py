# SPDX-License-Identifier: Apache-2.0
"""Edge (a socket): what there is to tell of a device's volume, by its server and this host's mounts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from millpond.base.deadline import Deadline
from millpond.base.text import LONGEST
from millpond.fs.client.metrics import MountStats, answered_here
from millpond.fs.client.remote_fs import RemoteFs
from millpond.fs.mount.stats_socket import read_stats
from millpond.fs.proto.status import GetStatus, StatusIs
from millpond.fs.vfs.latencies import percentile
from millpond.fs.vfs.path_adapter import PathAdapter
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.records.volume import Checked, Latency, MountInfo, OperationCount, VolumeReport
from millpond.host.remote.volume_check import TreeWalk, check_status, probe
from millpond.wire.channel import Channel
from millpond.wire.texts import cleaned

_DIAL_SECONDS = 10.0
_COUNT_SECONDS = 300.0  # a large tree on slow flash
_LOG_LINES = 1000
_MOUNTED = "the volume is mounted at "


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
        dirty=numbers.dirty,
        latencies=latencies,
        operations={name: _operation(numbers, name) for name in sorted(numbers.operations)},
    )


def _operation(numbers: MountStats, name: str) -> OperationCount:
    took = numbers.operations[name]
    figures = (percentile(took, share) for share in (0.5, 0.99, 1.0))
    return OperationCount(sum(took), numbers.errors.get(name, {}), *figures)
