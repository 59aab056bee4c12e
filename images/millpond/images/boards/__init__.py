"""Edge: boards as data: one TOML file per board in this folder says what an image for it needs.

A new board is a new file here; no code knows any board by name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from millpond.base import toml
from millpond.base.errors import ConfigError

FOLDER = Path(__file__).parent
EMULATED = "emulated"
"""The board that is no image's: a process tree on the host."""


@dataclass(frozen=True, slots=True)
class TunnelSpec:
    """How packets cross: "ivshmem", shared memory that QEMU or a hypervisor shows as a PCI device; "nvme",
    vendor commands to a controller that the board itself is.
    """

    transport: Literal["ivshmem", "nvme"]


@dataclass(frozen=True, slots=True)
class FlashSpec:
    """Where the volume lies: ``disk`` a block device of its own, or the rest of the boot disk if empty."""

    disk: str = ""


@dataclass(frozen=True, slots=True)
class QemuHardware:
    """The same board in QEMU: ``memory`` in MiB, ``flash`` and ``disk`` the sizes of its disks in MiB.
    ``arguments`` are QEMU's own: the machine, its processors and the watchdog.
    """

    arguments: tuple[str, ...]
    memory: int = 1024
    processors: int = 2
    disk: int = 2048
    flash: int = 4096


@dataclass(frozen=True, slots=True)
class Board:
    """All that an image depends on the board for.

    ``kernel`` is a flavour of Debian's kernel. ``modules`` are those of it that the root has, each with what
    it needs; ``early`` those with which the root is found. ``console`` are the kernel's names, ``arguments``
    more of its command line. ``tried`` says on what the image was seen to work.
    """

    title: str
    kernel: str
    console: tuple[str, ...]
    early: tuple[str, ...]
    modules: tuple[str, ...]
    tunnel: TunnelSpec
    tried: str
    arguments: tuple[str, ...] = ()
    flash: FlashSpec = field(default_factory=FlashSpec)
    qemu: QemuHardware | None = None
    boot: Literal["uefi"] = "uefi"
    architecture: Literal["aarch64"] = "aarch64"


def names() -> list[str]:
    """Of all boards that have a file here."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def read(name: str) -> Board:
    """The board called ``name``. Raises ConfigError."""
    if name not in names():
        raise ConfigError(f"there is no board '{name}'; there are {', '.join([EMULATED, *names()])}")
    board = toml.read(Board, FOLDER / f"{name}.toml")
    for word in (*board.console, *board.arguments):
        if not re.fullmatch(r"[\x21-\x7e]+", word):
            raise ConfigError(f"{name}.toml: '{word}' cannot stand in a kernel's command line")
    for word in (*board.early, *board.modules):
        if not re.fullmatch(r"[A-Za-z0-9_-]+", word):
            raise ConfigError(f"{name}.toml: '{word}' cannot be a kernel's module")
    return board
