"""Edge: makes a fleet: its authority, the host's identity, and what each device is given to begin with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from millpond.host import fleet as fleets
from millpond.host.authority import Authority, create_ssh_key, write_public
from millpond.host.fleet import DeviceConfig, Fleet, FleetConfig
from millpond.images.emulated import FLASH, IDENTITY, SLOT, STATE, VOLUME
from millpond.wire.errors import ConfigError


def create(directory: Path, name: str, devices: Sequence[str]) -> Fleet:
    """A new fleet of emulated devices in ``directory``. Raises ConfigError if there is one already."""
    if (directory / "fleet.toml").exists():
        raise ConfigError(f"{directory} holds a fleet already")
    for device in devices:
        fleets.check_name(device)
    directory.mkdir(parents=True, exist_ok=True)
    authority = Authority.create(directory / "ca", name)
    authority.issue("host", directory / "host")
    create_ssh_key(directory / "host" / "ssh_key", f"millpond@{name}")
    (directory / "host" / "known_hosts").write_bytes(b"")
    config = FleetConfig(name, device=tuple(DeviceConfig(device) for device in devices))
    fleet = Fleet(directory, config)
    for device in devices:
        _provision(fleet, authority, device)
    # Last: a directory with this file is a whole fleet.
    (directory / "fleet.toml").write_text(_fleet_toml(config))
    return fleet


def _provision(fleet: Fleet, authority: Authority, device: str) -> None:
    directory = fleet.device_directory(device)
    for part in ("etc", "flash", "state", "slot"):
        (directory / part).mkdir(parents=True, exist_ok=True)  # an attempt that was cut short may have been
    authority.issue(device, directory / "etc")
    host_key = create_ssh_key(directory / "etc" / "ssh_host_key", device)
    client_key = fleet.ssh_key.with_suffix(".pub").read_bytes()
    write_public(directory / "etc" / "authorized_keys", client_key)
    with fleet.known_hosts.open("a") as known:
        known.write(f"{device} {host_key.rpartition(' ')[0]}\n")
    write_agent_config(fleet, device, {})


def write_agent_config(fleet: Fleet, device: str, privacy: dict[str, Any]) -> None:
    """The device's ``agent.toml``; ``privacy`` as in the agent's configuration."""
    board = next(config.board for config in fleet.config.device if config.name == device)
    places = {"flash": FLASH, "volume": VOLUME, "state": STATE, "identity": IDENTITY}
    tables: dict[str, dict[str, Any]] = {
        "": {"name": device, "board": board} | places,
        "link": {
            "socket": f"{SLOT}/nvme.sock",
            "address": fleet.addresses(device).device,
            "peers": fleet.config.network,
        },
        "privacy": {key: value for key, value in privacy.items() if not isinstance(value, dict)},
    }
    for key, value in privacy.items():
        if isinstance(value, dict):
            tables[f"privacy.{key}"] = value
    write_public(fleet.device_directory(device) / "etc" / "agent.toml", _toml(tables).encode())


def _fleet_toml(config: FleetConfig) -> str:
    text = _toml({"": {"name": config.name, "network": config.network}})
    for device in config.device:
        text += f'\n[[device]]\nname = "{device.name}"\nboard = "{device.board}"\n'
    return text


def _toml(tables: dict[str, dict[str, str]]) -> str:
    """TOML of tables of plain strings, which hold no quotes or control characters."""
    parts = []
    for name, values in tables.items():
        header = [f"[{name}]"] if name else []
        parts.append("\n".join([*header, *(f'{key} = "{value}"' for key, value in values.items())]))
    return "\n\n".join(parts) + "\n"
