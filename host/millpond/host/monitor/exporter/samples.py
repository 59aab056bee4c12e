# SPDX-License-Identifier: Apache-2.0
"""Pure: a fleet's figures as samples of the metrics, bounded by its devices and the jobs that are shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from millpond.fs.client.metrics import MountStats, answered_here
from millpond.fs.proto.status import StatusIs
from millpond.host.api.daemon import DeviceInfo, Devices, JobInfo, TunnelInfo
from millpond.host.fleet.lifecycle import DeviceState
from millpond.host.monitor.exporter import catalogue as metrics
from millpond.host.monitor.exporter.catalogue import Sample
from millpond.host.records.job_totals import JobTotals
from millpond.host.records.jobs import JobState
from millpond.tunnel.datapath.stats import PacketStats
from millpond.wire.control_messages import Ledger, Load
from millpond.wire.messages import Kind


@dataclass(frozen=True, slots=True)
class FleetDetails:
    """Figures by device that take the daemon longer to tell, read at a ``time`` (Unix seconds): what left it,
    its tunnel and its volume; ``mounts`` are those of this host.
    """

    time: float
    ledgers: Mapping[str, Ledger] = field(default_factory=dict)
    tunnels: Mapping[str, TunnelInfo] = field(default_factory=dict)
    volumes: Mapping[str, StatusIs] = field(default_factory=dict)
    mounts: Sequence[MountStats] = ()


@dataclass(frozen=True, slots=True)
class FleetReading:
    """All that a scrape shows: the devices and the newest jobs as the daemon told them in ``seconds``, the
    totals of those jobs that are ``shown``, by number, and the details, None before the first.
    """

    seconds: float
    fleet: Devices
    jobs: Sequence[JobInfo]
    shown: Mapping[int, JobTotals]
    details: FleetDetails | None = None


def samples_of(reading: FleetReading | None) -> Iterator[Sample]:
    """Yield all samples of a reading; without one the daemon is down, which is a sample, too."""
    yield metrics.UP.of(reading is not None)
    if reading is None:
        return
    yield metrics.DAEMON_SECONDS.of(reading.seconds)
    yield metrics.WARNINGS.of(len(reading.fleet.warnings))
    for info in reading.fleet.devices:
        yield from _device(info)
    if reading.details:
        yield from _details(reading.details)
    states = Counter(job.state for job in reading.jobs)
    for state in JobState:
        yield metrics.JOBS.of(states[state], state)
    for job in reading.jobs:
        if job.id in reading.shown:
            yield from _job(job)
            yield from _totals(str(job.id), reading.shown[job.id])


def _device(info: DeviceInfo) -> Iterator[Sample]:
    name, welcome = info.name, info.welcome
    for state in DeviceState:
        yield metrics.DEVICE_STATE.of(info.state == state, name, state)
    if welcome:
        about = (info.board, welcome.software, welcome.machine, welcome.at_rest.cipher or "plain")
        yield metrics.DEVICE_INFO.of(1, name, *about)
        yield metrics.CORES.of(welcome.cores, name)
        yield metrics.MEMORY.of(welcome.memory, name)
        yield metrics.FLASH.of(welcome.flash, name)
    if info.watts is not None:
        yield metrics.POWER.of(info.watts, name)
    if info.load:
        yield from _load(name, info.load)


def _load(name: str, load: Load) -> Iterator[Sample]:
    yield metrics.CPU.of(load.cpu, name)
    yield metrics.MEMORY_USED.of(load.memory_used, name)
    yield metrics.FLASH_USED.of(load.flash_used, name)
    yield metrics.DEVICE_JOBS.of(len(load.jobs), name)
    yield metrics.DRIVE_WARNING.of(bool(load.drive.warning), name)
    if load.temperature is not None:
        yield metrics.TEMPERATURE.of(load.temperature, name)
    if load.joules is not None:
        yield metrics.ENERGY.of(load.joules, name, load.energy)
    if load.drive.wear is not None:
        yield metrics.WEAR.of(load.drive.wear, name)


def _details(found: FleetDetails) -> Iterator[Sample]:
    yield metrics.DETAILS_TIME.of(found.time)
    for name, ledger in found.ledgers.items():
        for kind in Kind:  # no other: a device could make as many series as it names kinds
            if kind in ledger.sent:
                yield metrics.SENT.of(ledger.sent[kind], name, kind)
        for sender, count in ledger.senders.items():
            yield metrics.SENDERS.of(count, name, sender)
        yield metrics.CANARIES.of(sum(ledger.canaries.values()), name)
        yield metrics.PRIVATE.of(ledger.private_bytes, name)
    for name, tunnel in found.tunnels.items():
        yield metrics.TUNNEL_UP.of(tunnel.state == "up", name)
        yield metrics.TUNNEL_RESETS.of(tunnel.resets, name)
        yield from _direction(tunnel.to_device, name, "to_device")
        yield from _direction(tunnel.from_device, name, "from_device")
    for name, status in found.volumes.items():
        yield from _volume(name, status)
    yield from _mounts(found.mounts)


def _direction(stats: PacketStats, *labels: str) -> Iterator[Sample]:
    yield metrics.TUNNEL_BYTES.of(stats.bytes, *labels)
    yield metrics.TUNNEL_PACKETS.of(stats.packets, *labels)
    yield metrics.TUNNEL_DROPPED.of(stats.dropped, *labels)
    yield metrics.TUNNEL_FULL.of(stats.full, *labels)
    yield metrics.TUNNEL_WAKES.of(stats.notifications, *labels)


def _volume(name: str, status: StatusIs) -> Iterator[Sample]:
    counted = {
        metrics.VOLUME_QUOTA: status.quota,
        metrics.VOLUME_USED: status.used,
        metrics.VOLUME_FILES: status.files,
    }
    for metric, value in counted.items():
        if value is not None:
            yield metric.of(value, name)
    yield metrics.VOLUME_CLIENTS.of(sum(client.connected for client in status.clients), name)
    yield metrics.VOLUME_KEPT.of(sum(client.kept for client in status.clients), name)


def _mounts(mounts: Sequence[MountStats]) -> Iterator[Sample]:
    """Yield the figures of all mounts of each device together."""
    operations, errors = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    requests = Counter[tuple[str, str, str]]()
    by_device = {
        metrics.MOUNT_DIRTY: Counter[str](),
        metrics.MOUNT_AHEAD: Counter[str](),
        metrics.MOUNT_AHEAD_USED: Counter[str](),
    }
    for each in mounts:
        for found, value in zip(by_device.values(), (each.dirty, each.ahead, each.ahead_used), strict=True):
            found[each.device] += value
        for name, (here, asked) in answered_here(each).items():
            requests[each.device, name, "mount"] += here
            requests[each.device, name, "device"] += asked - here
        operations.update({(each.device, name): sum(took) for name, took in each.operations.items()})
        errors.update({(each.device, name): sum(own.values()) for name, own in each.errors.items()})
    for device, count in Counter(each.device for each in mounts).items():
        yield metrics.MOUNTS.of(count, device)
        for metric, found in by_device.items():
            yield metric.of(found[device], device)
    for labels, count in operations.items():
        yield metrics.MOUNT_OPERATIONS.of(count, *labels)
        yield metrics.MOUNT_ERRORS.of(errors[labels], *labels)
    for served, count in requests.items():
        yield metrics.MOUNT_REQUESTS.of(count, *served)


def _job(info: JobInfo) -> Iterator[Sample]:
    job = str(info.id)
    yield metrics.JOB_INFO.of(1, job, info.name, info.metric, info.unit)
    for state in JobState:
        yield metrics.JOB_STATE.of(info.state == state, job, state)
    yield metrics.JOB_CREATED.of(info.created, job)
    if info.ended is not None:
        yield metrics.JOB_ENDED.of(info.ended, job)
    yield metrics.JOB_PLANNED.of(info.rounds, job)
    yield metrics.JOB_ROUNDS.of(info.round, job)
    if info.best is not None:
        yield metrics.JOB_BEST.of(info.best, job)
    for worker, share in info.waits.items():
        yield metrics.JOB_WAITING.of(share, job, worker)


def _totals(job: str, totals: JobTotals) -> Iterator[Sample]:
    yield metrics.JOB_SECONDS.of(totals.seconds, job)
    by_worker = {
        metrics.JOB_SAMPLES: totals.samples,
        metrics.JOB_MISSING: totals.missing,
        metrics.JOB_ENERGY: totals.joules,
        metrics.JOB_EVENTS: totals.events,
    }
    for metric, found in by_worker.items():
        for label, value in found.items():
            yield metric.of(value, job, label)
    for device, size in totals.to.items():
        yield metrics.JOB_BYTES.of(size, job, device, "to_device")
        yield metrics.JOB_BYTES.of(totals.back[device], job, device, "from_device")
    for (place, name), value in totals.figures.items():
        yield metrics.JOB_SCORE.of(value, job, place, name)
    if last := totals.last:
        yield metrics.JOB_LAST_SECONDS.of(last.seconds, job)
        for worker, count in last.workers.items():
            yield metrics.JOB_SHARE.of(count / max(last.samples, 1), job, worker)
