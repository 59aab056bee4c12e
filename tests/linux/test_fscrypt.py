# SPDX-License-Identifier: Apache-2.0
"""The kernel's encryption of directories: its structures and numbers. tests/agent shows it at work."""

from __future__ import annotations

from pathlib import Path

import pytest

from millpond.linux import fscrypt
from millpond.linux.fscrypt import ADIANTUM, AES, Cipher, EncryptionPolicy

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
