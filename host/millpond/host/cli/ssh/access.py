# SPDX-License-Identifier: Apache-2.0
"""Edge (files): the way to devices for programs other than millpond."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from millpond.base.errors import LocalError
from millpond.host.fleet.directory import Fleet
from millpond.images.ondevice.sshd_config import ADMIN, USER

if TYPE_CHECKING:
    from millpond.host.remote.ssh_access import SshAccess


def access_of(fleet: Fleet, *, admin: bool, passes: bool) -> SshAccess:
    """Return the way to the SSH servers for users, or for root. Raises LocalError without the key."""
    from millpond.host.remote.ssh_access import SshAccess

    server, key = (ADMIN, fleet.admin_key) if admin else (USER, fleet.ssh_key)
    if not key.exists():
        where = " (--authority DIR names where it is kept)" if admin else ""
        raise LocalError(f"{key} is missing{where}")
    proxy = [*own_command(), "ssh-proxy", *(["--pass"] if passes else []), "--fleet", str(fleet.directory)]
    return SshAccess(server, key, fleet.known_hosts, proxy, passes)


def own_command() -> list[str]:
    """Return the words that start this program, from any folder."""
    if Path(sys.argv[0]).name == "millpond" and (found := shutil.which(sys.argv[0])):
        return [str(Path(found).absolute())]
    return [sys.executable, "-m", "millpond.host.main"]
