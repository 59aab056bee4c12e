# SPDX-License-Identifier: Apache-2.0
"""Edge (/dev, /proc, unshare): looks for what an emulated fleet needs of this machine."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

from millpond.base.errors import LocalError
from millpond.host.remote.doctor import prerequisites
from millpond.host.remote.doctor.diagnosis import Verdict
from millpond.host.remote.doctor.facts import DeviceNode, MachineFacts

_SSHD = Path("/usr/sbin/sshd")
_SECONDS = 10.0
_CONTAINER = ("/run/.containerenv", "/.dockerenv", "/run/systemd/container")
_SETTINGS = (
    "kernel.unprivileged_userns_clone",
    "kernel.apparmor_restrict_unprivileged_userns",
)


def look() -> MachineFacts:
    """Look at this machine, as this user."""
    return MachineFacts(
        is_root=os.geteuid() == 0,
        in_container=any(Path(mark).exists() for mark in _CONTAINER),
        fuse=_node(Path("/dev/fuse")),
        tun=_node(Path("/dev/net/tun")),
        namespaces=_namespaces(),
        settings={name: value for name in _SETTINGS if (value := _setting(name))},
        has_sshd=_SSHD.exists(),
    )


def require_emulation() -> None:
    """Raise LocalError that names, in one line, what the machine lacks for an emulated fleet."""
    for found in prerequisites.checks(look()):
        if found.verdict is Verdict.WRONG:
            raise LocalError(f"an emulated fleet needs {found.name}: {found.text}: {found.mend}")


def _node(path: Path) -> DeviceNode:
    """Open a node, which has no effect; a container may show one and still forbid it."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return DeviceNode(path.exists(), error.strerror or str(error))
    return DeviceNode()


def _namespaces() -> str:
    user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    command = ["unshare", *user, "--mount", "--net", "--pid", "--fork", "true"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else done.stderr.decode(errors="replace").strip() or "unshare failed"


def _setting(name: str) -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys", *name.split(".")).read_text().strip()
    return ""
