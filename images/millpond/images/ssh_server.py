"""Pure: the SSH server of an emulated board: an ordinary user's, in a sandbox without the private part."""

from __future__ import annotations

from pathlib import Path

from millpond.linux.confine import confined
from millpond.linux.sandbox import Bind, Sandbox, system_binds

USER = "pond"
UID = 64003
HOME = "/volume"
SSHD = "/usr/sbin/sshd"

_CONFIG = """\
Port 22
HostKey /etc/ssh/host_key
AuthorizedKeysFile /etc/ssh/authorized_keys
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
AllowTcpForwarding no
AllowAgentForwarding no
X11Forwarding no
PermitTunnel no
PrintMotd no
PidFile none
Subsystem sftp internal-sftp
"""


def accounts() -> dict[str, str]:
    """The board's own /etc files: its users, and nothing of the machine around it."""
    return {
        "/etc/passwd": f"root:x:0:0:root:/root:/bin/sh\n{USER}:x:{UID}:{UID}::{HOME}:/bin/sh\n",
        "/etc/group": f"root:x:0:\n{USER}:x:{UID}:\n",
        "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
        "/etc/hosts": "127.0.0.1 localhost\n",
    }


def command(identity: Path, public: Path) -> list[str]:
    """The command line that runs the server, with the keys in ``identity`` and ``public`` as all it shows."""
    sandbox = Sandbox(
        binds=(*system_binds(), Bind(public, public, read_only=False)),
        files=accounts() | {"/etc/ssh/sshd_config": _CONFIG},
        secrets={
            "/etc/ssh/host_key": str(identity / "ssh_host_key"),
            "/etc/ssh/authorized_keys": str(identity / "authorized_keys"),
        },
        own_pids=True,
        uid=UID,
    )
    return confined(sandbox, [SSHD, "-D", "-e", "-f", "/etc/ssh/sshd_config"])
