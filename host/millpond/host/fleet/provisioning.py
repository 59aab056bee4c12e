# SPDX-License-Identifier: Apache-2.0
"""Edge: provisioning: makes a fleet, its authority, the host's identity and each device's first files."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from millpond.base import toml
from millpond.base.errors import ConfigError
from millpond.host.fleet import directory as fleets
from millpond.host.fleet.authority import Authority, create_ssh_key, write_public
from millpond.host.fleet.directory import DeviceConfig, Fleet, FleetConfig
from millpond.images import boards
from millpond.images.boards import EMULATED
from millpond.images.ondevice.sshd_config import ADMIN, HOST_KEY, USER
from millpond.images.runtime.emulated import FLASH, IDENTITY, SLOT, STATE, VOLUME

_LAN_BASE = ipaddress.IPv4Address("10.78.0.0")


def _emulated(name: str, lan: str) -> DeviceConfig:
    return DeviceConfig(name, lan=lan)


def create(directory: Path, name: str, devices: Sequence[str], *, lan: bool = False) -> Fleet:
    """Make a fleet of emulated devices in ``directory``, with a ``lan`` if wanted. Raises ConfigError if
    there is one already.
    """
    if (directory / "fleet.toml").exists():
        raise ConfigError(f"{directory} holds a fleet already")
    for device in devices:
        fleets.check_name(device)
    directory.mkdir(parents=True, exist_ok=True)
    authority = Authority.create(directory / "ca", name)
    authority.issue("host", directory / "host")
    addresses = (f"{_LAN_BASE + number + 1}/16" if lan else "" for number in range(len(devices)))
    config = FleetConfig(name, device=tuple(map(_emulated, devices, addresses)))
    fleet = Fleet(directory, config)
    create_ssh_key(fleet.ssh_key, f"millpond@{name}")
    create_ssh_key(fleet.admin_key, f"millpond-admin@{name}")
    fleet.known_hosts.write_bytes(b"")
    for one in config.device:
        _provision(fleet, authority, one)
    # Last: a directory with this file is a whole fleet.
    (directory / "fleet.toml").write_text(_fleet_toml(config))
    return fleet


def add(fleet: Fleet, device: DeviceConfig) -> Fleet:
    """Return the fleet with one device more, and make that device's identity. Raises ConfigError for a name
    that is taken, and for a board whose transport the agent does not have.
    """
    fleets.check_name(device.name)
    if device.board != EMULATED and (transport := boards.read(device.board).tunnel.transport) != "ivshmem":
        raise ConfigError(f"{device.name}: the agent has no end yet for the {transport} of a {device.board}")
    config = replace(fleet.config, device=(*fleet.config.device, device))
    grown = Fleet(fleet.directory, fleets.checked(config))
    _provision(grown, Authority.load(fleet.directory / "ca"), device)
    path = fleet.directory / "fleet.toml"
    new = path.with_suffix(".new")
    new.write_text(path.read_text().rstrip("\n") + "\n" + _device_toml(device))
    toml.read(FleetConfig, new)  # a user may have edited the file so that nothing can be appended
    new.replace(path)
    return grown


def _provision(fleet: Fleet, authority: Authority, config: DeviceConfig) -> None:
    device, directory = config.name, fleet.device_directory(config.name)
    parts = ("etc", "flash", "state", "slot") if config.board == EMULATED else ("etc", "slot")
    for part in parts:
        (directory / part).mkdir(parents=True, exist_ok=True)  # an interrupted attempt may have made it
    authority.issue(device, directory / "etc")
    host_key = create_ssh_key(directory / "etc" / HOST_KEY, device)
    for server, key in ((USER, fleet.ssh_key), (ADMIN, fleet.admin_key)):
        write_public(directory / "etc" / server.authorized, key.with_suffix(".pub").read_bytes())
    _pin(fleet.known_hosts, device, host_key.rpartition(" ")[0])
    write_agent_config(fleet, device, {})


def _pin(known_hosts: Path, device: str, key: str) -> None:
    """Pin a device's host key in place of an interrupted attempt's: SSH uses the first that it finds."""
    lines = known_hosts.read_text().splitlines() if known_hosts.exists() else []
    kept = [line for line in lines if line.partition(" ")[0] != device]
    new = known_hosts.with_suffix(".new")
    new.write_text("\n".join([*kept, f"{device} {key}"]) + "\n")
    new.replace(known_hosts)


def write_agent_config(fleet: Fleet, device: str, privacy: dict[str, Any]) -> None:
    """Write the device's ``agent.toml``; ``privacy`` as in the agent's configuration."""
    emulated = fleet.device(device).board == EMULATED
    places = {"flash": FLASH, "volume": VOLUME, "state": STATE, "identity": IDENTITY}
    if lan := fleet.device(device).lan:
        places["lan"] = lan
    if not emulated:
        places["files"] = f"{FLASH}/jobs"  # on boards the state has a small partition of its own
    tables: dict[str, dict[str, Any]] = {
        "": {"name": device, "board": "emulated" if emulated else "real"} | places,
        "link": {
            **({"socket": f"{SLOT}/nvme.sock"} if emulated else {"ivshmem": "pci"}),
            "address": fleet.addresses(device).device,
            "peers": fleet.config.network,
        },
        "privacy": {key: value for key, value in privacy.items() if not isinstance(value, dict)},
    }
    for key, value in privacy.items():
        if isinstance(value, dict):
            tables[f"privacy.{key}"] = value
    write_public(fleet.device_directory(device) / "etc" / "agent.toml", _toml(tables).encode())


def write_lan(fleet: Fleet, device: DeviceConfig) -> None:
    """Write the address of a device's LAN to its ``agent.toml``, if that has another one."""
    path = fleet.device_directory(device.name) / "etc" / "agent.toml"
    old = path.read_text()
    kept = [line for line in old.splitlines() if not re.match(r"lan\s*=", line)]
    kept[:0] = [f'lan = "{device.lan}"'] if device.lan else []  # no table has this key
    if (text := "\n".join(kept) + "\n") != old:
        write_public(path, text.encode())


def _fleet_toml(config: FleetConfig) -> str:
    text = _toml({"": {"name": config.name, "network": config.network}})
    return text + "".join(map(_device_toml, config.device))


def _device_toml(device: DeviceConfig) -> str:
    lan = f'lan = "{device.lan}"\n' if device.lan else ""
    return f'\n[[device]]\nname = "{device.name}"\nboard = "{device.board}"\n{lan}'


def _toml(tables: dict[str, dict[str, str]]) -> str:
    """Return TOML of tables of plain strings, which hold no quotes or control characters."""
    parts = []
    for name, values in tables.items():
        header = [f"[{name}]"] if name else []
        parts.append("\n".join([*header, *(f'{key} = "{value}"' for key, value in values.items())]))
    return "\n\n".join(parts) + "\n"
