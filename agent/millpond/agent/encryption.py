# SPDX-License-Identifier: Apache-2.0
"""Edge: encryption of the private part on the flash, with a key in the device's own state directory.

The host could read the flash of a real drive past the device's Linux. Encrypted data is of no use to it,
unless the key lies on the same drive.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from pathlib import Path
from typing import Literal

from millpond.base.errors import LocalError
from millpond.linux import fscrypt
from millpond.linux.files import write_secret
from millpond.linux.fscrypt import EncryptionPolicy
from millpond.wire.control_messages import AtRest

log = logging.getLogger(__name__)

_PROBE = ".encryption-probe"
_CANNOT = {
    errno.ENOTTY: "the flash's kind of file system cannot encrypt",
    errno.EOPNOTSUPP: "the flash's file system cannot encrypt (ext4 needs its feature 'encrypt')",
}


class _NotEncrypted(Exception):
    """The private part is not or cannot be encrypted; the text says why."""


def encrypt(private: Path, key_file: Path, wish: Literal["auto", "required", "off"]) -> AtRest:
    """Set up encryption of the empty directory ``private``, or unlock one that is encrypted already; the key
    is made once. A directory that holds files is left as it is.

    Raises LocalError if the directory is not encrypted though "required", and if it is, but the key is
    missing.
    """
    try:
        cipher = _cipher(private, key_file, wish)
    except _NotEncrypted as error:
        if wish == "required":
            raise LocalError(f"{private} must be encrypted ([privacy] at_rest), but {error}") from None
        log.info("private data at rest: not encrypted: %s", error)
        return AtRest(reason=str(error))
    log.info("private data at rest: encrypted with %s", cipher)
    return AtRest(cipher)


def _cipher(private: Path, key_file: Path, wish: str) -> str:
    try:
        policy = fscrypt.policy_of(private)
    except OSError as error:
        raise _NotEncrypted(_CANNOT.get(error.errno or 0, _words(error))) from None
    if policy:
        _unlock(private, policy, key_file)
        return policy.cipher.name
    if wish == "off":
        raise _NotEncrypted("it is switched off ([privacy] at_rest)")
    with contextlib.suppress(OSError):  # a probe is there only if an agent was killed
        _remove(private / _PROBE)
    if any(private.iterdir()):
        raise _NotEncrypted("it held files already")
    try:
        return _lock(private, key_file)
    except OSError as error:
        raise _NotEncrypted(_words(error)) from None


def _words(error: OSError) -> str:
    return error.strerror or str(error)


def _unlock(private: Path, policy: EncryptionPolicy, key_file: Path) -> None:
    key = _read_key(key_file)
    try:
        if key and fscrypt.add_key(private, key) == policy.identifier:
            return
    except OSError as error:
        raise LocalError(f"{private} is encrypted, and its key is refused: {_words(error)}") from None
    with contextlib.suppress(OSError):
        if fscrypt.policy_of(private.parent) == policy:
            raise _NotEncrypted("not with a key of the agent's: the flash is in an encrypted directory")
    wrong = "is another one" if key else "is missing"
    raise LocalError(
        f"{private} is encrypted, and its key {key_file} {wrong}: put it back, or remove {private}"
    )


def _lock(private: Path, key_file: Path) -> str:
    key_file.parent.mkdir(parents=True, exist_ok=True)
    if _disk(key_file.parent) == _disk(private):
        raise _NotEncrypted(f"the key would lie on the flash itself, in {key_file.parent}")
    key = _read_key(key_file) or _make_key(key_file)
    identifier = fscrypt.add_key(private, key)
    wrong = OSError()
    for cipher in fscrypt.preferred(Path("/proc/cpuinfo").read_text()):
        policy = EncryptionPolicy(cipher, identifier)
        try:
            _probe(private, policy)
        except OSError as error:
            wrong = error
            continue
        fscrypt.set_policy(private, policy)
        return cipher.name
    raise wrong


def _probe(private: Path, policy: EncryptionPolicy) -> None:
    """Raise OSError if the kernel lacks the cipher, which shows only when a file is made."""
    probe = private / _PROBE
    probe.mkdir(mode=0o700)
    try:
        fscrypt.set_policy(probe, policy)
        (probe / "file").touch()
    finally:
        _remove(probe)


def _remove(probe: Path) -> None:
    for file in probe.iterdir():  # without the key, a file has another name
        file.unlink()
    probe.rmdir()


def _disk(path: Path) -> Path:
    """Return the disk below ``path``, as far as sysfs shows it: not below overlays or device mappings."""
    number = path.stat().st_dev
    place = Path("/sys/dev/block", f"{os.major(number)}:{os.minor(number)}").resolve()
    return place.parent if (place / "partition").exists() else place


def _read_key(file: Path) -> bytes | None:
    try:
        key = file.read_bytes()
    except FileNotFoundError:
        return None
    if len(key) != fscrypt.KEY_SIZE:
        raise LocalError(f"{file} is not a key of {fscrypt.KEY_SIZE} bytes")
    return key


def _make_key(file: Path) -> bytes:
    """Make a key, which is on its disk before anything can be encrypted with it."""
    key = os.urandom(fscrypt.KEY_SIZE)
    write_secret(file, key)
    return key
