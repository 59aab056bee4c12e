# SPDX-License-Identifier: Apache-2.0
"""Files and their file systems: secrets, names of mounts, and fscrypt's policies."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from millpond.linux import fscrypt, syscalls
from millpond.linux.files import boot_id, storage_id, write_durably, write_secret
from millpond.linux.fscrypt import ADIANTUM, AES, Cipher, EncryptionPolicy

InNamespace = Callable[[Callable[[], None]], None]

_fchmod = os.fchmod


def all_may_read(descriptor: int, _mode: int) -> None:
    _fchmod(descriptor, 0o755)


def refuse(descriptor: int, _mode: int) -> None:
    _fchmod(descriptor, 0o755)
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize("fchmod", [all_may_read, refuse])
def test_no_secret_is_left_where_a_file_system_has_no_modes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fchmod: Callable[[int, int], None]
) -> None:
    """The authority's keys on a FAT stick were readable by all, and nobody was told."""
    (tmp_path / "ca.key").write_bytes(b"old")
    monkeypatch.setattr(os, "fchmod", fchmod)
    with pytest.raises(PermissionError, match=r"keeps no modes, so others could read it.*ca\.key"):
        write_secret(tmp_path / "ca.key", b"key")
    assert [path.name for path in tmp_path.iterdir()] == ["ca.key"]
    assert (tmp_path / "ca.key").read_bytes() == b"old"
    write_durably(tmp_path / "known", b"x", 0o755)


def test_a_secret_is_its_owners(tmp_path: Path) -> None:
    write_secret(tmp_path / "key", b"key")
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


def test_a_file_system_has_another_name_once_it_was_mounted_again(
    tmp_path: Path, in_namespace: InNamespace
) -> None:
    flash, other = tmp_path / "flash", tmp_path / "other"
    flash.mkdir()
    other.mkdir()

    def body() -> None:
        names = list[bytes]()
        for _ in range(2):
            syscalls.mount("tmpfs", flash, "tmpfs")
            names.append(storage_id(flash))
            assert storage_id(flash) == names[-1] != storage_id(other)
            syscalls.unmount(flash)
        assert names[0] != names[1]
        assert names[0].startswith(boot_id())

    in_namespace(body)


def test_a_file_system_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        storage_id(tmp_path / "flash")


IDENTIFIER = bytes(range(16))


def test_a_policy_is_what_the_kernel_documents() -> None:
    assert fscrypt.pack_policy(EncryptionPolicy(AES, IDENTIFIER)) == b"\2\1\4\3" + bytes(4) + IDENTIFIER
    assert (
        fscrypt.pack_policy(EncryptionPolicy(ADIANTUM, IDENTIFIER)) == b"\2\x09\x09\3" + bytes(4) + IDENTIFIER
    )


@pytest.mark.parametrize("cipher", [AES, ADIANTUM, Cipher("cipher 1/10", 1, 10)])
def test_a_policy_comes_back(cipher: Cipher) -> None:
    policy = EncryptionPolicy(cipher, IDENTIFIER)
    assert fscrypt.unpack_policy(fscrypt.pack_policy(policy)) == policy


def test_a_policy_of_the_first_version_is_read() -> None:
    assert fscrypt.unpack_policy(b"\0\1\4\3" + IDENTIFIER[:8]) == EncryptionPolicy(AES, IDENTIFIER[:8])


@pytest.mark.parametrize("data", [b"", b"\2", b"\0\1\4\3", b"\3" + bytes(23)])
def test_no_other_policy_is_guessed_at(data: bytes) -> None:
    with pytest.raises(OSError, match="unknown version"):
        fscrypt.unpack_policy(data)


@pytest.mark.parametrize(
    ("processor", "first"),
    [
        ("model name\t: aes\nflags\t\t: fpu sse2 aes avx\n", AES),
        ("Features\t: fp asimd evtstrm aes pmull\n", AES),
        ("Features\t: fp asimd evtstrm crc32\n", ADIANTUM),
        ("model name\t: aes\nflags\t\t: fpu vaes\n", ADIANTUM),
        ("", ADIANTUM),
    ],
)
def test_a_processor_without_aes_instructions_prefers_adiantum(processor: str, first: Cipher) -> None:
    ciphers = fscrypt.preferred(processor)
    assert ciphers[0] == first
    assert set(ciphers) == {AES, ADIANTUM}


def test_a_kind_of_file_system_that_cannot_says_so() -> None:
    with pytest.raises(OSError, match="ioctl"):
        fscrypt.policy_of(Path("/proc"))
