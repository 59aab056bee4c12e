# SPDX-License-Identifier: Apache-2.0
"""Pure: what other programs need to reach devices: a configuration of OpenSSH, an inventory of Ansible.

A device has no address that a program could connect to: the proxy command asks the daemon for a connection.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millpond.host.fleet.directory import DeviceConfig
    from millpond.images.ondevice.sshd_config import SshServer


@dataclass(frozen=True, slots=True)
class SshAccess:
    """The way to one SSH server of all devices: the words of ``proxy`` begin the command that connects to a
    device and port, ``passes`` says that it hands the connection over instead of relaying it.
    """

    server: SshServer
    key: Path
    known_hosts: Path
    proxy: Sequence[str]
    passes: bool = True

    @property
    def settings(self) -> dict[str, str]:
        """The settings of ssh_config(5) that all devices share."""
        words = [shlex.quote(word).replace("%", "%%") for word in self.proxy]
        return {
            "User": self.server.user,
            "Port": str(self.server.port),
            "IdentityFile": _quoted(self.key),
            "IdentitiesOnly": "yes",
            "UserKnownHostsFile": _quoted(self.known_hosts),
            "GlobalKnownHostsFile": "/dev/null",
            "StrictHostKeyChecking": "yes",
            "UpdateHostKeys": "no",
            "CheckHostIP": "no",
            "ServerAliveInterval": "10",
            "ProxyCommand": " ".join([*words, "%h", "%p"]),
            **({"ProxyUseFdpass": "yes"} if self.passes else {}),
        }


def _quoted(path: Path) -> str:
    """Return a path as ssh_config(5) takes it: "%" begins a token there, and "\\" escapes."""
    plain = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return '"' + plain.replace("%", "%%") + '"'


def ssh_config(access: SshAccess, names: Sequence[str], prefix: str = "") -> str:
    """Return a configuration of OpenSSH in which the devices are hosts whose names begin with ``prefix``."""
    blocks = [_block(f"Host {prefix}{name}", {"HostName": name, "HostKeyAlias": name}) for name in names]
    hosts = " ".join(f"{prefix}{name}" for name in names)
    return "\n".join([*blocks, _block(f"Host {hosts}", access.settings)])


def _block(head: str, settings: Mapping[str, str]) -> str:
    return "".join([f"{head}\n", *(f"    {key} {value}\n" for key, value in settings.items())])


_ANSIBLES_OWN = ("_meta", "all", "ungrouped")


def inventory(
    access: SshAccess, devices: Sequence[DeviceConfig], groups: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Return the document that Ansible expects of a dynamic inventory, with a group for each board. A group
    whose name is taken has ``group_`` before it.
    """
    found = {"millpond": [device.name for device in devices]}
    for device in devices:
        found.setdefault(f"board_{_name(device.board)}", []).append(device.name)
    for name, members in groups.items():
        own = _name(name)
        while own in (*found, *_ANSIBLES_OWN):
            own = f"group_{own}"
        found[own] = list(members)
    return {
        "_meta": {"hostvars": {device.name: host_variables(access, device) for device in devices}},
        "all": {"children": list(found)},
        **{name: {"hosts": members} for name, members in found.items()},
    }


def _name(text: str) -> str:
    """Return a name of a group without what Ansible does not take."""
    return text.replace("-", "_")


def host_variables(access: SshAccess, device: DeviceConfig) -> dict[str, Any]:
    """Return Ansible's variables of a device."""
    own = {"User", "Port", "IdentityFile"}
    settings = {key: value for key, value in access.settings.items() if key not in own}
    options = [f"{key}={value}" for key, value in {"HostKeyAlias": device.name, **settings}.items()]
    return {
        "ansible_connection": "ssh",
        "ansible_host": device.name,
        "ansible_port": access.server.port,
        "ansible_user": access.server.user,
        "ansible_ssh_private_key_file": str(access.key),
        "ansible_ssh_common_args": shlex.join(word for option in options for word in ("-o", option)),
        "millpond_board": device.board,
    }
