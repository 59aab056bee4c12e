# SPDX-License-Identifier: Apache-2.0
"""Pure: define the messages of a host and an agent about the device itself (over mutual TLS)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from millpond.wire.messages import Kind, Message, message

CONTROL_PORT = 7700
SSH_PORT = 22
SSH_ADMIN_PORT = 2222
JOB_PORTS = range(CONTROL_PORT + 1, 1 << 16)
"""Ports that nodes and data services may have: not the agent's or an SSH server's."""


@message("hello")
class Hello(Message):
    """The host introduces itself; answered by Welcome. ``time`` is in seconds since 1970 by the host's clock,
    0 from a host that does not tell it.
    """

    software: str
    time: float = 0.0


@dataclass(frozen=True, slots=True)
class AtRest:
    """The encryption of the private data on the flash; without a ``cipher``, the ``reason``
    for its absence.
    """

    cipher: str = ""
    reason: str = ""


@message("welcome")
class Welcome(Message):
    """The agent's identity. ``boot`` differs each time the agent starts; ``memory`` and ``flash`` are in
    bytes.
    """

    device: str
    software: str
    boot: str
    machine: str
    cores: int
    memory: int
    flash: int
    at_rest: AtRest = AtRest(reason="the agent does not say")


@message("load.get")
class GetLoad(Message):
    """Ask for the load; answered by Load."""


@dataclass(frozen=True, slots=True)
class DriveHealth:
    """The health of the drive below the flash: ``wear`` is the share of its life that is used, None where the
    drive does not tell it, ``warning`` what it warns of. An emulated device has no drive ("none").
    """

    kind: Literal["emmc", "ufs", "nvme", "none", "unknown"] = "unknown"
    wear: float | None = None
    warning: str = ""


@dataclass(frozen=True, slots=True)
class CohortInForce:
    """The number of ``devices`` for which this one masks its updates, 0 for any: those that it has pinned,
    or those of the newest ``roster`` by its number that its owners have signed, 0 if there is none yet.
    """

    devices: int = 0
    roster: int | None = None


@message("load", Kind.METRICS)
class Load(Message):
    """The load of the device: cpu 0..1, memory and flash used in bytes, degrees Celsius, running jobs.

    ``joules`` is the energy used since its agent was started; ``energy`` names the source of that figure.
    ``fault`` is the reason why the device can run no job now, "" if it can. ``drive`` is the health of its
    drive. ``time`` is in seconds since 1970 by the device's clock. ``budgets`` are private
    folders with the shares of their privacy budgets that are spent. ``cohort`` are the devices for which it
    masks.
    """

    cpu: float
    memory_used: int
    flash_used: int
    temperature: float | None
    jobs: tuple[str, ...]
    joules: float | None = None
    energy: Literal["rapl", "hwmon", "declared", "unknown"] = "unknown"
    fault: str = ""
    drive: DriveHealth = DriveHealth()
    time: float = 0.0
    budgets: tuple[tuple[str, float], ...] = ()
    cohort: CohortInForce = CohortInForce()


@message("roster.set")
class SetRoster(Message):
    """Have the device keep a roster, the ``text`` of a file as ``millpond roster sign`` writes it, for its
    masked exchanges from now on; answered by Ok, or by Failure if no owner of the device has signed it or it
    is not newer than the last.
    """

    text: str


@message("ledger.get")
class GetLedger(Message):
    """Ask for the privacy ledger; answered by Ledger."""


SENDERS: Final[tuple[str, ...]] = ("agent", "volume", "nodes", "streams")
"""The parts of a device that send: its agent, the server of its volume, nodes of reductions, and data
services. The last two also send to other devices."""


@message("ledger", Kind.METRICS)
@dataclass(frozen=True, slots=True)
class Ledger(Message):
    """The privacy ledger: bytes that left the device by kind; sightings of each canary; bytes of private
    files kept; and the bytes again by ``senders``, see SENDERS.
    """

    sent: dict[str, int]
    canaries: dict[str, int]
    private_bytes: int
    senders: dict[str, int] = field(default_factory=dict)


@message("audit.head.get")
class GetAuditHead(Message):
    """Ask for the head of the audit log, signed together with a ``nonce`` of the asker, so that no earlier
    answer can be sent again, or not signed, without a nonce; answered by AuditHead. See
    ``audit_log.is_nonce``.
    """

    nonce: str = ""


@message("audit.head", Kind.METRICS)
class AuditHead(Message):
    """The head of the audit log: the ``number`` of its last entry, and the ``digest`` of its line. The first
    entry is the ``oldest``. Without a ``signature`` the ``reason`` for its absence. See ``wire.audit_log``.
    """

    oldest: int
    number: int
    digest: str
    signature: str
    reason: str = ""


@message("audit.get")
class GetAuditEntries(Message):
    """Ask for entries of the audit log from the ``first`` on; answered by AuditEntries."""

    first: int


@message("audit", Kind.METRICS)
class AuditEntries(Message):
    """Lines of the audit log, in order: as many as a message holds, none behind the last."""

    lines: tuple[str, ...]


@message("ticket.get")
class GetTicket(Message):
    """Ask for a bulk connection to the volume; answered by Ticket. ``tls`` False lets the agent decide."""

    role: Literal["volume"]
    tls: bool = False


@message("ticket")
class Ticket(Message):
    """Entitles to one bulk connection, by Attach, within a minute; encrypted if ``tls``."""

    token: bytes
    tls: bool


@message("attach")
class Attach(Message):
    """First message of a bulk connection; answered by Ok."""

    token: bytes


@dataclass(frozen=True, slots=True)
class LogPosition:
    """A position in a log: behind the first ``number`` lines of a device's agent that was started as
    ``boot``, or bytes of a job's log.
    """

    boot: str
    number: int


@message("log.get")
class GetLog(Message):
    """Ask for the last lines of the agent's own log, never of a job's output; answered by Log.

    With ``after``, ask for all lines since that position that are still kept.
    """

    lines: int
    after: LogPosition | None = None


@message("log")
class Log(Message):
    """Lines of a log, oldest first; the ``position`` is behind the last of them."""

    lines: tuple[str, ...]
    position: LogPosition | None = None
