"""Edge: a fleet of one device in QEMU, switched on as a user does it, and the time that it takes."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from millpond.host import provision, qemu_devices, ssh
from millpond.host.client import Client
from millpond.host.fleet import Fleet, read
from millpond.images.ssh_settings import ADMIN
from millpond.wire.control import SSH_ADMIN_PORT
from millpond.wire.errors import MillpondError

NAME = "qemu0"
BOOT_SECONDS = 600.0
MILLPOND = (sys.executable, "-m", "millpond.host.main")


@dataclass
class Machine:
    """A fleet that is being emulated in the folder ``directory``."""

    directory: Path
    process: subprocess.Popen[bytes]

    def ready(self) -> bool:
        """Whether the device answers the host."""
        with contextlib.suppress(MillpondError), Client(self.directory) as client:
            return all(device.state == "ready" for device in client.devices())
        return False

    def wait_ready(self) -> float:
        """Seconds from now until it answers. Raises TimeoutError."""
        began = time.monotonic()
        while not self.ready():
            if time.monotonic() - began > BOOT_SECONDS or self.process.poll() is not None:
                raise TimeoutError(f"{NAME} is not ready: see {self.directory}/devices/{NAME}/console.log")
            time.sleep(0.2)
        return time.monotonic() - began

    def admin(self, line: str) -> str:
        """What root's command on the device prints. Raises MillpondError."""
        out, err = io.BytesIO(), io.BytesIO()
        with (
            Client(self.directory) as client,
            client.dial(NAME, SSH_ADMIN_PORT) as sock,
            ssh.connected(client.fleet, NAME, sock, ADMIN) as transport,
        ):
            ssh.Command(transport, line).run(None, out, err, timeout=120)
        return out.getvalue().decode()

    def running(self) -> dict[str, object]:
        """What the device says of its slot. Raises MillpondError, ValueError."""
        found: dict[str, object] = json.loads(self.admin("python3 -m millpond.images.slots status"))
        return found

    def update(self, image: Path) -> subprocess.Popen[bytes]:
        """Begin an update."""
        argv = [*MILLPOND, "update", "--fleet", str(self.directory), "--allow-older", NAME, str(image)]
        with (self.directory / "update.log").open("wb") as log:
            return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def said(self) -> str:
        """What the last update has printed."""
        return (self.directory / "update.log").read_text(errors="replace")

    def cut_power(self) -> None:
        """Kill QEMU; the backplane switches the device on again."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name().startswith("qemu-system"):
                    process.kill()


def make_fleet(directory: Path, image: Path) -> Fleet:
    """A fleet with the device alone."""
    provision.create(directory, "bench", [])
    return qemu_devices.ensure(read(directory), 1, image)


@contextlib.contextmanager
def emulated(directory: Path) -> Iterator[Machine]:
    """Switch the fleet on; off again in the end."""
    with (directory / "emulate.log").open("ab") as log:
        argv = [*MILLPOND, "emulate", "--fleet", str(directory)]
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield Machine(directory, process)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
