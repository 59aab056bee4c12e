# SPDX-License-Identifier: Apache-2.0
"""Pure: one number for each file of a volume, which may hold several file systems, and its attributes.

Inode numbers are unique within a file system alone: another one mounted in the volume, or a snapshot of
Btrfs, repeats them. A file is known to hosts, to the delegation manager and to programs by this number, so it
must be the same in each process that serves the volume, and after a restart.
"""

from __future__ import annotations

import os

from millpond.fs.vfs.path_api import Attributes, stat_fields

Key = tuple[int, int]
_FOREIGN = 1 << 62  # above the inode numbers of the volume's own file system
_ALL = (1 << 64) - 1


def key_of(status: os.stat_result) -> Key:
    """Return the device and inode number, which tell a file from all others that exist."""
    return status.st_dev, status.st_ino


class FileIdentity:
    """Numbers of the files of a volume whose own file system is ``device`` (st_dev). Files of that one have
    their inode numbers, those of others a hash of 62 bits of device and inode number.
    """

    def __init__(self, device: int) -> None:
        self._device = device

    def number(self, key: Key) -> int:
        """Return the number of a file, not above 2**63 - 1."""
        device, inode = key
        if device == self._device:
            return inode
        return _FOREIGN | _mixed(inode ^ _mixed(device)) >> 2

    def key(self, number: int) -> Key | None:
        """Return the device and inode number of a file of the volume's own file system; None for others."""
        return (self._device, number) if number < _FOREIGN else None

    def fields(self, status: os.stat_result) -> tuple[int, ...]:
        """Return the same as ``attributes``, as a tuple in their order."""
        found = stat_fields(status)
        if status.st_dev != self._device:
            found = (self.number(key_of(status)), *found[1:])
        return found

    def attributes(self, status: os.stat_result) -> Attributes:
        """Return the attributes of a file, with its number as the inode."""
        return Attributes(*self.fields(status))


def _mixed(number: int) -> int:
    """Return a permutation of 64 bits: SplitMix64 (Steele, Lea and Flood, 2014). (hashlib would load OpenSSL
    into processes that last.)
    """
    number = number + 0x9E3779B97F4A7C15 & _ALL
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _ALL
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _ALL
    return number ^ number >> 31
