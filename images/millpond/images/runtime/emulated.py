# SPDX-License-Identifier: Apache-2.0
"""Edge: an emulated board: a process tree in namespaces of its own, real in all but the silicon.

It has its own network, processes, host name and root directory; in it run the same agent and SSH server
as on a real board. Its slot, a directory shared with the host, carries the tunnel's socket: the PCI slot.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from millpond.base.errors import LocalError
from millpond.images.ondevice import sshd, sshd_config
from millpond.images.runtime import emulated_lan
from millpond.images.runtime.emulated_init import EmulatedInit
from millpond.images.runtime.emulated_lan import BoardLink
from millpond.linux.confinement.sandbox import TMPFS, Bind, Sandbox, python_binds, spawn, system_binds
from millpond.linux.logs import rotate
from millpond.linux.network import allow_low_ports, loopback_up
from millpond.linux.zygote import forked

log = logging.getLogger(__name__)

SLOT = "/run/slot"
IDENTITY = "/etc/millpond"
FLASH = "/flash"
VOLUME = "/volume"
STATE = "/var/lib/millpond"
AGENT = (sys.executable, "-m", "millpond.agent.daemon", "--config", f"{IDENTITY}/agent.toml")
_PROGRAMS = (
    "millpond.agent.daemon",
    "millpond.agent.volume_server",
    "millpond.fs.mount.device",
    "millpond.images.ondevice.sshd",
    "millpond.tunnel.__main__",
    "pyroute2",
    "pyroute2.netlink.exceptions",
)


def load_programs() -> None:
    """Load the programs that boards run, before the first is switched on: all boards share their memory."""
    forked.load(_PROGRAMS)


@dataclass(frozen=True, slots=True)
class BoardSpec:
    """A board to emulate: its name, the directory of its ``etc``, ``flash``, ``state`` and ``slot``, and its
    link to the devices' LAN, if it has one.
    """

    name: str
    directory: Path
    agent: tuple[str, ...] = AGENT
    lan: BoardLink | None = None


class EmulatedBoard:
    """A board that can be switched on and off. Call from one thread: boards die with it."""

    off_seconds = 10.0

    def __init__(self, spec: BoardSpec) -> None:
        self.spec = spec
        self._pid: int | None = None

    def power_on(self) -> None:
        """Start the board; returns at once."""
        for part in ("etc", "flash", "state", "slot"):
            if not (self.spec.directory / part).is_dir():
                raise LocalError(f"{self.spec.name} has no directory '{part}': run 'millpond init' first")
        rotate(self.spec.directory / "console.log")
        self._pid = spawn(_sandbox(self.spec), self._body)
        if self.spec.lan:
            emulated_lan.attach(self.spec.name, self._pid, self.spec.lan.shape)

    def _body(self) -> int:
        console = os.open("/dev/console.log", os.O_WRONLY | os.O_APPEND)
        for descriptor in (1, 2):
            os.dup2(console, descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        logging.basicConfig(level=logging.INFO, format="init: %(message)s", force=True)
        loopback_up()
        allow_low_ports()
        if self.spec.lan:
            emulated_lan.configure(self.spec.lan)
        public = Path(VOLUME, "public")
        servers = [sshd.command(name, Path(IDENTITY), public) for name in ("admin", "user")]
        return EmulatedInit(self.spec.agent, servers).run()

    @property
    def name(self) -> str:
        """Return the device's name."""
        return self.spec.name

    @property
    def pids(self) -> set[int]:
        """Return the board's outermost process while it is on."""
        return {self._pid} if self._pid else set()

    def died(self) -> bool:
        """Return whether the board has gone off by itself; true once."""
        if self._pid is None or os.waitpid(self._pid, os.WNOHANG)[0] == 0:
            return False
        self._pid = None
        return True

    def shut_down(self) -> None:
        """Tell the board to go off; returns at once."""
        if self._pid is not None:
            os.kill(self._pid, signal.SIGTERM)

    def power_off(self, patience: float) -> None:
        """Wait ``patience`` seconds until the board is off, then cut its power."""
        deadline = time.monotonic() + patience
        while self._pid is not None and not self.died():
            if time.monotonic() > deadline:
                log.warning("%s does not shut down; its power is cut", self.spec.name)
                os.kill(self._pid, signal.SIGKILL)
                deadline = math.inf
            time.sleep(0.02)


def _sandbox(spec: BoardSpec) -> Sandbox:
    directory = spec.directory
    console = directory / "console.log"
    console.touch()
    writable = {
        directory / "flash": FLASH,
        directory / "state": STATE,
        directory / "slot": SLOT,
        console: "/dev/console.log",
        Path("/dev/fuse"): "/dev/fuse",
        Path("/dev/net/tun"): "/dev/net/tun",
    }
    return Sandbox(
        binds=(
            *system_binds(),
            *python_binds(),
            Bind(directory / "etc", Path(IDENTITY)),
            *(Bind(source, Path(target), read_only=False) for source, target in writable.items()),
        ),
        tmpfs=(*TMPFS, Path("/root")),
        files=sshd_config.accounts(machine=spec.name)
        | {"/etc/hostname": f"{spec.name}\n", "/var/log/lastlog": ""},  # sshd complains to root without it
        links={"/etc/mtab": "/proc/self/mounts"},
        hostname=spec.name,
        own_network=True,
        own_pids=True,
        new_session=True,
    )
