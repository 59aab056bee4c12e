# SPDX-License-Identifier: Apache-2.0
"""What an image vouches for: the hash tree behind its root, and programs that its owner has signed."""

from __future__ import annotations

import hashlib
import random
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from millpond.base.errors import LocalError
from millpond.images.build import verity
from millpond.images.build.secure_boot import SigningKey, sign, signing_key

_VERITYSETUP = shutil.which("veritysetup", path="/usr/sbin:/sbin:/usr/bin")
pytestmark = pytest.mark.skipif(
    _VERITYSETUP is None, reason="needs veritysetup: sudo apt install cryptsetup-bin"
)
BLOCK = 4096


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root.squashfs"
    path.write_bytes(random.Random(1).randbytes(300 * BLOCK - 100))
    return path


def top_hash(data: bytes) -> str:
    """The root hash as the kernel's documentation of dm-verity defines it (version 1, no salt)."""
    while True:
        blocks = [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)]
        digests = [hashlib.sha256(block.ljust(BLOCK, b"\0")).digest() for block in blocks]
        if len(digests) == 1:
            return digests[0].hex()
        data = b"".join(digests)


def verifies(path: Path, made: verity.VerifiedRoot) -> bool:
    assert _VERITYSETUP
    place = [f"--hash-offset={made.blocks * BLOCK}", f"--data-blocks={made.blocks}"]
    argv = [_VERITYSETUP, "verify", "--no-superblock", "--salt=-", *place, path, path, made.root_hash]
    return subprocess.run(argv, check=False, capture_output=True, timeout=60).returncode == 0


def test_the_tree_lies_behind_the_root_and_hangs_on_one_hash(root: Path) -> None:
    before = root.read_bytes()
    made = verity.append_tree(root)
    assert made == verity.VerifiedRoot(300, top_hash(before))
    after = root.read_bytes()
    assert after[: len(before)] == before and not after[len(before) : 300 * BLOCK].strip(b"\0")
    assert len(after) == (300 + 1 + 3) * BLOCK  # 128 hashes a block, and one block of three hashes
    assert verifies(root, made)


@pytest.mark.parametrize("place", [0, 123_456, 300 * BLOCK + 7, 303 * BLOCK + 7])
def test_a_flipped_bit_is_found_in_the_root_and_in_the_tree(root: Path, place: int) -> None:
    made = verity.append_tree(root)
    data = bytearray(root.read_bytes())
    data[place] ^= 0x10
    root.write_bytes(data)
    assert not verifies(root, made)


def test_the_same_root_has_the_same_tree(root: Path, tmp_path: Path) -> None:
    again = Path(shutil.copy(root, tmp_path / "again"))
    assert verity.append_tree(again) == verity.append_tree(root)
    assert again.read_bytes() == root.read_bytes()


signs = pytest.mark.skipif(
    shutil.which("osslsigncode") is None, reason="needs osslsigncode: sudo apt install osslsigncode"
)
TIME = 1_700_000_000
CODE = b"a kernel, its command line".ljust(512, b"\0")


def draw(folder: Path, name: str) -> SigningKey:
    """A key and its certificate, as a board's owner draws them."""
    made = SigningKey(folder / f"{name}.key", folder / f"{name}.pem")
    argv = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-noenc",
        "-days",
        "3650",
        "-subj",
        f"/CN={name}",
    ]
    subprocess.run(
        [*argv, "-keyout", made.key, "-out", made.certificate], check=True, capture_output=True, timeout=60
    )
    return made


@pytest.fixture(scope="module")
def signer(tmp_path_factory: pytest.TempPathFactory) -> SigningKey:
    return draw(tmp_path_factory.mktemp("keys"), "owner")


def program(path: Path) -> Path:
    """A PE file of one section, as small as one may be."""
    dos = b"MZ".ljust(0x3C, b"\0") + struct.pack("<I", 0x40)
    coff = b"PE\0\0" + struct.pack("<HHIIIHH", 0xAA64, 1, 0, 0, 0, 240, 0x206)
    sizes = struct.pack("<II", 0x2000, 0x200)  # of the image, of its headers
    optional = struct.pack("<H", 0x20B).ljust(56, b"\0") + sizes.ljust(52, b"\0") + struct.pack("<I", 16)
    section = struct.pack("<8sIIII12xI", b".linux", 512, 0x1000, 512, 512, 0x60000020)
    path.write_bytes((dos + coff + optional.ljust(240, b"\0") + section).ljust(512, b"\0") + CODE)
    return path


def is_signed_by(path: Path, signer: SigningKey) -> bool:
    argv = ["osslsigncode", "verify", "-CAfile", signer.certificate, "-in", path]
    return subprocess.run(argv, check=False, capture_output=True, timeout=60).returncode == 0


@signs
def test_a_program_is_signed_by_its_owner_alone(tmp_path: Path, signer: SigningKey) -> None:
    made = program(tmp_path / "BOOTAA64.EFI")
    assert not is_signed_by(made, signer)
    sign(made, signer, TIME)
    assert CODE in made.read_bytes() and list(tmp_path.iterdir()) == [made]
    assert is_signed_by(made, signer)
    assert not is_signed_by(made, draw(tmp_path, "stranger"))


@signs
def test_a_changed_byte_is_no_longer_signed(tmp_path: Path, signer: SigningKey) -> None:
    made = program(tmp_path / "BOOTAA64.EFI")
    sign(made, signer, TIME)
    made.write_bytes(made.read_bytes().replace(b"command line", b"command_line"))
    assert not is_signed_by(made, signer)


@signs
def test_the_same_program_gets_the_same_signature(tmp_path: Path, signer: SigningKey) -> None:
    first, second = program(tmp_path / "first.efi"), program(tmp_path / "second.efi")
    for made in (first, second):
        sign(made, signer, TIME)
    assert first.read_bytes() == second.read_bytes()


@signs
def test_the_certificate_of_another_key_is_refused(tmp_path: Path, signer: SigningKey) -> None:
    made = program(tmp_path / "BOOTAA64.EFI")
    before = made.read_bytes()
    other = draw(tmp_path, "other")
    with pytest.raises(LocalError, match="osslsigncode"):
        sign(made, SigningKey(signer.key, other.certificate), TIME)
    assert made.read_bytes() == before


def test_one_file_of_the_pair_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    assert signing_key(None, None) is None
    argv = [sys.executable, "-m", "millpond.images.build", "--output", str(tmp_path / "image")]
    done = subprocess.run([*argv, "--secure-boot-key", "key.pem"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "go together" in done.stderr
    assert not (tmp_path / "image").exists()
    with pytest.raises(LocalError, match=r"there is no file .*key\.pem"):
        signing_key(tmp_path / "key.pem", tmp_path / "certificate.pem")
