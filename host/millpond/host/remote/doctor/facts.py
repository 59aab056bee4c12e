# SPDX-License-Identifier: Apache-2.0
"""Pure: the facts that 'millpond doctor' judges, as plain values."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field

from millpond.host.api.daemon import DeviceInfo, TunnelInfo
from millpond.host.api.topology import LinkInfo
from millpond.host.records.certificates import CertificateEnd


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A node in /dev; ``fault`` is why this user cannot open it, "" if it can."""

    exists: bool = True
    fault: str = ""


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Facts about what an emulated fleet needs of this machine.

    ``namespaces`` says why a process gets none of its own, "" if it does. ``settings`` are those of the
    kernel about user namespaces that it has, by name.
    """

    is_root: bool = False
    in_container: bool = False
    fuse: DeviceNode = DeviceNode()
    tun: DeviceNode = DeviceNode()
    namespaces: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    has_sshd: bool = True


@dataclass(frozen=True, slots=True)
class KernelTrial:
    """Why a feature of the kernel did not work when it was tried, "" for one that works."""

    tun: str = ""
    firewall: str = ""
    landlock: str = ""
    passthrough: str = ""


@dataclass(frozen=True, slots=True)
class SystemFacts:
    """Facts about what millpond uses of this machine beside that.

    ``kernel`` is its version; ``trial`` is None where none could be made. ``packages`` have the version, or
    None, of each distribution that millpond names, and ``needed`` the least version of those without which
    nothing works. ``cgroups`` is the version of control groups (0 for none), of which this process may not
    use the ``withheld`` controllers. ``descriptors`` may be open at once, of which it wants ``few`` at least.
    ``is_synchronised`` is whether the kernel's clock follows another, None where it does not say.
    """

    kernel: tuple[int, int]
    python: str
    processor: str
    trial: KernelTrial | None
    packages: dict[str, str | None]
    needed: dict[str, str]
    cgroups: int
    withheld: tuple[str, ...]
    descriptors: int
    few: int
    is_synchronised: bool | None


@dataclass(frozen=True, slots=True)
class DiskFacts:
    """Bytes and inodes of the file system of a folder; ``inodes`` is 0 for one without a limit of them."""

    free: int
    total: int
    free_inodes: int
    inodes: int


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """A device by the daemon's word, an emulated one if ``is_emulated``. ``clock`` is how far the device's
    clock is ahead of the host's (s), None where it does not tell its time. ``link`` is what was measured of
    its tunnel, None if that was not.
    """

    info: DeviceInfo
    is_emulated: bool = False
    tunnel: TunnelInfo | None = None
    clock: float | None = None
    link: LinkInfo | None = None


@dataclass(frozen=True, slots=True)
class FleetFacts:
    """A fleet, its directory, and the daemon's word about it.

    ``fault`` is why there is none that could be read. ``boards`` are numbers of devices by kind, of which
    ``emulated`` are so.
    ``is_confined`` is whether the fleet demands that. ``silent`` is why no daemon answers, ``is_denied``
    whether it may not be asked, ``is_installed`` whether its unit is there. ``certificates`` are those that
    end soon, by the files, or as lines by the daemon (``warnings``). ``unmeasured`` is why no link was.
    """

    directory: str
    now: datetime.datetime
    disk: DiskFacts | None = None
    fault: str = ""
    is_there: bool = True
    boards: dict[str, int] = field(default_factory=dict)
    emulated: int = 0
    is_confined: bool = True
    is_firewalled: bool = True
    silent: str = ""
    is_denied: bool = False
    is_installed: bool = False
    certificates: tuple[CertificateEnd, ...] = ()
    warnings: tuple[str, ...] = ()
    devices: tuple[DeviceFacts, ...] = ()
    unmeasured: str = ""
