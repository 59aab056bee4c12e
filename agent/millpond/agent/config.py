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
    """The device's end of the tunnel: its address and transport, and the name of its interface.

    Either ``socket``, a Unix socket to listen at that the host reaches too, or ``ivshmem``, the PCI address
    of shared memory, "pci" for the only such device.
    ``peers`` is the fleet's network, which launched scripts may reach; without it, they reach the host alone.
    ``confinement`` "best-effort" runs the tunnel where the kernel cannot confine its pumps too.
    """

    address: str
    socket: str = ""
    ivshmem: str = ""
    interface: str = "mp0"
    mtu: int = 65520
    peers: str = ""
    confinement: Literal["required", "best-effort"] = "required"

    @property
    def transport(self) -> Literal["socket", "ivshmem"]:
        """Return which of the two transports is configured."""
        return "ivshmem" if self.ivshmem else "socket"


@dataclass(frozen=True, slots=True)
class Privacy:
    """The patterns that the gate looks for, and the settings that protect private data.

    ``canaries`` are texts, or bytes written ``hex:...``, that must never leave: a connection that is about
    to carry one is cut.
    ``tracers`` are only counted. ``errors`` "location" keeps a job's exception messages on the device.
    ``encrypt`` "always" refuses bulk connections without TLS; "auto" does so where the link leaves the box.
    ``at_rest`` "auto" encrypts the private part on the flash where that can be done, "required" starts only
    then, "off" never encrypts a new one.
    ``launch`` "private" shows a launched script, which has a network, the private part too.
    ``landlock`` "best-effort" serves the volume where the kernel cannot restrict its server by Landlock too.
    """

    canaries: dict[str, str] = field(default_factory=dict)
    tracers: dict[str, str] = field(default_factory=dict)
    errors: Literal["location", "full"] = "location"
    encrypt: Literal["auto", "always"] = "auto"
    launch: Literal["public", "private"] = "public"
    at_rest: Literal["auto", "required", "off"] = "auto"
    landlock: Literal["required", "best-effort"] = "required"


@dataclass(frozen=True, slots=True)
class Users:
    """The uids of the volume's server, jobs, launched scripts, reduction nodes and data services."""

    volume: int = 64001
    worker: int = 64002
    launch: int = 64004
    node: int = 64005
    data: int = 64006


@dataclass(frozen=True, slots=True)
class Tier:
    """The fast tier: mini-epochs of a job's private data take ``fast`` of memory at most, such as "8 GiB"."""

    fast: str = "1 GiB"


@dataclass(frozen=True, slots=True)
class JobLimits:
    """Limits of the processes of one job: ``memory``, such as "6 GiB", "" for what the device can
    spare, and the number of ``processes``, of which each thread is one.
    """

    memory: str = ""
    processes: Annotated[int, Key(least=16)] = PROCESSES

    @property
    def memory_bytes(self) -> int:
        """The bytes of memory."""
        return bytes_of(self.memory) if self.memory else memory_for_jobs()


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """The agent's configuration. Paths are absolute.

    ``public_quota`` is how many bytes of the flash the host may fill with public files; None for all.
    ``files`` is the directory of the files of jobs, the state directory if empty, and ``files_cache`` how
    many bytes of them are kept for the next job that has them, at least as many as of one job.
    ``watts`` are the board's declared power, for where nothing measures it. The sensors that an "emulated"
    ``board`` sees are of the machine that it shares. ``zygote_idle`` is the seconds from the end of the last
    worker to that of the zygote, which holds torch. ``lan`` is the device's address, with the prefix length,
    on a network of the devices' own, "" if it has none.
    """

    name: str
    link: LinkConfig
    lan: str = ""
    flash: str = "/flash"
    volume: str = "/volume"
    state: str = "/var/lib/millpond"
    identity: str = "/etc/millpond"
    privacy: Privacy = field(default_factory=Privacy)
    policy: Policy = field(default_factory=Policy)
    users: Users = field(default_factory=Users)
    tier: Tier = field(default_factory=Tier)
    limits: JobLimits = field(default_factory=JobLimits)
    board: Literal["emulated", "real"] = "real"
    watts: Watts | None = None
    public_quota: Annotated[int | None, Key(above=0, most=math.inf)] = None
    files: str = ""
    files_cache: int = 8 << 30
    zygote_idle: Annotated[float, Key(least=1, most=86400)] = 600.0

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
    return config
