# SPDX-License-Identifier: Apache-2.0
"""Edge (files): the disk of a device's volume, where the device does not boot from it: ``volume.toml`` in its
identity.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from millpond.base import toml
from millpond.base.errors import ConfigError

FILE = "volume.toml"
_BY_ID = re.compile(r"/dev/disk/by-id/(?!.*-part\d+$)[A-Za-z0-9#+.:=@_-]+")


@dataclass(frozen=True, slots=True)
class VolumeDisk:
    """A whole disk, by the name that stays with it. ``erase`` says that what it holds may be lost."""

    disk: str
    erase: bool = False


def checked(wanted: VolumeDisk) -> VolumeDisk:
    """Return ``wanted``. Raises ConfigError for a name that the kernel or the place in the machine gives."""
    if not _BY_ID.fullmatch(wanted.disk):
        raise ConfigError(
            f"{wanted.disk!r:.100} is no whole disk's name in /dev/disk/by-id, which stays with it"
        )
    return wanted


def read(directory: Path) -> VolumeDisk:
    """Return what the identity in ``directory`` says. Raises ConfigError."""
    return checked(toml.read(VolumeDisk, directory / FILE))


def dumps(wanted: VolumeDisk) -> str:
    """Return the text of the file. Raises ConfigError."""
    return f'disk = "{checked(wanted).disk}"\nerase = {str(wanted.erase).lower()}\n'
