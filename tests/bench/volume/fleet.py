# SPDX-License-Identifier: Apache-2.0
"""Edge (an emulated fleet): the host's ways to a device's files: millpond and sshfs, encrypted or not."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from bench.experiment import Unmeasured
from bench.tunnel.namespace import Traffic
from bench.tunnel.plain_routes import wait_for_line
from bench.tunnel.route import RouteFailed as NotStarted
from bench.tunnel.ssh_routes import CIPHER
from bench.volume.passthrough import __file__ as passthrough
from bench.volume.plain_server import __file__ as plain_server
from bench.volume.route import Mount, Route, RouteFailed, native, served
from millpond.fs.store.layout import PUBLIC
from millpond.host.fleet import provisioning
from millpond.host.fleet.mounts import command
from millpond.images.ondevice.sshd_config import HOME, USER
from system.support import MILLPOND, Emulation, create, why_not

EMULATION = (
    "a host and an emulated device on one machine's processors; tunnel, agent, SSH server and mounts are "
    "real; the SSH server shows the device's own mount, that without encryption the files where they lie"
)
DEVICE, FOLDER = "csd0", "bench"
PROGRAMS = 8
"""How many use the mount at once, where several do."""
_PORT = "7001"
_SFTP_SERVER = Path("/usr/lib/openssh/sftp-server")


@dataclass(frozen=True, slots=True)
class Host:
    """Of a running fleet with one device; ``backing`` is where the files lie that all routes show."""

    emulation: Emulation
    scratch: Path
    backing: Path

    @property
    def address(self) -> str:
        """The device's, in the tunnel."""
        return self.emulation.fleet.addresses(DEVICE).device.partition("/")[0]

    def routes(self, *keys: str) -> tuple[Route, ...]:
        """Those of the keys."""
        found = {
            "millpond": Route("millpond", "millpond's mount on the host", lambda: mounted(self)),
            "together": Route(
                "together", f"{PROGRAMS} programs at once", lambda: mounted(self, programs=PROGRAMS)
            ),
            "one": Route("one", "one program", lambda: mounted(self)),
            "sshfs": Route("sshfs", f"sshfs ({CIPHER})", lambda: _sshfs(self)),
            "plain": Route("plain", "sshfs without encryption (directport)", lambda: _plain(self)),
            "passthrough": Route(
                "passthrough", "a plain FUSE passthrough, a request an operation", lambda: _passthrough(self)
            ),
            "cached": Route(
                "cached",
                "a plain FUSE passthrough that reads through the kernel's page cache",
                lambda: _passthrough(self, "mount-cached"),
            ),
            "native": Route("native", "the backing file system", lambda: native(self.backing)),
        }
        return tuple(found[key] for key in keys)

    def traffic(self) -> Traffic:
        """Of the tunnel, as the host's interface counts it."""
        interface = self.emulation.fleet.interface(DEVICE)
        for line in Path(f"/proc/{self.emulation.daemon().pid}/net/dev").read_text().splitlines():
            name, _, counters = line.partition(":")
            if name.strip() == interface:
                return Traffic(int(counters.split()[0]), int(counters.split()[8]))
        raise RouteFailed(f"the host has no interface {interface}")

    def all_processes(self) -> int:
        """The first process of the emulated machine."""
        assert self.emulation.process
        return self.emulation.process.pid


@contextlib.contextmanager
def fleet(
    scratch: Path, flash: Callable[[Path], AbstractContextManager[object]] = contextlib.nullcontext
) -> Iterator[Host]:
    """Switched on, until the end of the block; nothing is searched for canaries. ``flash`` may mount another
    file system at the flash's directory. Raises RouteFailed, and Unmeasured where there can be no fleet.
    """
    if complaint := why_not():
        raise Unmeasured(f"no fleet: {complaint}")
    base = scratch / "fleet"
    base.mkdir()
    emulation = create(base, [DEVICE])
    provisioning.write_agent_config(emulation.fleet, DEVICE, {})
    top = emulation.fleet.device_directory(DEVICE) / "flash"
    try:
        with flash(top), _switched_on(emulation, top / PUBLIC / FOLDER):
            yield Host(emulation, scratch, top / PUBLIC / FOLDER)
    finally:
        shutil.rmtree(base)


@contextlib.contextmanager
def _switched_on(emulation: Emulation, backing: Path) -> Iterator[None]:
    backing.mkdir()
    backing.chmod(0o777)  # each route writes as another user
    try:
        emulation.start()
        emulation.wait_ready()
        yield
    except AssertionError as error:
        raise RouteFailed(str(error)) from error
    finally:
        emulation.stop()


def _in_network_of(pid: int) -> list[str]:
    return ["nsenter", f"--net=/proc/{pid}/ns/net", "--"]


@contextlib.contextmanager
def mounted(host: Host, *, programs: int = 1, timeout: float | None = None) -> Iterator[Mount]:
    """Millpond's mount on the host, with the mount option ``timeout`` in seconds. Raises RouteFailed."""
    mountpoint = host.scratch / "host-mount"
    argv = [*command(host.emulation.directory, DEVICE, mountpoint, timeout), "--die-with-parent"]
    with served(argv, mountpoint, "ready") as server:
        mount = _mount(host, mountpoint / PUBLIC / FOLDER, (server.pid,))
        yield replace(mount, programs=programs)


def _mount(host: Host, folder: Path, near: Iterable[int], *far: int) -> Mount:
    return Mount(folder, host.backing, tuple(near), (host.all_processes(), *far), host.traffic)


def _children() -> set[int]:
    """This process's; as the first of its namespace it gets orphans, too."""
    return {process.pid for process in psutil.Process().children()}


def _program() -> str:
    found = shutil.which("sshfs")
    if found is None:
        raise RouteFailed("sshfs is not installed")
    return found


def ssh_options(host: Host) -> list[str]:
    """Options of ssh and sshfs with which the device's user comes in."""
    known = host.emulation.fleet
    options = {
        "IdentityFile": known.ssh_key,
        "UserKnownHostsFile": known.known_hosts,
        "HostKeyAlias": DEVICE,
        "Ciphers": CIPHER,
        "BatchMode": "yes",
    }
    return [word for name, value in options.items() for word in ("-o", f"{name}={value}")]


@contextlib.contextmanager
def _sshfs(host: Host) -> Iterator[Mount]:
    """To the device's SSH server, which shows the device's own mount."""
    source = f"{USER.user}@{host.address}:{HOME}/{PUBLIC}/{FOLDER}"
    mountpoint = host.scratch / "sshfs-mount"
    argv = [*_in_network_of(host.emulation.daemon().pid), _program(), "-f", "-F", "/dev/null"]
    argv += ssh_options(host)
    before = _children()
    with served([*argv, source, str(mountpoint)], mountpoint):
        yield _mount(host, mountpoint, _children() - before)  # sshfs makes an orphan of its ssh


@contextlib.contextmanager
def _plain(host: Host) -> Iterator[Mount]:
    """To a server in the device's network that shows the files where they lie."""
    mountpoint = host.scratch / "plain-mount"
    argv = [*_in_network_of(host.emulation.daemon().pid), _program(), "-f", "-o", f"directport={_PORT}"]
    with (
        _plain_server(host) as far,
        served([*argv, f"{host.address}:{host.backing}", str(mountpoint)], mountpoint) as server,
    ):
        yield _mount(host, mountpoint, (server.pid,), far)


@contextlib.contextmanager
def _passthrough(host: Host, mode: str = "mount") -> Iterator[Mount]:
    """To a server in the device's network that performs each request of the kernel."""
    mountpoint = host.scratch / "passthrough-mount"
    near = [
        *_in_network_of(host.emulation.daemon().pid),
        MILLPOND[0],
        passthrough,
        mode,
        host.address,
        _PORT,
    ]
    far = [MILLPOND[0], passthrough, "serve", host.address, _PORT, str(host.backing)]
    with _in_board(host, far) as server, served([*near, str(mountpoint)], mountpoint, "ready") as client:
        yield _mount(host, mountpoint, (client.pid,), server)


@contextlib.contextmanager
def _plain_server(host: Host) -> Iterator[int]:
    if not _SFTP_SERVER.exists():
        raise RouteFailed(f"there is no {_SFTP_SERVER}")
    argv = [MILLPOND[0], plain_server, host.address, _PORT, str(_SFTP_SERVER)]
    with _in_board(host, argv) as pid:
        yield pid


@contextlib.contextmanager
def _in_board(host: Host, argv: Sequence[str]) -> Iterator[int]:
    """Run a server in the device's network, once it listens. Yields its process id. Raises RouteFailed."""
    argv = [*_in_network_of(host.emulation.pid_one(DEVICE).pid), *argv]
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        wait_for_line(process)
        yield process.pid
    except NotStarted as error:
        raise RouteFailed(str(error)) from error
    finally:
        process.kill()
        process.communicate()
