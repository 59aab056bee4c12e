# SPDX-License-Identifier: Apache-2.0
"""A fleet with a device in QEMU, and its use by tests and benchmarks."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from tests.forking import Result
from tests.waiting import eventually

from millpond.host.emulation import qemu_devices
from millpond.host.fleet import provisioning
from millpond.host.fleet.directory import Fleet

from .support import MILLPOND, Emulation

NAME = "qemu0"
BOOT_SECONDS = 600.0
"""On a machine that does other things too; a quiet one takes a tenth of it."""


@dataclass
class Board:
    """The emulation, and the device in QEMU in it."""

    emulation: Emulation

    @property
    def fleet(self) -> Fleet:
        """Its fleet, read again."""
        return self.emulation.fleet

    @property
    def directory(self) -> Path:
        """The device's own."""
        return self.fleet.device_directory(NAME)

    def wait_ready(self, seconds: float = BOOT_SECONDS) -> None:
        """Wait until all devices are, and the one in QEMU has started its SSH servers, which come after."""
        self.emulation.wait_ready(seconds)
        eventually(self._lets_root_in, "an SSH server of the device's", 60, 1.0)

    def _lets_root_in(self) -> bool:
        return self.emulation.millpond("run", "--admin", NAME, "--", "true").code == 0

    def console(self) -> str:
        """All that the device has written to its console."""
        return (self.directory / "console.log").read_text(errors="replace")

    def millpond(self, *arguments: str | Path, timeout: float = 300.0) -> Result:
        """A command of the fleet's that succeeds."""
        command, *rest = map(str, arguments)
        done = self.emulation.millpond(command, *rest, timeout=timeout)
        assert done.code == 0, f"{arguments}: {done.code}\n{done.out}\n{done.err}\n{self.console()[-4000:]}"
        return done

    def user(self, line: str) -> str:
        """What a command of the ordinary user's prints."""
        return self.millpond("run", NAME, "--", line).out.strip()

    def admin(self, line: str) -> str:
        """What root's prints."""
        return self.millpond("run", "--admin", NAME, "--", line).out.strip()

    def running(self) -> dict[str, object]:
        """What the device says of its slot."""
        status: dict[str, object] = json.loads(
            self.admin("python3 -m millpond.images.ondevice.boot_entries status")
        )
        return status

    @contextlib.contextmanager
    def updating(self, image: Path) -> Iterator[subprocess.Popen[bytes]]:
        """An update to an image of any age; what is left of the command in the end is killed."""
        argv = [*MILLPOND, "update", "--fleet", str(self.fleet.directory), "--allow-older", NAME, str(image)]
        with self._output.open("wb") as output:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    @property
    def _output(self) -> Path:
        return self.emulation.base / "update.log"

    def said(self) -> str:
        """What the last ``updating`` has printed."""
        return self._output.read_text(errors="replace")

    def cut_power(self) -> None:
        """Kill QEMU; the backplane switches the device on again."""
        for process in self.emulation.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # others end at any time
                if process.name().startswith("qemu-system"):
                    process.kill()
                    process.wait(30)
        eventually(self._is_missed, "the loss of the device", 60, 0.1)  # until then it counts as ready

    def _is_missed(self) -> bool:
        device = self.emulation.devices().get(NAME)
        return device is not None and device.state != "ready"

    def boots(self) -> int:
        """How often the first program has begun since QEMU was started."""
        return len(re.findall(r"^millpond: slot [AB], root", self.console(), re.MULTILINE))


def create(base: Path, image: Path, others: Sequence[str] = ()) -> Board:
    """A fleet, switched off: ``others``, which are emulated, and qemu0."""
    emulation = Emulation(base)
    provisioning.create(emulation.directory, "image", others)
    qemu_devices.ensure(emulation.fleet, 1, image)
    return Board(emulation)
