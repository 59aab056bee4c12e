# SPDX-License-Identifier: Apache-2.0
"""Entry: the command 'flash': writes an image to a disk, a file or a BlueField card."""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from millpond.base.errors import LocalError
from millpond.base.text import printable
from millpond.host.cli.exits import Interrupted
from millpond.host.cli.options import DEFAULT_FLEET, FleetOption, FormatOption, new_app
from millpond.host.fleet import directory as fleets
from millpond.host.terminal import printing, tables
from millpond.host.terminal.printing import Format
from millpond.host.terminal.progress_lines import ProgressView, view
from millpond.images import boards
from millpond.images.boards import EMULATED
from millpond.images.flash import bluefield
from millpond.images.flash.block_device import TargetDescription
from millpond.images.flash.open_target import opened
from millpond.images.flash.writer import Phase, amount, flash
from millpond.images.format import locate, seed, volume_disk
from millpond.images.format.manifest import BLOCK, Manifest

app = new_app()

_OWN_NAMES = ("/dev/disk/by-id/", "/dev/disk/by-path/")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True, slots=True)
class Flashed:
    """The result of flashing. ``reread`` is false where the kernel goes on with the old partition table."""

    target: str
    bytes_written: int
    seconds: float
    verified: bool
    device: str | None
    reread: bool = True
    untested: str | None = None


Agree = Callable[[str, str], None]
"""Asks a question; the answer is yes or, where the second text is not empty, that text. Raises LocalError."""


@app.command("flash")
def command(
    image: Annotated[
        Path, typer.Argument(metavar="IMAGE", help="The .img file, its .json file, or the folder of both.")
    ],
    target: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="TARGET",
            help="A disk (/dev/disk/by-id/... is safest), a file, or rshim0 (BlueField; UNTESTED).",
        ),
    ],
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="Write the identity of this device of the fleet, too.")
    ] = None,
    volume: Annotated[
        str | None,
        typer.Option(
            "--volume-disk",
            metavar="/dev/disk/by-id/...",
            help="The device's disk for its volume, on boards where that is not the boot disk.",
        ),
    ] = None,
    erase_volume: Annotated[
        bool, typer.Option("--erase-volume", help="Allow the first boot to erase that disk.")
    ] = False,
    size: Annotated[
        str | None,
        typer.Option(
            metavar="8G", help="Make the target file larger than the image (K, M, G, T; powers of 1024)."
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    fleet_directory: FleetOption = DEFAULT_FLEET,
    output: FormatOption = Format.TEXT,
) -> None:
    """Write an image to a disk or a file, and verify it. Its old contents are lost. The command asks once.

    After a failure or Ctrl-C the target has no partition table, and the same command begins anew.
    """
    console = tables.quiet_console() if output is Format.JSON else tables.console()
    agree = _do_not_ask if yes else _ask
    if boot := bluefield.rshim(target):
        if device or size or volume:
            raise LocalError(
                f"{target}: --device, --volume-disk and --size are for disks and files, not for BlueField"
            )
        done = push(image, boot, console, agree)
    else:
        if (volume or erase_volume) and not device:
            raise LocalError("--volume-disk and --erase-volume are of a device: name it by --device")
        board = locate.find(image)[1].board
        identity = _identity(fleet_directory, device, board, volume, erase_volume) if device else b""
        done = write(image, target, console, agree, identity=identity, device=device, size=size)
    printing.show(output, done, "\n".join(_summary_lines(done)))


def write(
    given: Path,
    target: str,
    console: Console,
    agree: Agree,
    *,
    identity: bytes = b"",
    device: str | None = None,
    size: str | None = None,
) -> Flashed:
    """Flash a disk or a file. Raises LocalError, RemoteError, Interrupted."""
    image, manifest = locate.find(given)
    wanted = None if size is None else parse_size(size)
    own = (image, image.with_suffix(".json"), given)
    if Path(target).exists() and any(Path(target).samefile(path) for path in own if path.exists()):
        raise LocalError(f"{target} is the image itself")
    least = manifest.image.bytes + boards.read(manifest.board).room
    with opened(target, least=least, size=wanted, secret=bool(identity)) as medium:
        if not medium.about.new:
            _require_own_name(target, medium.about, asks=agree is not _do_not_ask)
            typed = medium.about.proof if medium.about.alike > 1 else ""
            agree(_question(target, medium.about, manifest, device), typed)
        begin = time.monotonic()
        with _view(console) as shown:
            phases = _Phases(shown, amount(manifest))
            try:
                written = flash(image, manifest, medium, identity, phases.watch)
                phases.end()
            except KeyboardInterrupt:
                raise Interrupted(
                    f"interrupted: {target} is left without a partition table; the same command begins anew"
                ) from None
        seconds = round(time.monotonic() - begin, 3)
        return Flashed(target, written, seconds, True, device, reread=medium.finish())


def push(given: Path, boot: Path, console: Console, agree: Agree) -> Flashed:
    """Boot a BlueField card from a boot stream, which is made first if ``given`` is an image's folder."""
    agree(f"{bluefield.UNTESTED}.\nThe card is reset, and boots what is pushed. Push {given} to {boot}?", "")
    with tempfile.TemporaryDirectory(prefix="millpond-") as made:
        stream = given
        if given.suffix != ".bfb":
            stream = Path(made, "image.bfb")
            bluefield.build(given if given.is_dir() else given.parent, stream)
        begin = time.monotonic()
        with _view(console) as shown:
            phases = _Phases(shown, stream.stat().st_size)
            written = bluefield.push(stream, boot, lambda count: phases.watch("writing", count))
    seconds = round(time.monotonic() - begin, 3)
    return Flashed(str(boot), written, seconds, False, None, untested=bluefield.UNTESTED)


def parse_size(text: str) -> int:
    """Return a size such as ``8G`` in bytes. Raises LocalError."""
    match = re.fullmatch(r"([1-9]\d{0,15})([KMGT]?)", text)
    count = int(match[1]) * _UNITS[match[2]] if match else 0
    if not count or count % BLOCK:
        raise LocalError(
            f"--size {text}: a multiple of {BLOCK} bytes is needed, such as 8G (K, M, G, T; 1024)"
        )
    return count


def _identity(directory: Path, device: str, board: str, disk: str | None, erase: bool) -> bytes:
    from millpond.host.fleet import revocation  # imports cryptography, which takes long

    fleet = fleets.read(directory)
    own = fleet.device(device).board
    if own == EMULATED:
        raise LocalError(f"{device} is emulated: no image makes a board of it; 'millpond add' adds a device")
    if own != board:
        raise LocalError(f"{device} is a {own}, the image is for a {board}")
    etc = fleet.device_directory(device) / "etc"
    if not etc.is_dir():
        raise LocalError(f"{etc}: no such directory: the fleet has '{device}', but not its identity")
    if revocation.is_revoked(fleet, device):
        raise LocalError(f"the certificate of {device} is revoked: 'millpond renew {device}' makes another")
    return seed.seed(etc, _volume_file(board, disk, erase))


def _volume_file(board: str, disk: str | None, erase: bool) -> dict[str, bytes]:
    """Return the seed's file that names the disk of the volume, if that has its own. Raises LocalError."""
    if boards.read(board).flash.disk == "boot":
        if disk or erase:
            raise LocalError(f"the volume of a {board} lies on its boot disk: leave out --volume-disk")
        return {}
    if disk is None:
        raise LocalError(f"the volume of a {board} has a disk of its own: name it by --volume-disk")
    return {volume_disk.FILE: volume_disk.dumps(volume_disk.VolumeDisk(disk, erase)).encode()}


def _require_own_name(target: str, about: TargetDescription, *, asks: bool) -> None:
    """Refuse a disk that nothing tells from others: the kernel's names move between boots."""
    if about.alike == 1 or target.startswith(_OWN_NAMES):
        return
    if not asks:
        raise LocalError(
            f"{target} is one of {about.alike} disks that look alike: name it by {_OWN_NAMES[0]}"
        )
    if not about.proof:
        raise LocalError(
            f"{target} is one of {about.alike} disks that look alike, and tells no serial number:"
            f" name it by {_OWN_NAMES[1]}"
        )


def _question(target: str, about: TargetDescription, manifest: Manifest, device: str | None) -> str:
    what = ", ".join(filter(None, [printing.size(about.bytes) if about.model else "a file", about.model]))
    names = "".join(f", {name}" for name in about.names)
    on_it = f"; on it: {', '.join(about.contents)}" if about.contents else ""
    like = f"; one of {about.alike} disks that look alike" if about.alike > 1 else ""
    name = f" as {device}" if device else ""
    return (
        f"{target}: {printable(what + names + on_it + like)}\n"
        f"All of it will be lost. Write millpond {manifest.version} for {manifest.board}{name} to {target}?"
    )


def _ask(question: str, typed: str) -> None:
    if not sys.stdin.isatty():
        raise LocalError(f"{question.splitlines()[0]}: to write to it without being asked, say --yes")
    if typed:
        told = typer.prompt(
            f"{question}\nType the last {len(typed)} characters of its serial number", err=True
        )
        agreed = str(told).strip() == typed
    else:
        agreed = typer.confirm(question, default=False, err=True)
    if not agreed:
        raise LocalError("nothing was written")


def _do_not_ask(_question: str, _typed: str) -> None:
    pass


def _summary_lines(done: Flashed) -> list[str]:
    rate = printing.size(done.bytes_written / max(done.seconds, 0.001))
    how = "written and verified" if done.verified else "pushed, which can not be verified"
    name = f" It is {done.device} now." if done.device else ""
    size = printing.size(done.bytes_written)
    lines = [f"{done.target}: {size} {how} in {done.seconds:.1f} s ({rate}/s).{name}"]
    if not done.reread:
        lines.append("This machine still sees the old partitions: take the disk out and put it in again.")
    return lines + ([f"{done.untested}."] if done.untested else [])


def _view(console: Console) -> ProgressView:
    return view(terminal=console.is_terminal, shows=not console.quiet)


class _Phases:
    """Shows the phases of a write of ``total`` bytes each."""

    def __init__(self, shown: ProgressView, total: int) -> None:
        self._shown, self._total = shown, total
        self._left: dict[str, int] = {}
        self._advance: Callable[[int], None] = lambda _count: None

    def watch(self, phase: Phase, count: int) -> None:
        """Add ``count`` bytes to a phase, which ends the one before: it had less to write."""
        if phase not in self._left:
            self.end()
            self._advance, self._left = self._shown.begin(phase, self._total), {phase: self._total}
        self._left[phase] -= count
        self._advance(count)

    def end(self) -> None:
        """End the last phase."""
        for left in self._left.values():
            self._advance(left)
