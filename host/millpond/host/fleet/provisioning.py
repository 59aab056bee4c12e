# SPDX-License-Identifier: Apache-2.0
"""Edge: provisioning: makes a fleet, its authority, the host's identity and each device's first files."""

from __future__ import annotations

import ipaddress
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from millpond.base import toml
from millpond.base.errors import ConfigError
from millpond.base.schema import load
from millpond.host.fleet import directory as fleets
from millpond.host.fleet import revocation
from millpond.host.fleet.addresses import assign
from millpond.host.fleet.authority import Authority, create_ssh_key, missing, write_public
from millpond.host.fleet.directory import DeviceConfig, Fleet, FleetConfig
from millpond.host.fleet.sharing import close_to_others
from millpond.images import boards
from millpond.images.boards import EMULATED
from millpond.images.ondevice.sshd_config import ADMIN, HOST_KEY, USER
from millpond.images.runtime.emulated import FLASH, IDENTITY, SLOT, STATE, VOLUME
from millpond.linux.files import write_durably

_LAN_BASE = ipaddress.IPv4Address("10.78.0.0")


def _emulated(name: str, lan: str) -> DeviceConfig:
    return DeviceConfig(name, lan=lan)


def create(
    directory: Path,
    name: str,
    devices: Sequence[str],
    *,
    lan: bool = False,
    keys: Path | None = None,
    network: str = fleets.NETWORK,
    peers: str = "",
    told: Callable[[Sequence[DeviceConfig]], Iterable[DeviceConfig]] = iter,
) -> Fleet:
    """Make a fleet of emulated devices in ``directory``, with a ``lan`` if wanted; ``keys`` is where the keys
    that no daemon needs are to be, if not there; ``network`` and ``peers`` are as in ``fleet.toml``; ``told``
    yields the devices that it gets, and may show how far it is. Raises ConfigError if there is a fleet.
    """
    if (directory / "fleet.toml").exists():
        raise ConfigError(f"{directory} holds a fleet already")
    if keys and (keys / "ca.key").exists():
        raise ConfigError(f"{keys} holds the authority of a fleet already")
    for device in devices:
        fleets.check_name(device)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    close_to_others(directory)
    addresses = (f"{_LAN_BASE + number + 1}/16" if lan else "" for number in range(len(devices)))
    new = FleetConfig(name, network, peers, tuple(map(_emulated, devices, addresses)))
    fleets.checked(new)
    fleet = _addressed(Fleet(directory, new, keys), {})
    config = fleet.config
    authority = Authority.create(fleet.ca, name)
    authority.issue("host", directory / "host")
    create_ssh_key(fleet.ssh_key, f"millpond@{name}")
    create_ssh_key(fleet.admin_key, f"millpond-admin@{name}")
    write_durably(fleet.known_hosts, b"")
    for one in told(config.device):
        _provision(fleet, authority, one)
    # Last: a directory with this file is a whole fleet.
    write_durably(directory / "fleet.toml", _fleet_toml(config).encode())
    return fleet


def add(fleet: Fleet, device: DeviceConfig) -> Fleet:
    """Return the fleet with one device more, and make that device's identity. Raises ConfigError for a name
    that is taken, and for a board whose transport the agent does not have.
    """
    fleets.check_name(device.name)
    if device.board != EMULATED and (transport := boards.read(device.board).tunnel.transport) != "ivshmem":
        raise ConfigError(f"{device.name}: the agent has no end yet for the {transport} of a {device.board}")
    config = replace(fleet.config, device=(*fleet.config.device, device))
    known = {one.name: fleet.addresses(one.name).device_ip for one in fleet.config.device}
    grown = _addressed(Fleet(fleet.directory, fleets.checked(config), fleet.authority), known)
    device = grown.config.device[-1]
    _provision(grown, Authority.load(fleet.ca, fleet.identity.authority), device)
    path = fleet.directory / "fleet.toml"
    # a user may have edited the file so that nothing can be appended
    _replace(path, path.read_text().rstrip("\n") + "\n" + _device_toml(device))
    return grown


def _addressed(fleet: Fleet, known: Mapping[str, str]) -> Fleet:
    """Return the fleet with the addresses that devices without one get beside the ``known``."""
    config = fleet.config
    found = assign(config.network, {one.name: known.get(one.name, "") for one in config.device})
    devices = (replace(one, address=found[one.name].device_ip) for one in config.device)
    return Fleet(fleet.directory, replace(config, device=tuple(devices)), fleet.authority)


def _replace(path: Path, text: str) -> None:
    """Write a ``fleet.toml`` that can be read, or raise ConfigError and leave the old one."""
    load(FleetConfig, toml.parsed(text, path.name), path.name)
    write_durably(path, text.encode())


def without(fleet: Fleet, name: str) -> str:
    """Return the text of ``fleet.toml`` without a device, which it may lack already. Raises ConfigError where
    a person has written the file so that no table can be cut out of it.
    """
    path = fleet.directory / "fleet.toml"
    parts = re.split(r"^(?=[ \t]*\[\[?[ \t]*[\w\"'-]+)", path.read_text(), flags=re.MULTILINE)
    kept, cut = [], False
    for part in parts:
        head = re.match(r"[ \t]*\[\[?[ \t]*(device\b)?(?:[ \t]*(\]\]))?", part)
        cut = bool(head and head[1]) and (_is_table_of(part, name) if head and head[2] else cut)
        kept += [_comments_behind(part) if cut else part]
    text = "".join(kept)
    left = [one.name for one in fleet.config.device if one.name != name]
    try:
        found = [str(one.get("name")) for one in tomllib.loads(text).get("device", ())]
    except tomllib.TOMLDecodeError:
        found = []
    if found != left:
        raise ConfigError(f"{path}: the table of {name} cannot be found: remove it in an editor")
    return text


def _comments_behind(text: str) -> str:
    """Return the comments at the end of a table: they are about the next one."""
    found = re.search(r"(?:^[ \t]*#.*\n)+\Z", text, flags=re.MULTILINE)
    return found[0] if found else ""


def _is_table_of(text: str, name: str) -> bool:
    try:
        return bool(tomllib.loads(text)["device"][0].get("name") == name)
    except (tomllib.TOMLDecodeError, KeyError, IndexError, TypeError):
        return False


def remove(fleet: Fleet, text: str, name: str) -> bool:
    """Make ``text`` the ``fleet.toml``, and forget the host key of the device that it lacks. Returns whether
    an earlier attempt had left something of that to do. Raises ConfigError.
    """
    path = fleet.directory / "fleet.toml"
    if is_listed := text != path.read_text():
        _replace(path, text)
    lines = fleet.known_hosts.read_text().splitlines() if fleet.known_hosts.exists() else []
    kept = [line for line in lines if line.partition(" ")[0] != name]
    if kept != lines:
        _write_lines(fleet.known_hosts, kept)
    return is_listed or kept != lines


def _provision(fleet: Fleet, authority: Authority, config: DeviceConfig) -> None:
    device, directory = config.name, fleet.device_directory(config.name)
    parts = ("etc", "flash", "state", "slot") if config.board == EMULATED else ("etc", "slot")
    for part in parts:
        (directory / part).mkdir(parents=True, exist_ok=True)  # an interrupted attempt may have made it
    identify(fleet, authority, device)
    write_agent_config(fleet, device, {})


def identify(fleet: Fleet, authority: Authority, device: str) -> None:
    """Make a device's certificate and keys, and revoke a certificate that an earlier device of its name had.
    Raises LocalError.
    """
    etc = fleet.device_directory(device) / "etc"
    keys = ((USER, fleet.ssh_key), (ADMIN, fleet.admin_key))
    lines = {server: _public_line(key.with_suffix(".pub")) for server, key in keys}
    revocation.revoke(fleet, authority, revocation.known_serials(fleet, device))
    host_key = create_ssh_key(etc / HOST_KEY, device)
    for server, line in lines.items():
        write_public(etc / server.authorized, line)
    _pin(fleet.known_hosts, device, host_key.rpartition(" ")[0])
    authority.issue(device, etc)  # last: until then a revoked device stays so


def _public_line(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise missing(path) from None


def _pin(known_hosts: Path, device: str, key: str) -> None:
    """Pin a device's host key in place of an interrupted attempt's: SSH uses the first that it finds."""
    lines = known_hosts.read_text().splitlines() if known_hosts.exists() else []
    kept = [line for line in lines if line.partition(" ")[0] != device]
    _write_lines(known_hosts, [*kept, f"{device} {key}"])


def _write_lines(path: Path, lines: list[str]) -> None:
    write_durably(path, "".join(f"{line}\n" for line in lines).encode())


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
            "peers": fleet.peers,
        },
        # any developer's kernel will do for a device that is none
        "privacy": ({"landlock": "best-effort"} if emulated else {})
        | {key: value for key, value in privacy.items() if not isinstance(value, dict)},
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
    peers = {"peers": config.peers} if config.peers else {}
    text = _toml({"": {"name": config.name, "network": config.network} | peers})
    return text + "".join(map(_device_toml, config.device))


def _device_toml(device: DeviceConfig) -> str:
    places = {"address": device.address, "lan": device.lan}
    lines = "".join(f'{key} = "{value}"\n' for key, value in places.items() if value)
    return f'\n[[device]]\nname = "{device.name}"\nboard = "{device.board}"\n{lines}'


def _toml(tables: dict[str, dict[str, str]]) -> str:
    """Return TOML of tables of plain strings, which hold no quotes or control characters."""
    parts = []
    for name, values in tables.items():
        header = [f"[{name}]"] if name else []
        parts.append("\n".join([*header, *(f'{key} = "{value}"' for key, value in values.items())]))
    return "\n\n".join(parts) + "\n"
