# SPDX-License-Identifier: Apache-2.0
"""Pure: the reports on a device's volume."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.fs.proto.status import StatusIs
from millpond.wire.control_messages import AtRest


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
    used, ``dirty`` those written that the device lacks. ``operations`` are by name, as programs see them.
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
