# SPDX-License-Identifier: Apache-2.0
"""Edge (processes): the ways to a volume's files on its device, with the server and the mount of an agent."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from bench.volume.route import Mount, Route, RouteFailed, Server, native, served
from bench.volume.tools import Tools, file_system
from millpond.agent.config import AgentConfig, read
from millpond.agent.gate import LedgerCounters
from millpond.agent.volume import VolumeServer, lock_socket
from millpond.fs.fuse.mounts import is_volume, top_mount
from millpond.fs.store.layout import PRIVATE, PUBLIC, prepare
from millpond.linux.confinement.sandbox import Bind, Sandbox, python_binds, system_binds


@dataclass(frozen=True, slots=True)
class Device:
    """A volume on this machine. ``folder`` holds its flash, the agent's state and configuration."""

    folder: Path

    @property
    def flash(self) -> Path:
        """The directory with the public and the private part."""
        return self.folder / "flash"

    @property
    def config(self) -> AgentConfig:
        """The agent's configuration."""
        return read(self._toml)

    @property
    def _toml(self) -> Path:
        return self.folder / "agent.toml"

    @property
    def note(self) -> str:
        """The emulation."""
        return (
            f"the device is this machine, its flash a folder on {file_system(self.flash)}; there is no tunnel"
        )

    def make(self) -> None:
        """Make the flash and the configuration."""
        prepare(self.flash)
        (self.folder / "state").mkdir()
        places = {"flash": self.flash, "volume": self.folder / "volume", "state": self.folder / "state"}
        lines = [f'{name} = "{place}"' for name, place in places.items()]
        link = '[link]\nsocket = "/nowhere"\naddress = "10.77.0.2/30"'  # no agent runs that would listen
        self._toml.write_text("\n".join(['name = "bench"', *lines, link, ""]))

    def routes(self, *keys: str) -> tuple[Route, ...]:
        """Return the routes of the keys; ``native`` is to the public part."""
        found: dict[str, tuple[str, Callable[[], AbstractContextManager[Mount]]]] = {
            "private": ("the volume's private part", lambda: _private(self)),
            "public": ("the device's mount of the public part, with its server", lambda: _public(self)),
            "worker": ("the public folder in the sandbox of a job's worker", lambda: _worker(self)),
            "native": ("the backing file system", lambda: native(self.flash / PUBLIC)),
        }
        return tuple(Route(key, *found[key]) for key in keys)

    @contextlib.contextmanager
    def mounted(self) -> Iterator[Server]:
        """The delegations' server and the mount of the public part, as the agent starts them."""
        config, mountpoint = self.config, Path(self.config.volume)
        argv = [sys.executable, "-m", "millpond.fs.mount.device", config.flash, config.volume]
        argv += ["--name", config.name, "--locks", str(lock_socket(config)), "--binding", "raw"]
        with self._server(config), served(argv, mountpoint, "ready") as mount:
            yield mount
            self._check_server()

    @contextlib.contextmanager
    def _server(self, config: AgentConfig) -> Iterator[None]:
        Path(config.state, "leases").unlink(missing_ok=True)  # or it would wait for those of the one before
        with _standard_error(self.folder / "server.log"):
            server = VolumeServer(config, self._toml, LedgerCounters.in_memory())
        try:
            yield
        finally:
            server.stop()

    def _check_server(self) -> None:
        """Raise RouteFailed unless the server has started and said nothing of a failure."""
        log = (self.folder / "server.log").read_text()
        if "Traceback" in log or "Landlock" not in log:
            raise RouteFailed(f"the volume's server: {(log.strip().splitlines() or ['said nothing'])[-1]}")


def make_device(tools: Tools, name: str) -> Device:
    """Make a volume in a new folder."""
    device = Device(tools.folder(name))
    device.make()
    return device


@contextlib.contextmanager
def _private(device: Device) -> Iterator[Mount]:
    with device.mounted() as server:
        folder, backing = Path(device.config.volume, PRIVATE), device.flash / PRIVATE
        kind, _ = top_mount(folder)
        if kind != file_system(backing) or not os.path.samestat(folder.stat(), backing.stat()):
            raise RouteFailed(f"the private part is no mount of the flash: {kind or 'none'}")
        yield Mount(folder, backing, (server.pid,), how=server.said.partition("ready: ")[2])


@contextlib.contextmanager
def _public(device: Device) -> Iterator[Mount]:
    with device.mounted() as server:
        folder = Path(device.config.volume, PUBLIC)
        if not is_volume(folder):
            raise RouteFailed("the public part is not a mount of millpond's")
        how = server.said.partition("ready: ")[2]
        yield Mount(folder, device.flash / PUBLIC, (server.pid,), how=how)


@contextlib.contextmanager
def _worker(device: Device) -> Iterator[Mount]:
    """As ``JobWorker`` builds it for a job with public data alone; no host has made a name meanwhile."""
    config = device.config
    public = Bind(Path(config.flash, PUBLIC), Path(config.volume, PUBLIC))
    sandbox = Sandbox(
        binds=(*system_binds(), *python_binds(), public),
        own_network=True,
        own_pids=True,
        uid=config.users.worker,
    )
    with device.mounted() as server:
        yield Mount(public.target, public.source, (server.pid,), sandbox=sandbox)


@contextlib.contextmanager
def _standard_error(log: Path) -> Iterator[None]:
    """Have programs that are started meanwhile write their standard error to ``log``."""
    kept = os.dup(2)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
