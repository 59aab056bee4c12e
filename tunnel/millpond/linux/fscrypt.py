# SPDX-License-Identifier: Apache-2.0
"""Edge (fscrypt): have the kernel encrypt directories.

ext4 (with its feature ``encrypt``), f2fs, UBIFS and others have it. The kernel forgets a key when the file
system is unmounted. Only version 2 policies are made: each file gets a key derived from the one that was
given, which is named by an identifier that reveals nothing of it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

KEY_SIZE = 64

_SET_POLICY = 0x800C6613
_GET_POLICY_EX = 0xC0096616
_ADD_KEY = 0xC0506617

_POLICY = struct.Struct("=BBBBB3x16s")  # version, contents, names, flags, data unit, identifier
_POLICY_V1 = struct.Struct("=BBBB8s")
_POLICY_EX = struct.Struct("=Q24s")  # size, policy
_KEY = struct.Struct("=II32sII32x")  # kind of identifier, reserved, identifier; size of the key, its id
_VERSION_2 = 2
_PAD_NAMES_TO_32 = 3
_BY_IDENTIFIER = 2


@dataclass(frozen=True, slots=True)
class Cipher:
    """Ciphers of contents and names, by the kernel's numbers."""

    name: str
    contents: int
    names: int


AES = Cipher("AES-256-XTS", contents=1, names=4)
ADIANTUM = Cipher("Adiantum", contents=9, names=9)


@dataclass(frozen=True, slots=True)
class EncryptionPolicy:
    """The encryption of a directory, which applies to all that is created in it. ``identifier`` names the
    key.
    """

    cipher: Cipher
    identifier: bytes


def preferred(processor: str) -> tuple[Cipher, ...]:
    """Return the ciphers, best first, for a processor as /proc/cpuinfo describes it: AES in
    software is slow.
    """
    fast = any(
        "aes" in line.split() for line in processor.splitlines() if line.startswith(("flags", "Features"))
    )
    return (AES, ADIANTUM) if fast else (ADIANTUM, AES)


def pack_policy(policy: EncryptionPolicy) -> bytes:
    """Pack a policy as ``struct fscrypt_policy_v2``."""
    cipher = policy.cipher
    return _POLICY.pack(_VERSION_2, cipher.contents, cipher.names, _PAD_NAMES_TO_32, 0, policy.identifier)


def unpack_policy(data: bytes) -> EncryptionPolicy:
    """Unpack the policy in a struct of either version. Raises OSError for others."""
    if data[:1] == bytes([_VERSION_2]) and len(data) >= _POLICY.size:
        _, contents, names, _, _, identifier = _POLICY.unpack_from(data)
    elif data[:1] == b"\0" and len(data) >= _POLICY_V1.size:
        _, contents, names, _, identifier = _POLICY_V1.unpack_from(data)
    else:
        raise OSError(errno.EPROTO, "an encryption policy of an unknown version")
    return EncryptionPolicy(_cipher(contents, names), identifier)


def _cipher(contents: int, names: int) -> Cipher:
    known = {(cipher.contents, cipher.names): cipher for cipher in (AES, ADIANTUM)}
    return known.get((contents, names), Cipher(f"cipher {contents}/{names}", contents, names))


def policy_of(directory: Path) -> EncryptionPolicy | None:
    """Return the encryption policy of ``directory``, None if it is not encrypted. Raises OSError where the
    kernel does not tell.
    """
    argument = bytearray(_POLICY_EX.pack(_POLICY.size, b""))
    try:
        with _opened(directory) as descriptor:
            fcntl.ioctl(descriptor, _GET_POLICY_EX, argument)
    except OSError as error:
        if error.errno == errno.ENODATA:
            return None
        raise
    size, policy = _POLICY_EX.unpack(argument)
    return unpack_policy(policy[:size])


def set_policy(directory: Path, policy: EncryptionPolicy) -> None:
    """Encrypt for good all that will be created in the empty ``directory``. Raises OSError.

    The key must have been added. A missing cipher of the kernel shows only when a file is created.
    """
    with _opened(directory) as descriptor:
        fcntl.ioctl(descriptor, _SET_POLICY, pack_policy(policy))


def add_key(directory: Path, key: bytes) -> bytes:
    """Give the kernel a key for the file system of ``directory``; returns its identifier. Raises OSError.

    This needs no privilege, and opens files of that key to every user that their modes allow.
    """
    argument = bytearray(_KEY.pack(_BY_IDENTIFIER, 0, b"", len(key), 0) + key)
    with _opened(directory) as descriptor:
        fcntl.ioctl(descriptor, _ADD_KEY, argument)
    identifier: bytes = _KEY.unpack_from(argument)[2]
    return identifier[:16]


@contextmanager
def _opened(directory: Path) -> Iterator[int]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
