# SPDX-License-Identifier: Apache-2.0
"""Edge (namespaces, /dev/fuse, /dev/net/tun, nftables): tries what millpond asks of the kernel.

The trial is made in namespaces of its own: its mount, its interface and its tables end with it, and nothing
outside sees them.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from millpond.base.deadline import Deadline
from millpond.base.errors import LocalError
from millpond.base.schema import dump, load
from millpond.fs.fuse.server import passthrough_refusal
from millpond.host.remote.doctor.facts import KernelTrial
from millpond.linux import child
from millpond.linux.confinement import landlock
from millpond.linux.confinement.sandbox import Sandbox, accept_signals, spawn
from millpond.linux.netlink.nftables import InputGuard
from millpond.tunnel.netdev.tun import Tun
from millpond.tunnel.ring.link_params import VNET_HEADER

SECONDS = 10.0
_NAME = "mp-doctor"
_PORTS = range(32768, 61000)


def run() -> KernelTrial | None:
    """Make the trial. Returns None if it has not ended in time, or could not begin. Call it in a process that
    may make namespaces, and has one thread.
    """
    with tempfile.TemporaryDirectory(prefix="millpond-doctor-") as folder:
        reader, writer = os.pipe2(os.O_CLOEXEC)
        pid = spawn(Sandbox(own_network=True, own_pids=True), lambda: _report(writer, Path(folder)))
        os.close(writer)
        try:
            return load(KernelTrial, json.loads(child.first_line(reader, SECONDS)), "trial")
        except (TimeoutError, ValueError, LocalError):
            return None
        finally:
            os.close(reader)
            child.end(pid)


def _report(writer: int, folder: Path) -> int:
    accept_signals()
    found = KernelTrial(
        tun=_fault(_try_tun),
        firewall=_fault(_try_firewall),
        landlock=_fault(landlock.why_off),
        passthrough=_fault(lambda: _try_passthrough(folder)),
    )
    os.write(writer, json.dumps(dump(found)).encode() + b"\n")
    return 0


def _fault(attempt: Callable[[], str]) -> str:
    """Return the reason that an attempt returns or fails with."""
    try:
        return attempt()
    except LocalError as error:
        return str(error)
    except OSError as error:
        return error.strerror or str(error)


def _try_tun() -> str:
    os.close(Tun(_NAME, VNET_HEADER, Deadline.after(SECONDS / 2)).descriptor)
    return ""


def _try_firewall() -> str:
    InputGuard(_NAME, 0, [_NAME], _PORTS).close()
    return ""


def _try_passthrough(folder: Path) -> str:
    mountpoint, backing = folder / "mount", folder / "backing"
    mountpoint.mkdir()
    backing.mkdir()
    descriptor = os.open(backing, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return passthrough_refusal(mountpoint, descriptor)
    finally:
        os.close(descriptor)
