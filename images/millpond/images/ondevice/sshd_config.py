# SPDX-License-Identifier: Apache-2.0
"""Edge (a sandbox): the two SSH servers of a device: who enters by which key, and what sshd is told."""

from __future__ import annotations

import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from millpond.linux import syscalls
from millpond.linux.confinement.sandbox import Bind, Sandbox, python_binds, system_binds
from millpond.wire.control_messages import SSH_ADMIN_PORT, SSH_PORT

SSHD = "/usr/sbin/sshd"
HOST_KEY = "ssh_host_key"


@dataclass(frozen=True, slots=True)
class SshServer:
    """One server: the only user that it lets in, by the keys in the file ``authorized``, on ``port``."""

    name: str
    user: str
    authorized: str
    port: int
    root_login: str = "no"


USER = SshServer("user", "pond", "authorized_keys", SSH_PORT)
ADMIN = SshServer("admin", "root", "authorized_keys_admin", SSH_ADMIN_PORT, "prohibit-password")
SERVERS = {server.name: server for server in (USER, ADMIN)}

UID = 64003
HOME = "/volume"
_UNPRIVILEGED_UID = 64009
"""Of the processes in which sshd, if root runs it, speaks with those that have not shown a key yet: nothing
else has it.
"""

EMPTY = Path("/run/sshd")
"""The directory in which sshd keeps these processes."""

RENAMED_ROOT = 64000
"""Root's uid for the admin's server where only one uid exists: as uid 0, sshd would need others."""

CAPABILITIES = (
    syscalls.CAP_CHOWN,
    syscalls.CAP_FOWNER,  # a terminal is given to the user first, and its mode set then
    syscalls.CAP_KILL,
    syscalls.CAP_SETGID,
    syscalls.CAP_SETUID,
    syscalls.CAP_NET_BIND_SERVICE,
    syscalls.CAP_SYS_CHROOT,
    syscalls.CAP_AUDIT_WRITE,
)
"""What root of the user's server needs to become that user."""

_FORWARDING = {
    # To ports of the device itself alone, which whatever the user runs there may connect to.
    "user": ("AllowTcpForwarding local", "PermitOpen localhost:* 127.0.0.1:*"),
    "admin": ("AllowTcpForwarding no",),
}
_COMMON = (
    "PasswordAuthentication no",
    "KbdInteractiveAuthentication no",
    "UsePAM no",
    "StrictModes no",
    "AllowStreamLocalForwarding no",
    "AllowAgentForwarding no",
    "X11Forwarding no",
    "PermitTunnel no",
    "PrintMotd no",
    "PidFile none",
    "ClientAliveInterval 10",  # a host that is gone is noticed in half a minute
    "ClientAliveCountMax 2",
    "Subsystem sftp internal-sftp",
)


def accounts(root: int = 0, machine: str = "") -> dict[str, str]:
    """Return the device's own /etc files: its users, its name, which is this ``machine``'s if none is given,
    and nothing of the machine around it.
    """
    users = (
        (ADMIN.user, root, "/root", "/bin/sh"),
        (USER.user, UID, HOME, "/bin/sh"),
        ("sshd", _UNPRIVILEGED_UID, str(EMPTY), "/usr/sbin/nologin"),
    )
    return {
        "/etc/passwd": "".join(f"{n}:x:{uid}:{uid}:{n}:{home}:{shell}\n" for n, uid, home, shell in users),
        "/etc/group": "".join(f"{name}:x:{uid}:\n" for name, uid, _, _ in users),
        "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
        "/etc/hosts": f"127.0.0.1 localhost\n127.0.1.1 {machine or socket.gethostname()}\n",
    }


def settings(server: SshServer, host_key: Path, authorized: Path) -> list[str]:
    """Return lines as in sshd_config(5)."""
    own = (
        f"Port {server.port}",
        f"HostKey {host_key}",
        f"AuthorizedKeysFile {authorized}",
        f"AllowUsers {server.user}",
        f"PermitRootLogin {server.root_login}",
        f"SetEnv LANG=C.UTF-8{f' PATH={_PATH} HOME={_WRITABLE}' if server is USER else ''}",
    )
    return [*own, *_FORWARDING[server.name], *_COMMON]


def command(lines: list[str]) -> list[str]:
    """Return the command line that runs sshd in the foreground with ``lines`` as its only configuration."""
    return [SSHD, "-D", "-e", "-f", "/dev/null", *(part for line in lines for part in ("-o", line))]


INSIDE = Path("/etc/ssh")
"""Where the user's server has its keys."""

PYTHON = Path("/run/millpond/bin/millpond-python")
"""The Python of workers and launched scripts, which has torch, for those who log in; below no directory that$
the sandbox shows read-only, as an image has its code in /opt/millpond."""
_WRITABLE = Path("/tmp")  # noqa: S108 - the sandbox's own, for what programs keep in a home
_PATH = f"/usr/local/bin:/usr/bin:/bin:{PYTHON.parent}"


def sandbox(identity: Path, public: Path, authorized: str, *, many_uids: bool) -> Sandbox:
    """Return the sandbox of the user's server, which shows ``public`` alone; ``authorized`` keys enter it.

    With ``many_uids`` root owns it and keeps the host key unreadable to the user; else the user owns all
    of it.
    """
    return Sandbox(
        binds=(*system_binds(), *python_binds(), Bind(public, public, read_only=False)),
        files=accounts()
        | {
            str(INSIDE / USER.authorized): authorized,
            str(EMPTY / "empty"): "",
            str(PYTHON): f'#!/bin/sh\nexec "{sys.executable}" "$@"\n',
        },
        secrets={str(INSIDE / HOST_KEY): str(identity / HOST_KEY)},
        own_pids=True,
        new_session=True,  # no terminal to type into
        uid=None if many_uids else UID,
        only=CAPABILITIES if many_uids else None,
    )
