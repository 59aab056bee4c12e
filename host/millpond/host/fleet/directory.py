# SPDX-License-Identifier: Apache-2.0
"""Edge: the fleet directory: ``fleet.toml``, and the paths of all other files."""

from __future__ import annotations

import functools
import ipaddress
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from millpond.base import toml
from millpond.base.errors import ConfigError, LocalError
from millpond.base.keys import Key
from millpond.energy import joules
from millpond.energy.joules import Watts
from millpond.host.fleet import addresses
from millpond.host.fleet.addresses import Addresses
from millpond.host.records import device_set
from millpond.images import boards
from millpond.images.boards import EMULATED
from millpond.images.runtime.emulated_lan import LinkShape

if TYPE_CHECKING:
    from millpond.wire.tls import CurrentContext, Identity

NETWORK = "10.77.0.0/16"


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """One device of the fleet. Its ``watts`` are for an agent that neither measures nor knows its power."""

    name: Annotated[str, Key("the device's name: 1 to 12 of a-z, 0-9 and '-'")]
    board: Annotated[str, Key('the kind of board: "emulated", or one of `images/millpond/images/boards`')] = (
        EMULATED
    )
    encrypt: Annotated[
        Literal["auto", "always"],
        Key('when bulk data have TLS: "always", or ("auto") if the tunnel leaves the box'),
    ] = "auto"
    agent: Annotated[
        tuple[str, ...],
        Key("the command of an emulated board's agent, such as a build under test; empty: the usual"),
    ] = ()
    watts: Watts | None = None
    lan: Annotated[
        str, Key("the device's address, with the prefix length, on the devices' own LAN; empty: no LAN")
    ] = ""
    address: Annotated[
        str, Key("the address of the device's end of the tunnel, written when the device is provisioned")
    ] = ""


@dataclass(frozen=True, slots=True)
class HostConfig:
    """The host's own worker, and the protection of the host."""

    accelerator: Annotated[
        Literal["auto", "cpu", "cuda"],
        Key('how the host computes: "auto": on a GPU if torch finds one; "cuda": on a GPU or not at all'),
    ] = "auto"
    firewall: Annotated[
        Literal["required", "off"],
        Key("a firewall that closes the host's services to its devices; needs the kernel's nftables"),
    ] = "required"
    confinement: Annotated[
        Literal["required", "best-effort"],
        Key('"required" runs tunnels only if the kernel can confine their pumps'),
    ] = "required"


@dataclass(frozen=True, slots=True)
class JobsConfig:
    """The limits of the folders of ended jobs. ``mib`` never removes the folder of the last job."""

    keep: Annotated[int, Key("most folders that stay, those of the newest jobs; 0: any number", 0)] = 500
    mib: Annotated[int, Key("most MiB of these folders together; 0: any size", 0)] = 65536


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """The configuration of a fleet. Its ``watts`` are for a host without a power sensor."""

    name: Annotated[str, Key("the fleet's name, in its certificates")]
    network: Annotated[str, Key("the network of the tunnels: a /30 for each device")] = NETWORK
    peers: Annotated[
        str,
        Key("the network of all fleets that launch scripts together, this one's included; empty: `network`"),
    ] = ""
    device: tuple[DeviceConfig, ...] = field(default_factory=tuple)
    watts: Watts | None = None
    zygote_idle: Annotated[
        float, Key("seconds for which the host keeps torch loaded after its last worker", 1, 86400)
    ] = 600.0
    silence: Annotated[
        float,
        Key(
            "seconds without an answer after which a device is lost; after half, jobs go on without it",
            2,
            600,
        ),
    ] = 3.0
    host: HostConfig = field(default_factory=HostConfig)
    lan: LinkShape = field(default_factory=LinkShape)
    jobs: JobsConfig = field(default_factory=JobsConfig)
    groups: Annotated[
        dict[str, str], Key('names of sets of devices: fast = "csd[0-3],csd7" is @fast for commands')
    ] = field(default_factory=dict)


class Fleet:
    """A fleet directory that has been read. ``authority`` is the directory of the keys that no daemon needs,
    if that is apart.
    """

    def __init__(self, directory: Path, config: FleetConfig, authority: Path | None = None) -> None:
        self.directory, self.config = directory.absolute(), config
        self.authority = authority.absolute() if authority else None
        self._assigned = config, dict[str, Addresses]()

    @property
    def peers(self) -> str:
        """The network of all devices that scripts on this fleet's devices may reach."""
        return self.config.peers or self.config.network

    @property
    def socket(self) -> Path:
        """The Unix socket on which the host daemon answers."""
        return self.directory / "host.sock"

    @property
    def database(self) -> Path:
        """The database of devices, jobs and rounds."""
        return self.directory / "fleet.db"

    @functools.cached_property
    def identity(self) -> Identity:
        """The host's own certificate and key."""
        from millpond.wire.tls import Identity  # loads ssl, which few commands need

        return Identity.in_directory(self.directory / "host")

    @functools.cached_property
    def context(self) -> CurrentContext:
        """The TLS context of connections to devices, one for all of them. Raises LocalError."""
        from millpond.wire.tls import CurrentContext

        return CurrentContext(self.identity, server=False)

    @property
    def ca(self) -> Path:
        """The directory of the fleet's authority, and of the key that signs updates."""
        return self.authority or self.directory / "ca"

    @property
    def ssh_key(self) -> Path:
        """The private key that opens SSH sessions on devices."""
        return self.directory / "host" / "ssh_key"

    @property
    def admin_key(self) -> Path:
        """The private key that opens root's SSH sessions on devices."""
        return (self.authority or self.directory / "host") / "admin_key"

    @property
    def known_hosts(self) -> Path:
        """The devices' SSH host keys, pinned when they were provisioned."""
        return self.directory / "host" / "known_hosts"

    def device_directory(self, name: str) -> Path:
        """Return the directory of one device: etc, flash, state, slot, console.log."""
        return self.directory / "devices" / name

    def flash(self, name: str) -> Path:
        """Return the directory that is the flash of an emulated device."""
        return self.device_directory(name) / "flash"

    def slot(self, name: str) -> Path:
        """Return the directory that the host shares with an emulated device, or one in QEMU."""
        return self.device_directory(name) / "slot"

    def peer(self, device: DeviceConfig) -> tuple[Literal["socket", "ivshmem", "nvme"], Path | str]:
        """Return the transport of a device's tunnel, and the host's path or address for it."""
        if device.board == EMULATED:
            return "socket", self.slot(device.name) / "nvme.sock"
        transport = boards.read(device.board).tunnel.transport
        return transport, self.slot(device.name) / "doorbells" if transport == "ivshmem" else "auto"

    def job_directory(self, job: int) -> Path:
        """Return the directory of a job's checkpoints, model and log."""
        return self.directory / "jobs" / str(job)

    @property
    def files(self) -> Path:
        """The folder of the contents of jobs' files."""
        return self.directory / "files"

    @property
    def test_data(self) -> Path:
        """The folder of the test data that clients have sent."""
        return self.directory / "test-data"

    @property
    def overlays(self) -> Path:
        """The folder of jobs' unpacked wheels."""
        return self.directory / "overlays"

    def mountpoint(self, name: str) -> Path:
        """Return the folder where the host daemon mounts a device's volume for jobs."""
        return self.directory / "volumes" / name

    @property
    def shared_folders(self) -> Path:
        """The folder in which the host daemon mounts what launches share, for the ranks on the host."""
        return self.directory / "shared"

    @property
    def mount_stats(self) -> Path:
        """The folder of the sockets on which this host's mounts serve their statistics."""
        return self.directory / "mounts"

    def mount_log(self, name: str) -> Path:
        """Return the log of this host's mounts of a device's volume."""
        return self.mount_stats / f"{name}.log"

    def interface(self, name: str) -> str:
        """Return the name of the host's network interface towards a device."""
        return f"mp-{name}"

    def device(self, name: str) -> DeviceConfig:
        """Return the configuration of a device. Raises ConfigError for an unknown one."""
        devices = {device.name: device for device in self.config.device}
        if name not in devices:
            raise ConfigError(f"no device '{name}' in this fleet; it has {', '.join(devices) or 'none'}")
        return devices[name]

    def named(self, text: str) -> tuple[str, ...]:
        """Return the devices that a user's text names: ``csd0,csd[2-4],@fast``. Raises LocalError."""
        known = [device.name for device in self.config.device]
        return device_set.expand(text, known, self.config.groups)

    def addresses(self, name: str) -> Addresses:
        """Return the addresses of a device's tunnel: those of ``fleet.toml``, or where it has none, any that
        are free. Raises ConfigError for an unknown device.
        """
        self.device(name)
        return self._addresses[name]

    @property
    def _addresses(self) -> dict[str, Addresses]:
        config, found = self._assigned
        if config is not self.config or not found:
            config = self.config
            found = addresses.assign(config.network, {one.name: one.address for one in config.device})
            self._assigned = config, found
        return found

    def take(self, device: DeviceConfig) -> None:
        """Take a device that was added since the fleet was read, in place of one of its name."""
        others = (one for one in self.config.device if one.name != device.name)
        self.config = replace(self.config, device=(*others, device))

    def address_fault(self, name: str) -> str:
        """Return how a device's address differs from the one in its own configuration, if that is here."""
        here = self.addresses(name).device_ip
        try:
            text = (self.device_directory(name) / "etc" / "agent.toml").read_text()
            there = str(tomllib.loads(text)["link"]["address"]).partition("/")[0]
        except (OSError, ValueError, KeyError, TypeError):
            return ""
        if here == there:
            return ""
        return f"fleet.toml has the address {here} for {name}, which was provisioned with {there}"


INSTALLED = Path("/var/lib/millpond")
"""The directory of the installed daemon's fleet."""


def default_directory(installed: Path = INSTALLED) -> Path:
    """Return that of the ``installed`` daemon for root, and for users who may read its ``fleet.toml``, as its
    group may, whether it runs or not, and have no fleet of their own; for others ``~/.local/state/millpond``,
    if they have a home.
    """
    try:
        own = Path.home() / ".local/state/millpond"
    except RuntimeError:  # no variable, and no entry in passwd: a container with any uid
        return installed
    uses_installed = os.access(installed / "fleet.toml", os.R_OK) and not (own / "fleet.toml").exists()
    return installed if os.geteuid() == 0 or uses_installed else own


def read(directory: Path, authority: Path | None = None) -> Fleet:
    """Read the fleet in ``directory``, whose ``authority`` may be in another one. Raises ConfigError."""
    path = directory / "fleet.toml"
    try:
        path.stat()
    except FileNotFoundError:
        raise ConfigError(
            f"{directory} holds no fleet: make one with 'millpond init --fleet {directory}'"
            ", or try emulated devices with 'millpond emulate'"
        ) from None
    except OSError:
        pass  # reading the file raises the error
    return Fleet(directory, checked(toml.read(FleetConfig, path)), authority)


def checked(config: FleetConfig) -> FleetConfig:
    """Return ``config`` unchanged. Raises ConfigError for impossible values."""
    names = [device.name for device in config.device]
    for name in names:
        check_name(name)
        if names.count(name) > 1:
            raise ConfigError(f"fleet.toml: device: '{name}' is named twice")
    addresses.assign(config.network, {device.name: device.address for device in config.device})
    if config.peers:
        _check_peers(config)
    if config.watts:
        joules.check(config.watts, "fleet.toml: watts")
    for device in config.device:
        if device.board != EMULATED:
            boards.read(device.board)
        if device.watts:
            joules.check(device.watts, f"fleet.toml: device: {device.name}: watts")
    _check_lan(config)
    _check_groups(config.groups)
    return config


def _check_peers(config: FleetConfig) -> None:
    """Check the network of all fleets that launch together. Raises ConfigError."""
    try:
        whole, own = ipaddress.IPv4Network(config.peers), ipaddress.IPv4Network(config.network)
    except ValueError as error:
        raise ConfigError(f"fleet.toml: peers: {error}") from None
    if not own.subnet_of(whole):
        raise ConfigError(f"fleet.toml: peers: {whole} does not include the fleet's own network, {own}")


def _check_groups(groups: Mapping[str, str]) -> None:
    """Check names and texts of groups, whose devices may be removed meanwhile. Raises ConfigError."""
    for name, text in groups.items():
        where = f"fleet.toml: groups: {name}"
        if not re.fullmatch(r"[a-z0-9_-]{1,32}", name) or name == device_set.ALL:
            raise ConfigError(f"{where}: a group's name is 1 to 32 of a-z, 0-9, '-' and '_', not 'all'")
        try:
            device_set.members(text)
        except LocalError as error:
            raise ConfigError(f"{where}: {error}") from None


def _check_lan(config: FleetConfig) -> None:
    """Check the addresses of devices on the LAN. Raises ConfigError."""
    network = ipaddress.ip_network(config.network)
    known: dict[str, str] = {}
    for device in (device for device in config.device if device.lan):
        where = f"fleet.toml: device: {device.name}: lan"
        try:
            address = ipaddress.IPv4Interface(device.lan)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
        if network.version == 4 and address.network.overlaps(network):
            raise ConfigError(f"{where}: {address} is in the network of the tunnels, {network}")
        if other := known.get(str(address.ip)):
            raise ConfigError(f"{where}: {other} has the address {address.ip}, too")
        known[str(address.ip)] = device.name


def check_name(name: str) -> None:
    """Raise ConfigError unless ``name`` can be a host name and part of an interface name: 1 to 12 of a-z, 0-9
    and '-'.
    """
    good = name.replace("-", "").isalnum() and name.isascii() and name == name.lower()
    if not good or len(name) > 12 or name.startswith("-") or name == "host":
        raise ConfigError(f"'{name}' cannot be a device's name: 1 to 12 of a-z, 0-9 and '-', not 'host'")
