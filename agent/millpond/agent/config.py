# SPDX-License-Identifier: Apache-2.0
"""Edge: the agent's configuration, one TOML file."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from millpond.agent.policy.settings import Policy, check_policy
from millpond.base import toml
from millpond.base.errors import ConfigError, LocalError
from millpond.base.keys import Key
from millpond.base.sizes import bytes_of
from millpond.energy import joules
from millpond.energy.joules import Watts
from millpond.fs.store.layout import PRIVATE
from millpond.linux.limits.process_limits import PROCESSES, memory_for_jobs


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """The device's end of the tunnel. It has either a ``socket`` or an ``ivshmem``."""

    address: Annotated[str, Key("the address of the device's end, with the prefix length")]
    socket: Annotated[str, Key("a Unix socket on which the device listens; the host can reach its path")] = ""
    ivshmem: Annotated[
        str, Key('the PCI address of the memory shared with the host; "pci": the only such device')
    ] = ""
    interface: Annotated[str, Key("the name of the network interface")] = "mp0"
    mtu: Annotated[int, Key("the largest packet, in bytes")] = 65520
    peers: Annotated[
        str, Key("the network that launched scripts may reach: the fleet's; empty: only the host")
    ] = ""
    confinement: Annotated[
        Literal["required", "best-effort"],
        Key('"best-effort" runs the tunnel even if the kernel cannot confine its pumps'),
    ] = "required"

    @property
    def transport(self) -> Literal["socket", "ivshmem"]:
        """Return which of the two transports is configured."""
        return "ivshmem" if self.ivshmem else "socket"


@dataclass(frozen=True, slots=True)
class Privacy:
    """The patterns that the gate looks for, and the settings that protect private data."""

    canaries: Annotated[
        dict[str, str],
        Key("texts, or bytes as `hex:...`, that must never leave; a connection that would carry one is cut"),
    ] = field(default_factory=dict)
    tracers: Annotated[
        dict[str, str], Key("texts, or bytes as `hex:...`, that may leave; the gate counts them")
    ] = field(default_factory=dict)
    errors: Annotated[
        Literal["location", "full"],
        Key('what leaves of a job\'s exception: "location": type and place; "full": its message, too'),
    ] = "location"
    encrypt: Annotated[
        Literal["auto", "always"],
        Key('when bulk connections need TLS: "always", or ("auto") if the link leaves the box'),
    ] = "auto"
    launch: Annotated[
        Literal["public", "private"],
        Key('"private" shows the private part to launched scripts, which have a network'),
    ] = "public"
    at_rest: Annotated[
        Literal["auto", "required", "off"],
        Key(
            'encryption of the private part on the flash: "auto": if it is possible; "required": else the '
            'agent does not start; "off": a new private part is not encrypted'
        ),
    ] = "auto"
    landlock: Annotated[
        Literal["required", "best-effort"],
        Key('"best-effort" serves the volume even if the kernel cannot restrict its server by Landlock'),
    ] = "required"


@dataclass(frozen=True, slots=True)
class Users:
    """The uids of the agent's processes."""

    volume: Annotated[int, Key("uid of the volume's server")] = 64001
    worker: Annotated[int, Key("uid of job workers")] = 64002
    launch: Annotated[int, Key("uid of launched scripts")] = 64004
    node: Annotated[int, Key("uid of reduction nodes")] = 64005
    data: Annotated[int, Key("uid of data services")] = 64006


@dataclass(frozen=True, slots=True)
class Tier:
    """The fast tier, which holds mini-epochs of a job's private data."""

    fast: Annotated[str, Key('the most memory of the two mini-epochs of a job, such as "8 GiB"')] = "1 GiB"


@dataclass(frozen=True, slots=True)
class JobLimits:
    """Limits of the processes of one job."""

    memory: Annotated[
        str, Key('the most memory of all its processes, such as "6 GiB"; "": what the device can spare')
    ] = ""
    processes: Annotated[int, Key("the most processes and threads together", 16)] = PROCESSES

    @property
    def memory_bytes(self) -> int:
        """The bytes of memory."""
        return bytes_of(self.memory) if self.memory else memory_for_jobs()


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """The agent's configuration. Paths are absolute. ``watts`` are for a board without a power sensor."""

    name: Annotated[str, Key("the device's name, as in its certificate")]
    link: LinkConfig
    lan: Annotated[
        str, Key("the device's address, with the prefix length, on the devices' own LAN; empty: no LAN")
    ] = ""
    flash: Annotated[str, Key("the file system of the flash, with the folders `public` and `private`")] = (
        "/flash"
    )
    volume: Annotated[str, Key("where the volume is mounted")] = "/volume"
    state: Annotated[str, Key("the directory of the agent's own state, which survives updates")] = (
        "/var/lib/millpond"
    )
    identity: Annotated[str, Key("the directory of the device's certificate and keys, and of agent.toml")] = (
        "/etc/millpond"
    )
    privacy: Privacy = field(default_factory=Privacy)
    policy: Policy = field(default_factory=Policy)
    users: Users = field(default_factory=Users)
    tier: Tier = field(default_factory=Tier)
    limits: JobLimits = field(default_factory=JobLimits)
    board: Annotated[
        Literal["emulated", "real"],
        Key('"emulated": no sensors are read, as they are those of the shared machine'),
    ] = "real"
    watts: Watts | None = None
    public_quota: Annotated[
        int | None,
        Key(
            "bytes of the flash that the host may fill with public files; unset: all",
            above=0,
            most=math.inf,
        ),
    ] = None
    files: Annotated[str, Key("the folder of jobs' files; empty: the folder of the state")] = ""
    files_cache: Annotated[
        int, Key("most bytes of jobs' files kept for later jobs; not less than policy.largest_files")
    ] = 8 << 30
    zygote_idle: Annotated[
        float, Key("seconds for which the agent keeps torch loaded after its last worker", 1, 86400)
    ] = 600.0

    @property
    def job_logs(self) -> Path:
        """The directory of jobs' logs: in the private part, encrypted as it is, as they can hold its data."""
        return Path(self.flash, PRIVATE, ".millpond-logs")


def read(path: Path) -> AgentConfig:
    """Read the configuration in ``path``. Raises ConfigError naming file and key."""
    config = toml.read(AgentConfig, path)
    if config.watts:
        joules.check(config.watts, f"{path.name}: watts")
    if bool(config.link.socket) == bool(config.link.ivshmem):
        raise ConfigError(f"{path.name}: link: either socket or ivshmem")
    try:
        ipaddress.IPv4Interface(config.lan or "0.0.0.0")
    except ValueError as error:
        raise ConfigError(f"{path.name}: lan: {error}") from None
    if config.files_cache < config.policy.largest_files:
        raise ConfigError(f"{path.name}: files_cache must not be less than policy.largest_files")
    for key, size in (("tier: fast", config.tier.fast), ("limits: memory", config.limits.memory or "1 GiB")):
        try:
            bytes_of(size)
        except LocalError as error:
            raise ConfigError(f"{path.name}: {key}: {error}") from None
    check_policy(config.policy, f"{path.name}: policy")
    if config.policy.budget and config.privacy.launch == "private":
        told = 'launched scripts are not charged: set privacy.launch to "public"'
        raise ConfigError(f"{path.name}: policy: budget: {told}")
    return config
