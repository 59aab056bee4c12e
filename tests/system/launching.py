# SPDX-License-Identifier: Apache-2.0
"""Processes of launched scripts, and what a launch leaves in the host's network."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from pathlib import Path

import psutil

from .processes import command, running
from .support import Emulation

SHARING = {"millpond.fs.mount.passed", "millpond.fs.mount.folder_server"}


def scripts(fleet: Emulation) -> list[psutil.Process]:
    """Processes of launched scripts, on the host or a device, and of the folders that these share."""
    found = (p for p in fleet.processes() if name(p) == "launch.entry" or "launch-" in folder(p))
    return running([*found, *(p for p in fleet.processes() if SHARING & set(command(p)))])


def shared_mounts(fleet: Emulation) -> list[Path]:
    """Where the ranks on the host have folders that launches share."""
    return list(fleet.fleet.shared_folders.glob("*"))


def name(process: psutil.Process) -> str:
    """Nothing if it has ended meanwhile."""
    with contextlib.suppress(psutil.Error):
        return process.name()
    return ""


def folder(process: psutil.Process) -> str:
    """Where it works."""
    with contextlib.suppress(psutil.Error):
        return process.cwd()
    return ""


def on_host(fleet: Emulation, *command: str) -> str:
    """What a command says in the network of the host."""
    pid = str(fleet.daemon().pid)
    user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
    return subprocess.run(
        ["nsenter", "-t", pid, "-n", *user, *command], capture_output=True, text=True, check=True
    ).stdout


def forwarding(fleet: Emulation) -> list[str]:
    """The setting of each interface."""
    names = [f"/proc/sys/net/ipv4/conf/mp-csd{number}/forwarding" for number in range(3)]
    return on_host(fleet, "cat", *names).split()


def interfaces(fleet: Emulation) -> set[str]:
    """The tunnels' interfaces, each with its number, which no other will have."""
    return set(re.findall(r"^(\d+: mp-csd\d)", on_host(fleet, "ip", "-o", "link"), re.MULTILINE))


def closed(fleet: Emulation) -> bool:
    """Whether nothing is forwarded, by settings and by rules; not while a tunnel is made anew."""
    try:
        rules, settings = on_host(fleet, "ip", "rule").splitlines(), forwarding(fleet)
    except subprocess.CalledProcessError:
        return False
    fleets = [line for line in rules if "iif mp-" in line]
    return settings == ["0"] * 3 and len(fleets) == 3 and all("prohibit" in line for line in fleets)


def write(fleet: Emulation, name: str, code: str) -> Path:
    path = fleet.base / name
    path.write_text(code)
    return path
