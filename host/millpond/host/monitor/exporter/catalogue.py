# SPDX-License-Identifier: Apache-2.0
"""Pure: the metrics of a fleet for Prometheus: name, kind, labels and meaning of each.

Names follow Prometheus' practice: base units (seconds, bytes, joules, ratios of 1) end a name, and ``_total``
ends that of a counter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple


class Sample(NamedTuple):
    """The value of a metric for some values of its labels."""

    metric: Metric
    labels: tuple[str, ...]
    value: float


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric; ``labels`` are the names of its labels."""

    name: str
    kind: Literal["gauge", "counter"]
    labels: tuple[str, ...]
    about: str

    def of(self, value: float, *labels: str) -> Sample:
        """Return a sample of this metric."""
        return Sample(self, labels, value)


METRICS: Final[dict[str, Metric]] = {}
"""All metrics by name, in the order of the documents."""


def _gauge(name: str, about: str, *labels: str) -> Metric:
    return METRICS.setdefault(name, Metric(f"millpond_{name}", "gauge", labels, about))


def _counter(name: str, about: str, *labels: str) -> Metric:
    return METRICS.setdefault(name, Metric(f"millpond_{name}", "counter", labels, about))


UP = _gauge("up", "Whether the host daemon answered: 1 or 0; without it there are no other metrics.")
DAEMON_SECONDS = _gauge("daemon_answer_seconds", "Seconds that the host daemon took to answer this scrape.")
WARNINGS = _gauge("fleet_warnings", "Warnings of the fleet, such as certificates that end soon.")
DETAILS_TIME = _gauge(
    "details_timestamp_seconds",
    "Unix time at which the ledgers, tunnels and volumes were last read; the scrape before starts that.",
)

DEVICE_INFO = _gauge(
    "device_info", "A device of the fleet: always 1.", "device", "board", "software", "machine", "at_rest"
)
DEVICE_STATE = _gauge(
    "device_state", "1 for the state of a device now, 0 for each other state.", "device", "state"
)
CORES = _gauge("device_cores", "Processor cores of a device.", "device")
CPU = _gauge("device_cpu_usage_ratio", "Share of its processor that a device uses, 0 to 1.", "device")
MEMORY = _gauge("device_memory_bytes", "Memory of a device.", "device")
MEMORY_USED = _gauge("device_memory_used_bytes", "Memory of a device that is in use.", "device")
FLASH = _gauge("device_flash_bytes", "Size of a device's flash.", "device")
FLASH_USED = _gauge("device_flash_used_bytes", "Bytes of a device's flash that are in use.", "device")
TEMPERATURE = _gauge("device_temperature_celsius", "Temperature of a device with a sensor.", "device")
DEVICE_JOBS = _gauge("device_jobs", "Jobs that run on a device.", "device")
POWER = _gauge("device_power_watts", "Recent power of a device that knows its energy.", "device")
ENERGY = _counter(
    "device_energy_joules_total", "Energy that a device used since its agent was started.", "device", "source"
)
WEAR = _gauge("device_drive_wear_ratio", "Share of its life that a device's drive has used.", "device")
DRIVE_WARNING = _gauge(
    "device_drive_warning", "Whether a device's drive warns of its health: 1 or 0.", "device"
)
SENT = _counter(
    "device_sent_bytes_total", "Bytes that have left a device, by kind: its privacy ledger.", "device", "kind"
)
SENDERS = _counter(
    "device_sender_bytes_total",
    "The bytes of a device's ledger by the part that sent them: agent, volume, nodes of reductions, streams; "
    "nodes and streams also send to other devices.",
    "device",
    "sender",
)
CANARIES = _counter(
    "device_canary_sightings_total",
    "Canaries and tracers of private data seen in what left a device.",
    "device",
)
PRIVATE = _gauge("device_private_bytes", "Bytes of private files on a device.", "device")

TUNNEL_UP = _gauge("tunnel_up", "Whether the tunnel to a device is up: 1 or 0.", "device")
TUNNEL_RESETS = _counter("tunnel_resets_total", "Resets of a device's tunnel.", "device")
TUNNEL_BYTES = _counter(
    "tunnel_bytes_total", "Bytes that crossed a tunnel, with headers.", "device", "direction"
)
TUNNEL_PACKETS = _counter("tunnel_packets_total", "Packets that crossed a tunnel.", "device", "direction")
TUNNEL_DROPPED = _counter(
    "tunnel_dropped_packets_total", "Packets that a tunnel dropped, for any cause.", "device", "direction"
)
TUNNEL_FULL = _counter("tunnel_ring_full_total", "Waits for a free entry of a ring.", "device", "direction")
TUNNEL_WAKES = _counter("tunnel_notifications_total", "Wake-ups sent to the peer.", "device", "direction")

VOLUME_QUOTA = _gauge("volume_quota_bytes", "Quota of a volume's public part, where it has one.", "device")
VOLUME_USED = _gauge(
    "volume_used_bytes", "Bytes of a volume's public part, where they are counted.", "device"
)
VOLUME_FILES = _gauge("volume_files", "Files of a volume's public part, where they are counted.", "device")
VOLUME_CLIENTS = _gauge("volume_clients", "Clients that are connected to a volume's server.", "device")
VOLUME_KEPT = _gauge(
    "volume_delegated_files", "Files of which clients of a volume hold delegations.", "device"
)
MOUNTS = _gauge("mounts", "Mounts of a device's volume on this host.", "device")
MOUNT_OPERATIONS = _counter(
    "mount_operations_total", "Operations of programs on this host's live mounts.", "device", "operation"
)
MOUNT_ERRORS = _counter(
    "mount_errors_total",
    "Operations of programs on this host's live mounts that failed.",
    "device",
    "operation",
)
MOUNT_REQUESTS = _counter(
    "mount_requests_total",
    "Requests of the kernel to this host's live mounts, by who answered: the mount itself or the device.",
    "device",
    "request",
    "answered_by",
)
MOUNT_AHEAD = _counter(
    "mount_read_ahead_bytes_total", "Bytes that this host's live mounts read ahead.", "device"
)
MOUNT_AHEAD_USED = _counter(
    "mount_read_ahead_used_bytes_total", "Bytes read ahead that programs have read.", "device"
)
MOUNT_DIRTY = _gauge(
    "mount_dirty_bytes", "Bytes written on mounts that the device does not have yet.", "device"
)

JOBS = _gauge("jobs", "Jobs among the newest that are listed, by state.", "state")
JOB_INFO = _gauge("job_info", "A job: always 1.", "job_id", "name", "metric", "unit")
JOB_STATE = _gauge("job_state", "1 for the state of a job now, 0 for each other state.", "job_id", "state")
JOB_CREATED = _gauge("job_created_timestamp_seconds", "Unix time at which a job was submitted.", "job_id")
JOB_ENDED = _gauge("job_ended_timestamp_seconds", "Unix time at which a job ended.", "job_id")
JOB_PLANNED = _gauge("job_planned_rounds", "Rounds (or epochs) that a job has at most.", "job_id")
JOB_ROUNDS = _counter("job_rounds_total", "Rounds (or epochs) that a job has finished.", "job_id")
JOB_BEST = _gauge("job_best_score", "Best value of a job's deciding metric.", "job_id")
JOB_SCORE = _gauge(
    "job_score",
    'Last value of a figure of a job; place: "host", "devices" or "train".',
    "job_id",
    "place",
    "figure",
)
JOB_WAITING = _gauge(
    "job_data_wait_ratio",
    "Share of its time in which a worker waited for data, last rounds.",
    "job_id",
    "worker",
)
JOB_SECONDS = _counter("job_round_seconds_total", "Seconds of a job's finished rounds.", "job_id")
JOB_LAST_SECONDS = _gauge("job_last_round_seconds", "Seconds of a job's last round.", "job_id")
JOB_SAMPLES = _counter("job_samples_total", "Samples that a worker trained on in a job.", "job_id", "worker")
JOB_SHARE = _gauge(
    "job_worker_share_ratio",
    "Share of the samples of the last round that a worker took (balance).",
    "job_id",
    "worker",
)
JOB_MISSING = _counter("job_missed_rounds_total", "Rounds that went without a worker.", "job_id", "worker")
JOB_BYTES = _counter(
    "job_tunnel_bytes_total",
    "Bytes that crossed a tunnel in a job's rounds.",
    "job_id",
    "device",
    "direction",
)
JOB_ENERGY = _counter("job_energy_joules_total", "Energy of a worker in a job's rounds.", "job_id", "worker")
JOB_EVENTS = _counter("job_events_total", "Events of a job: plan, joined, lost, server.", "job_id", "kind")
