# SPDX-License-Identifier: Apache-2.0
"""The root's hash tree: all of the root hangs on one hash, and a changed byte is found."""

from __future__ import annotations

import hashlib
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from millpond.images.build import verity

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
