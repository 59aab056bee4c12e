# SPDX-License-Identifier: Apache-2.0
"""Edge: a guest under systemd, with disks that outlast a boot, into whose files ``make install`` puts both
daemons.

The device csd0 is a network namespace of the same guest, in which the agent's unit runs. So it is emulated,
but for the unit, its mounts, and its flash, which is a file system of its own.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .guest import Guest, GuestFailed, Result
from .machine import IMAGE, Hardware
from .repository import make_image
from .services import INIT
from .torch_image import PLACE

HOST, AGENT = "millpond-host", "millpond-agent"
PATIENCE = 240.0
"""Seconds for what takes some in an emulated machine that has the processors for itself."""
PROCESSOR = ("-cpu", "Westmere")
"""Without AVX, whose instructions cost QEMU more than they save."""
SLOT = "/var/lib/millpond/devices/csd0"
NETWORK = """\
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=ip netns add csd0
ExecStart=ip -n csd0 link set lo up
ExecStop=ip netns delete csd0
"""
APART = """\
[Unit]
Requires=csd0-network.service
After=csd0-network.service
[Service]
# The host's daemon on this machine has the directory above it, with an owner and mode of its own.
StateDirectory=
StateDirectory=millpond/agent
ExecStart=
ExecStart=nsenter --net=/run/netns/csd0 /opt/millpond/bin/millpond-agent --config /etc/millpond/agent.toml
"""
SLOWLY = "[Service]\nTimeoutStartSec=240\n"
"""An emulated processor under load needs longer to start a daemon than systemd waits by itself: 90 s."""
UNITS = "/etc/systemd/system"
TORCH_PATH = "/opt/millpond/lib/python3.11/site-packages/torch.pth"
PROVISION = f"""
set -e
rmdir /flash/lost+found
mkdir -p /var/lib/millpond/agent {UNITS}/{AGENT}.service.d {UNITS}/{HOST}.service.d
cp -a {SLOT}/etc/. /etc/millpond
sed -i 's|^socket = .*|socket = "{SLOT}/slot/nvme.sock"|; s|^state = .*|state = "/var/lib/millpond/agent"|' \
  /etc/millpond/agent.toml
"""


INSTALL = """
mount --rbind /dev "$0/dev"
mount -t proc proc "$0/proc"
exec chroot "$0" make -C /millpond install EXTRAS=agent,host
"""
FROM_WHEELS = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LC_ALL": "C.UTF-8",
    "PIP_NO_INDEX": "1",
    "PIP_FIND_LINKS": "/wheels",
}


def installed(folder: Path) -> tuple[Path, str]:
    """``make install`` in the guest's files, on this machine's processor and without a registry.

    Returns a folder with what is in the guest's places since then, for its layer, and what make said. Raises
    CalledProcessError.
    """
    root, layer = folder / "root", folder / "layer"
    make_image(folder / "millpond.squashfs", folder)
    images = {"": IMAGE / "root", "millpond": folder / "millpond", "wheels": IMAGE / "wheels"}
    for place, image in images.items():
        argv = ["unsquashfs", "-quiet", "-no-progress", "-d", str(root / place), f"{image}.squashfs"]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    argv = ["unshare", "-m", "sh", "-ec", INSTALL, str(root)]
    said = subprocess.run(argv, check=True, capture_output=True, text=True, env=FROM_WHEELS).stdout
    for place in ("opt/millpond", "usr/local/bin", "etc"):
        shutil.copytree(root / place, layer / "files" / place, symlinks=True)
    shutil.rmtree(root)
    return layer, said


def make_disk(image: Path, *options: str, size: int = 1 << 30) -> None:
    """An ext4. Raises CalledProcessError."""
    with image.open("wb") as file:
        file.truncate(size)
    subprocess.run(["mke2fs", "-q", "-F", "-t", "ext4", *options, str(image)], check=True)


class Server:
    """Off at first; ``close`` it in the end."""

    def __init__(self, folder: Path) -> None:
        self._disks = {name: folder / f"{name}.img" for name in ("layer", "flash")}
        layer, self.said = installed(folder)
        make_disk(self._disks["layer"], "-d", str(layer))
        make_disk(self._disks["flash"], "-O", "encrypt", size=1 << 28)
        self._torch = False
        self._guest: Guest | None = None

    @property
    def guest(self) -> Guest:
        """The guest, while it is on."""
        assert self._guest
        return self._guest

    def boot(self) -> None:
        """Switch it on, and wait until systemd has started all. Raises GuestFailed."""
        self._guest = Guest(
            Hardware(
                PROCESSOR,
                init=INIT,
                disks=self._disks,
                torch=self._torch,
                memory=2048,
                processors=2,
                network=False,
            )
        )
        self.sh("systemctl is-system-running --wait || true")

    def reboot(self) -> None:
        """As ``systemctl reboot`` does it; QEMU ends there and is started anew. Raises GuestFailed."""
        with self.guest.start(["systemctl", "reboot"]):
            self.guest.ends(PATIENCE)
        self.close()
        self.boot()

    def close(self) -> None:
        """Switch it off, as by its plug."""
        if self._guest:
            self._guest.close()
            self._guest = None

    def add_torch(self) -> None:
        """From the next boot on, the virtual environment finds torch, by a path file. Raises GuestFailed."""
        self._torch = True
        self.guest.put(TORCH_PATH, f"{PLACE}\n".encode())

    def provision(self) -> None:
        """A fleet of one device, whose files are in their places. Raises GuestFailed."""
        self.sh("millpond init --devices 1")
        self.sh(PROVISION)
        self.guest.put(f"{UNITS}/csd0-network.service", NETWORK.encode())
        self.guest.put(f"{UNITS}/{AGENT}.service.d/apart.conf", APART.encode())
        for unit in (HOST, AGENT):
            self.guest.put(f"{UNITS}/{unit}.service.d/slowly.conf", SLOWLY.encode())
        self.sh("systemctl daemon-reload")

    def sh(self, command: str, *, check: bool = True, seconds: float = PATIENCE) -> str:
        """What a shell command prints. Raises GuestFailed."""
        return self.guest.run(["sh", "-c", command], seconds=seconds, check=check, PYTHONPATH="").text

    def put_files(self, folder: str, files: Mapping[str, bytes]) -> None:
        """Write files by name into a folder, which is made. Raises GuestFailed."""
        self.sh(f"mkdir -p {folder}")
        for name, content in files.items():
            self.guest.put(f"{folder}/{name}", content)

    def add_user(self, name: str, uid: int, *groups: str) -> None:
        """An ordinary user with a home that is closed to others. Raises GuestFailed."""
        self.sh(f"echo {name}:x:{uid}:{uid}::/home/{name}:/bin/sh >>/etc/passwd")
        self.sh(f"echo {name}:x:{uid}: >>/etc/group")
        for group in groups:
            self.sh(f"sed -i 's/^{group}:.*/&{name}/' /etc/group && grep '^{group}:.*{name}$' /etc/group")
        self.sh(f"mkdir -p /home/{name} && chown {uid}:{uid} /home/{name} && chmod 0700 /home/{name}")

    def as_user(self, name: str, command: str, seconds: float = PATIENCE) -> Result:
        """How a shell command of the user ends. Raises GuestFailed if it does not."""
        user = f"setpriv --reuid={name} --regid={name} --init-groups env HOME=/home/{name}"
        argv = ["sh", "-c", f"cd /home/{name} && exec {user} sh -c '{command}'"]
        return self.guest.run(argv, seconds=seconds, check=False, PYTHONPATH="")

    def show(self, unit: str, name: str) -> str:
        """A property of a unit."""
        return self.sh(f"systemctl show -P {name} {unit}")

    def journal(self, unit: str) -> str:
        """What the unit, and systemd of it, have said since the boot."""
        return self.sh(f"journalctl --boot --no-pager --output=cat --unit={unit}")

    def until(self, command: str) -> None:
        """Until the command succeeds; with the journal of both units if it does not. Raises GuestFailed."""
        deadline = time.monotonic() + PATIENCE
        while self.guest.run(["sh", "-c", command], seconds=PATIENCE, check=False, PYTHONPATH="").code:
            if time.monotonic() > deadline:
                said = "\n".join(self.journal(unit) for unit in (HOST, AGENT))
                raise GuestFailed(f"not within {PATIENCE} s: {command}\n{said}")
            time.sleep(1)

    def device(self) -> dict[str, Any]:
        """What ``millpond devices`` says of csd0. Raises GuestFailed."""
        (found,) = json.loads(self.sh("millpond devices --format json"))["devices"]
        return dict(found)

    def wait_ready(self, more_than: int = 0) -> int:
        """Until the daemon that runs now has found csd0 ready more often; how often. Raises GuestFailed."""
        pid = self.show(HOST, "MainPID")
        count = f"journalctl --boot --unit={HOST} _PID={pid} | grep --count 'csd0 is ready'"
        self.until(f'test "$({count})" -gt {more_than}')
        return int(self.sh(count))
