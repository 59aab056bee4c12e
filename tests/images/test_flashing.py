# SPDX-License-Identifier: Apache-2.0
"""Flashing: the target's content afterwards, after any cut and with a medium that lies."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from millpond.base.errors import LocalError, RemoteError
from millpond.images.flash.block_device import BlockMedium, TargetDescription
from millpond.images.flash.gpt_edges import GptEdges
from millpond.images.flash.open_target import opened
from millpond.images.flash.writer import amount, flash
from millpond.images.format.manifest import EDGE, Manifest

from ..effort import scaled
from .flash_support import (
    MIB,
    SEED,
    identifiers,
    make_image,
    raw,
    run,
    tables,
    without_identifiers,
    write,
)

SIZE = 16 * MIB
IDENTITY = b"millpond-seed\0" + random.Random(9).randbytes(700_000)


class Cut(BlockMedium):
    """A disk, which is a file, whose power fails after so many bytes. Of what it was not told to keep for
    good, some reaches it, in any order, where ``how`` is given.
    """

    def __init__(self, path: Path, limit: int, *, how: int | None = None) -> None:
        size = path.stat().st_size
        super().__init__(path, os.open(path, os.O_RDWR), TargetDescription(size))
        self.left, self.chance = limit, None if how is None else random.Random(how)
        self.pending: list[tuple[bytes, int]] = []
        self.total = 0

    def write(self, data: bytes | memoryview, offset: int) -> None:
        short = bytes(data[: self.left])
        self.left -= len(short)
        self.total += len(short)
        self.pending += [(short[at : at + 4096], offset + at) for at in range(0, len(short), 4096)]
        if self.chance is None:
            self._settle_some(1.0)
        if len(short) < len(data):
            self._settle_some(0.5)
            raise OSError(errno.EIO, "the power is gone")

    def _settle_some(self, share: float) -> None:
        for data, offset in self.pending:
            if self.chance is None or share == 1.0 or self.chance.random() < share:
                super().write(data, offset)
        self.pending.clear()

    def sync(self) -> None:
        self._settle_some(1.0)  # not to the disk below: that has power


class Wrapping(BlockMedium):
    """A disk that has half of the bytes that it says, as some that are sold; it begins again behind them."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, os.open(path, os.O_RDWR), TargetDescription(path.stat().st_size))

    def write(self, data: bytes | memoryview, offset: int) -> None:
        super().write(data, offset % (self.size // 2))

    def read(self, length: int, offset: int) -> memoryview:
        return super().read(length, offset % (self.size // 2))


class Forgetting(BlockMedium):
    """A disk that loses one byte."""

    def __init__(self, path: Path, lost: int) -> None:
        super().__init__(path, os.open(path, os.O_RDWR), TargetDescription(path.stat().st_size))
        self.lost = lost

    def settle(self) -> None:
        super().settle()
        byte = os.pread(self.descriptor, 1, self.lost)
        if byte != b"\0":
            os.pwrite(self.descriptor, bytes([byte[0] ^ 1]), self.lost)


def silent(phase: str, count: int) -> None:
    pass


@pytest.fixture
def image(tmp_path: Path) -> tuple[Path, Manifest]:
    return make_image(tmp_path / "image")


def old_disk(path: Path, size: int = SIZE) -> None:
    """A disk that another image is on."""
    write(path, raw(size, salt=2), size)


def expected(path: Path, seed: bytes = IDENTITY) -> bytes:
    whole = bytearray(path.read_bytes())
    whole[SEED.offset : SEED.offset + SEED.bytes] = seed.ljust(SEED.bytes, b"\0")
    return without_identifiers(bytes(whole))


def plain(path: Path) -> bytes:
    return without_identifiers(path.read_bytes(), 8 * MIB)


def test_each_disk_has_its_own_identifiers(image: tuple[Path, Manifest], tmp_path: Path) -> None:
    """All had those of the image, and firmware boots the partition with the GUID that it remembers."""
    guids = [identifiers(image[0].read_bytes())]
    for name in ("one", "two"):
        with opened(str(tmp_path / name), least=image[1].image.bytes) as medium:
            flash(*image, medium, IDENTITY, silent)
        guids.append(identifiers((tmp_path / name).read_bytes()))
    assert len({guid for found in guids for guid in found}) == sum(map(len, guids))


def test_a_new_file_is_the_image_with_its_seed(image: tuple[Path, Manifest], tmp_path: Path) -> None:
    target, seen = tmp_path / "disk", Counter[str]()
    with opened(str(target), least=image[1].image.bytes, secret=True) as medium:
        assert medium.about.new and tables(image[0].read_bytes()) == {"mbr", "primary", "backup"}
        written = flash(*image, medium, IDENTITY, lambda phase, count: seen.update({phase: count}))
        assert medium.finish()
    assert plain(target) == expected(image[0])
    assert target.stat().st_mode & 0o777 == 0o600
    assert target.stat().st_blocks * 512 < 6 * MIB  # only what is used
    assert written == amount(image[1]) == seen["writing"]
    assert abs(seen["verifying"] - written) < 2 * MIB


def test_a_larger_file_has_holes_behind_the_image(image: tuple[Path, Manifest], tmp_path: Path) -> None:
    target = tmp_path / "disk"
    old_disk(target, 12 * MIB)
    with opened(str(target), least=image[1].image.bytes, size=SIZE) as medium:
        assert not medium.about.new and medium.size == SIZE
        assert target.stat().st_size == 12 * MIB  # nothing is changed before it is written
        flash(*image, medium, b"", silent)
    assert plain(target) == expected(image[0], b"").ljust(SIZE, b"\0")
    assert tables(target.read_bytes()) == {"mbr", "primary"}


@pytest.mark.parametrize("size", [8 * MIB, 8 * MIB + 512, SIZE])
def test_a_disk_that_held_another_image(image: tuple[Path, Manifest], tmp_path: Path, size: int) -> None:
    target = tmp_path / "disk"
    old_disk(target, size)
    medium = Cut(target, 1 << 40)
    with contextlib.closing(medium):
        flash(*image, medium, IDENTITY, silent)
    found, whole = plain(target), expected(image[0])
    for used in image[1].image.ranges:
        assert found[used.offset : used.end] == whole[used.offset : used.end]
    assert found[SEED.offset : SEED.offset + SEED.bytes] == IDENTITY.ljust(SEED.bytes, b"\0")
    assert tables(found) == {"mbr", "primary"} | ({"backup"} if size == 8 * MIB else set())
    if size > 8 * MIB + 512:
        assert found[-EDGE:] == bytes(EDGE)


def cuts(total: int, salt: str) -> list[int]:
    """Where a flashing is cut: at all places that mean something and some others; a quick run has a few of
    them, others for each ``salt``.
    """
    some = random.Random(4).sample(range(total), 40)
    steps = [0, 1, 511, 512, 520, 4096, 4097, EDGE, EDGE + 4096, EDGE + 4097]
    steps += [2 * EDGE + back for back in (0, 3584, 4095, 4096, 4097, 10_000)]
    steps += [total - back for back in (1, 2, 66, 67, 511, 512, 513, 1024, 1536, 1537, 5000, EDGE)]
    found = [*some, *steps]
    return sorted(random.Random(salt).sample(found, scaled(20, len(found))))


@pytest.mark.parametrize("size", [8 * MIB, SIZE], ids=["just large enough", "larger"])
@pytest.mark.parametrize("order", ["in order", "in any order"])
def test_cut_at_any_byte_it_has_no_table_and_can_be_repeated(
    image: tuple[Path, Manifest], tmp_path: Path, size: int, order: str
) -> None:
    target = tmp_path / "disk"
    old_disk(target, size)
    before = target.read_bytes()
    measured = Cut(target, 1 << 40)
    with contextlib.closing(measured):
        flash(*image, measured, IDENTITY, silent)
    whole, total = plain(target), measured.total
    last = total - 3 * 512  # from there on all is there, and verified, but for the three sectors of the table
    for number, limit in enumerate(cuts(total, f"{size} {order}")):
        old_disk(target, size)
        cut = Cut(target, limit, how=number if order == "in any order" else None)
        with contextlib.closing(cut), pytest.raises(RemoteError, match="the power is gone"):
            flash(*image, cut, IDENTITY, silent)
        found = target.read_bytes()
        if "mbr" in tables(found):  # what was there before is untouched
            assert limit < 4096 and found[512:] == before[512:]
        if 4096 + 2 * EDGE <= limit <= last:
            assert not tables(found)
    again = Cut(target, 1 << 40)
    with contextlib.closing(again):
        flash(*image, again, IDENTITY, silent)
    found = plain(target)
    for used in image[1].image.ranges:
        assert found[used.offset : used.end] == whole[used.offset : used.end]
    assert tables(found) == tables(whole) > {"primary"}


def test_a_header_without_its_first_sector_is_no_table(image: tuple[Path, Manifest], tmp_path: Path) -> None:
    """What a cut just before the last sector leaves is nothing to those who look for tables."""
    for tool in ("sfdisk", "blkid"):
        if not shutil.which(tool):
            pytest.skip(f"no {tool}")
    target = tmp_path / "disk"
    shutil.copy(image[0], target)
    assert "root" in run("sfdisk", "--dump", target)
    assert "PTTYPE=gpt" in run("blkid", "--probe", "--output", "export", target)
    with target.open("r+b") as file:
        file.write(bytes(511))
    assert tables(target.read_bytes()) == {"primary", "backup"}
    assert subprocess.run(["sfdisk", "--dump", target], capture_output=True, check=False).returncode != 0
    assert subprocess.run(["blkid", "--probe", target], capture_output=True, check=False).returncode == 2


def test_an_interrupt_leaves_no_table_either(image: tuple[Path, Manifest], tmp_path: Path) -> None:
    target = tmp_path / "disk"
    for after in (1, 3, 5, 7):
        count = 0

        def interrupt(phase: str, _: int, after: int = after) -> None:
            nonlocal count
            count += 1
            if count > after:
                raise KeyboardInterrupt

        old_disk(target)
        with opened(str(target), least=image[1].image.bytes) as medium, pytest.raises(KeyboardInterrupt):
            flash(*image, medium, IDENTITY, interrupt)
        assert not tables(target.read_bytes())


def test_a_damaged_image_is_noticed_and_the_target_left_invalid(
    image: tuple[Path, Manifest], tmp_path: Path
) -> None:
    with image[0].open("r+b") as file:
        file.seek(6 * MIB + 77)
        byte = file.read(1)
        file.seek(6 * MIB + 77)
        file.write(bytes([byte[0] ^ 1]))
    target = tmp_path / "disk"
    old_disk(target)
    with (
        opened(str(target), least=image[1].image.bytes) as medium,
        pytest.raises(LocalError, match=r"millpond-test\.img: damaged at byte 6291456"),
    ):
        flash(*image, medium, IDENTITY, silent)
    assert not tables(target.read_bytes())
    os.truncate(image[0], 2 * MIB)  # while it is read, say
    with (
        opened(str(target), least=image[1].image.bytes) as medium,
        pytest.raises(LocalError, match="damaged"),
    ):
        flash(*image, medium, IDENTITY, silent)


def test_a_disk_that_is_smaller_than_it_says_is_noticed(image: tuple[Path, Manifest], tmp_path: Path) -> None:
    target = tmp_path / "disk"
    old_disk(target, 8 * MIB)
    medium = Wrapping(target)
    with contextlib.closing(medium), pytest.raises(RemoteError, match="smaller than it says"):
        flash(*image, medium, IDENTITY, silent)
    assert not tables(target.read_bytes()[: 4 * MIB])


@pytest.mark.parametrize(
    "lost", [454, 512, 600, MIB, 6 * MIB + 5, SEED.offset + 20, 7 * MIB + 9, 8 * MIB - 500]
)
def test_a_lost_byte_is_noticed(image: tuple[Path, Manifest], tmp_path: Path, lost: int) -> None:
    target = tmp_path / "disk"
    old_disk(target, 8 * MIB)
    assert image[0].read_bytes()[lost] or SEED.offset <= lost < SEED.offset + SEED.bytes
    medium = Forgetting(target, lost)
    with contextlib.closing(medium), pytest.raises(RemoteError, match="does not hold what was written"):
        flash(*image, medium, IDENTITY, silent)
    assert not tables(target.read_bytes())


def test_a_seed_that_is_too_large_is_refused_before_anything_is_written(
    image: tuple[Path, Manifest], tmp_path: Path
) -> None:
    target = tmp_path / "disk"
    old_disk(target)
    before = target.read_bytes()
    with (
        opened(str(target), least=image[1].image.bytes) as medium,
        pytest.raises(LocalError, match="the seed has"),
    ):
        flash(*image, medium, bytes(SEED.bytes + 1), silent)
    assert target.read_bytes() == before


def test_a_seed_at_the_very_end(image: tuple[Path, Manifest], tmp_path: Path) -> None:
    """Where its place reaches into the last MiB, which is written last."""
    place = replace(SEED, offset=7 * MIB + 65536, bytes=MIB - 2 * 65536)
    manifest = replace(image[1], seed=place)
    identity = random.Random(3).randbytes(place.bytes)
    target = tmp_path / "disk"
    with opened(str(target), least=manifest.image.bytes) as medium:
        flash(image[0], manifest, medium, identity, silent)
    found = target.read_bytes()
    assert found[place.offset : place.offset + place.bytes] == identity
    assert tables(found) == {"mbr", "primary", "backup"}


@pytest.mark.parametrize("cut", range(0, 3 * MIB, 300_000))
def test_the_ends_of_an_image_are_held_and_the_rest_let_through(cut: int) -> None:
    data = random.Random(cut).randbytes(3 * MIB)
    held, whole = GptEdges(3 * MIB), bytearray(3 * MIB)
    for start, end in ((0, cut), (cut, 3 * MIB)):
        rest, at = held.keep(memoryview(data)[start:end], start)
        assert not rest or MIB <= at <= at + len(rest) <= 2 * MIB
        whole[at : at + len(rest)] = rest
    assert whole[:MIB] == whole[2 * MIB :] == bytes(MIB)
    for pieces in (held.rest(), held.headers()):
        assert whole[:1024] == bytes(1024) and whole[-512:] == bytes(512)
        for part, at in pieces:
            whole[at : at + len(part)] = part
    assert whole[:512] == bytes(512)
    whole[:512] = held.first_sector()
    assert whole == data and held.first_blocks() == data[:MIB]
