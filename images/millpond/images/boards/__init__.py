# SPDX-License-Identifier: Apache-2.0
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

_STATE_BYTES, _FLASH_BYTES = 384 << 20, 256 << 20
"""The least sizes of the partitions in the recipe's repart.d."""
_ALIGNMENT = 1 << 20


@dataclass(frozen=True, slots=True)
class TunnelSpec:
    """The tunnel's transport: "ivshmem" is shared memory that QEMU or a hypervisor shows as a PCI device;
    "nvme" is vendor commands to the controller that the board itself is.
    """

    transport: Literal["ivshmem", "nvme"]


@dataclass(frozen=True, slots=True)
class FlashSpec:
    """The place of the volume: the rest of the ``boot`` disk, or a disk of its ``own``, which each device's
    identity names.
    """

    disk: Literal["boot", "own"] = "boot"


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
    """A board as data: everything in an image that depends on it.

    ``kernel`` is a flavour of Debian's kernel. ``modules`` are the kernel modules that the root file
    system has, each with its dependencies; ``early`` are those that find the root. Those in ``watchdog``
    drive the board's hardware watchdog, which runs before any other is loaded. ``console`` names the
    kernel's consoles, ``arguments`` extend its command line. ``tried`` says on what hardware the image has
    been seen to work.
    """

    title: str
    kernel: str
    console: tuple[str, ...]
    early: tuple[str, ...]
    modules: tuple[str, ...]
    tunnel: TunnelSpec
    tried: str
    watchdog: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    flash: FlashSpec = field(default_factory=FlashSpec)
    qemu: QemuHardware | None = None
    boot: Literal["uefi"] = "uefi"
    architecture: Literal["aarch64"] = "aarch64"

    @property
    def room(self) -> int:
        """Return the bytes behind the image without which the first boot can't make its partitions."""
        return _STATE_BYTES + (_FLASH_BYTES if self.flash.disk == "boot" else 0) + _ALIGNMENT


def names() -> list[str]:
    """Return the names of all boards that have a file in this folder."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def read(name: str) -> Board:
    """Return the board called ``name``. Raises ConfigError."""
    if name not in names():
        raise ConfigError(f"there is no board '{name}'; there are {', '.join([EMULATED, *names()])}")
    board = toml.read(Board, FOLDER / f"{name}.toml")
    for word in (*board.console, *board.arguments):
        if not re.fullmatch(r"[\x21-\x7e]+", word):
            raise ConfigError(f"{name}.toml: '{word}' cannot stand in a kernel's command line")
    for word in (*board.watchdog, *board.early, *board.modules):
        if not re.fullmatch(r"[A-Za-z0-9_-]+", word):
            raise ConfigError(f"{name}.toml: '{word}' cannot be a kernel's module")
    return board
