"""A fleet with a device in QEMU, and what tests do with it."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path

from millpond.host import demo_data, provision, qemu_devices
from millpond.host.fleet import Fleet

from ..system.support import Emulation, Result

NAME = "qemu0"
BOOT_SECONDS = 400.0
"""On a machine that does other things too; a quiet one takes a tenth of it."""
ROOT = Path(__file__).parents[2]


@dataclass
class Board:
    """The emulation, and the device in QEMU in it."""

    emulation: Emulation
    image: Path

    @property
    def fleet(self) -> Fleet:
        """Its fleet, read again."""
        return self.emulation.fleet

    @property
    def directory(self) -> Path:
        """The device's own."""
        return self.fleet.device_directory(NAME)

    def wait_ready(self, seconds: float = BOOT_SECONDS) -> None:
        """Wait until all devices are."""
        self.emulation.wait_ready(seconds)

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

    def put(self, folder: Path, target: str) -> None:
        """The files of ``folder`` on the device at ``target``, by root: so private ones get there."""
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            tar.add(folder, ".")
        argv = [sys.executable, "-m", "millpond.host.main", "run", "--fleet", str(self.fleet.directory)]
        line = f"mkdir -p {target} && tar -x --no-same-owner -C {target}"
        subprocess.run(
            [*argv, "--admin", NAME, "--", line], input=archive.getvalue(), check=True, timeout=300
        )

    def start(self, *arguments: str | Path) -> subprocess.Popen[bytes]:
        """A command of the fleet's in the background; ``said`` is what it has printed."""
        command, *rest = map(str, arguments)
        argv = [
            sys.executable,
            "-m",
            "millpond.host.main",
            command,
            "--fleet",
            str(self.fleet.directory),
            *rest,
        ]
        with self._output.open("wb") as output:
            return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    @property
    def _output(self) -> Path:
        return self.emulation.base / "command.log"

    def said(self, process: subprocess.Popen[bytes]) -> str:
        """What the command in the background has printed. Fails if it has ended."""
        text = self._output.read_text(errors="replace")
        assert process.poll() is None, text
        return text

    def cut_power(self) -> None:
        """Kill QEMU; the backplane switches the device on again."""
        for process in self.emulation.processes():
            if process.name().startswith("qemu-system"):
                process.kill()
                process.wait(30)
        # Until the host has missed it, it counts as ready.
        eventually(lambda: self.emulation.devices()[NAME].state != "ready", "the loss of the device", 60)

    def boots(self) -> int:
        """How often the first program has begun since QEMU was started."""
        return len(re.findall(r"^millpond: slot [AB], root", self.console(), re.MULTILINE))


def create(base: Path, image: Path) -> Board:
    """A fleet, switched off: csd0, emulated, and qemu0."""
    emulation = Emulation(base)
    provision.create(emulation.directory, "image", ["csd0"])
    qemu_devices.ensure(emulation.fleet, 1, image)
    return Board(emulation, image)


def give_data(board: Board) -> Path:
    """Digits for both devices, private ones of their own; the folder of the test set."""
    base = board.emulation.base
    division = demo_data.divide(demo_data.load(), 2, 7)
    demo_data.write(base / "test", division.test)
    flash = board.fleet.device_directory("csd0") / "flash"
    demo_data.write(flash / "private" / "digits", division.private[0])
    demo_data.write(flash / "public" / "digits", division.public[0])
    for part, samples in (("private", division.private[1]), ("public", division.public[1])):
        demo_data.write(base / "staged" / part, samples)
        board.put(base / "staged" / part, f"/volume/{part}/digits")
    return base / "test"


@dataclass(frozen=True)
class Builder:
    """Builds images below ``output``."""

    output: Path
    cache: Path
    options: tuple[str, ...]

    def build(self, name: str, serial: int, source: Path = ROOT) -> Path:
        """An image of ``source``; its folder."""
        argv = [sys.executable, "-m", "millpond.images.build", "--output", str(self.output / name)]
        argv += ["--serial", str(serial), "--cache", str(self.cache), "--source", str(source), *self.options]
        subprocess.run(argv, check=True, timeout=900)
        return self.output / name / "qemu-virt"


def eventually(condition: object, what: str, seconds: float) -> None:
    """Fails if ``condition`` does not become true in time."""
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.5)
