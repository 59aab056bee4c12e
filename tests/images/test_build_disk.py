# SPDX-License-Identifier: Apache-2.0
"""The disk image: partitions that neither overlap nor move, and a table that other programs read."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from millpond.base.errors import LocalError
from millpond.images import boards
from millpond.images.build import __main__ as builder
from millpond.images.build import boot, disk
from millpond.images.build.context import Context
from millpond.images.build.recipe import RECIPE
from millpond.images.flash.open_target import opened
from millpond.images.flash.writer import flash
from millpond.images.format.locate import describe
from millpond.images.format.manifest import Manifest, SeedPlace, dumps, loads

_SFDISK = shutil.which("sfdisk", path="/usr/sbin:/sbin:/usr/bin")
needs_sfdisk = pytest.mark.skipif(_SFDISK is None, reason="needs sfdisk: sudo apt install fdisk")
MIB = 1 << 20


def test_partitions_are_aligned_and_do_not_overlap() -> None:
    parts = disk.layout()
    assert [part.name for part in parts] == ["espA", "espB", "rootA", "rootB", "seed"]
    end = MIB
    for part in parts:
        assert part.offset % MIB == 0 and part.bytes % MIB == 0 and part.bytes > 0
        assert part.offset == end
        end = part.offset + part.bytes
    assert disk.image_bytes() == end + MIB
    sizes = {part.name: part.bytes for part in parts}
    assert sizes["espA"] == sizes["espB"] and sizes["rootA"] == sizes["rootB"]
    assert len({disk.identifier(name) for name in (*sizes, "disk")}) == 6


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A disk with some bytes in the place of file systems."""
    some = random.Random(1)
    (tmp_path / "esp.vfat").write_bytes(some.randbytes(3 * MIB) + bytes(boot.ESP_BYTES - 3 * MIB))
    (tmp_path / "root.squashfs").write_bytes(
        some.randbytes(5 * MIB + 4096) + bytes(MIB) + some.randbytes(100)
    )
    disk.make_disk(tmp_path / "millpond-x.img", tmp_path / "esp.vfat", tmp_path / "root.squashfs")
    return tmp_path / "millpond-x.img"


@needs_sfdisk
def test_other_programs_read_the_table(made: Path) -> None:
    assert _SFDISK
    shown = subprocess.run([_SFDISK, "--json", made], check=True, capture_output=True, timeout=60).stdout
    table = json.loads(shown)["partitiontable"]
    assert (table["label"], table["id"], table["sectorsize"]) == ("gpt", disk.identifier("disk"), 512)
    seen = [
        (one["name"], one["type"], one["start"] * 512, one["size"] * 512, one["uuid"])
        for one in table["partitions"]
    ]
    wanted = [(one.name, one.type, one.offset, one.bytes, disk.identifier(one.name)) for one in disk.layout()]
    assert seen == wanted
    subprocess.run([_SFDISK, "--verify", made], check=True, capture_output=True, timeout=60)


@needs_sfdisk
def test_slot_a_counts_with_its_zeros_and_slot_b_is_spoilt(made: Path, tmp_path: Path) -> None:
    """Zeros of a kernel were holes of the image: where the disk was used before, they were its old bytes."""
    places = {part.name: part for part in disk.layout()}
    wanted = [(0, 5 * 4096), (disk.image_bytes() - 5 * 4096, disk.image_bytes())]
    with made.open("rb") as file:
        for name, source in (("espA", "esp.vfat"), ("rootA", "root.squashfs")):
            content = (tmp_path / source).read_bytes()
            begin = file.seek(places[name].offset)
            assert file.read(len(content)) == content
            wanted.append((begin, begin + -(-len(content) // 4096) * 4096))
    wanted.append((places["espB"].offset, places["espB"].offset + 65536))
    used = disk.make_disk(made, tmp_path / "esp.vfat", tmp_path / "root.squashfs")
    if shutil.which("fallocate"):  # as on file systems that make holes of zeros
        subprocess.run(["fallocate", "--dig-holes", made], check=True, timeout=60)
    image = describe(made, used)
    assert joined((one.offset, one.end) for one in image.ranges) == joined(sorted(wanted))
    seed = SeedPlace(places["seed"].offset, places["seed"].bytes)
    manifest = Manifest("millpond", "0.1.0", 1, "qemu-virt", "aarch64", image, seed)
    assert loads(dumps(manifest), "manifest") == manifest


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for begin, end in ranges:
        if found and found[-1][1] == begin:
            begin = found.pop()[0]
        found.append((begin, end))
    return found


@needs_sfdisk
def test_the_same_bits_each_time(made: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.img"
    disk.make_disk(again, tmp_path / "esp.vfat", tmp_path / "root.squashfs")
    assert dataclasses.replace(describe(again), file=made.name) == describe(made)


@needs_sfdisk
@pytest.mark.skipif(shutil.which("systemd-repart") is None, reason="systemd-repart is not installed")
@pytest.mark.parametrize("less", [0, 2 * MIB])
def test_a_first_boot_makes_its_partitions_in_the_room_that_a_board_tells(
    made: Path, tmp_path: Path, less: int
) -> None:
    seed = next(part for part in disk.layout() if part.name == "seed")
    place = SeedPlace(seed.offset, seed.bytes)
    manifest = Manifest("millpond", "0.1.0", 1, "generic-uefi", "aarch64", describe(made), place)
    size = disk.image_bytes() + boards.read("generic-uefi").room - less
    with opened(str(tmp_path / "disk"), least=size) as medium:
        flash(made, manifest, medium, b"", lambda _phase, _more: None)
    for path in (RECIPE / "root/usr/lib/repart.d").iterdir():  # file systems would take root
        (tmp_path / path.name).write_text(path.read_text().replace("Format=ext4", ""))
    argv = ["systemd-repart", "--dry-run=no", "--seed=random", f"--definitions={tmp_path}", tmp_path / "disk"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert ("Can't fit" in done.stderr) == (less > 0) == (done.returncode != 0), done


@pytest.mark.parametrize(("esp", "root"), [(boot.ESP_BYTES + 1, 1), (1, disk.ROOT_BYTES + 1)])
def test_what_is_too_large_for_its_partition_makes_no_disk(tmp_path: Path, esp: int, root: int) -> None:
    for name, size in (("esp", esp), ("root", root)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    with pytest.raises(LocalError, match=r"(esp|root) has \d+ bytes, its partition \d+"):
        disk.make_disk(tmp_path / "x.img", tmp_path / "esp", tmp_path / "root")
    assert not (tmp_path / "x.img").exists()


def _context(tmp_path: Path) -> Context:
    board = boards.read("qemu-virt")
    return Context("qemu-virt", board, builder.SOURCE, tmp_path, tmp_path, "0.1.0", 1, 2, 19)


def test_a_base_is_kept_until_something_that_it_is_made_of_changes(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe"
    shutil.copytree(RECIPE, recipe, symlinks=True)
    seen = [builder._key(_context(tmp_path), recipe)]
    assert builder._key(dataclasses.replace(_context(tmp_path), serial=5, version="0.2.0"), recipe) == seen[0]
    seen.append(builder._key(dataclasses.replace(_context(tmp_path), level=3), recipe))
    program = recipe / "root/usr/lib/millpond/before-update"
    program.chmod(0o644)
    seen.append(builder._key(_context(tmp_path), recipe))
    folder = recipe / "root/etc/systemd/system"
    (folder / "rauc.service.d").rename(folder / "ravc.service.d")  # the same files, elsewhere
    seen.append(builder._key(_context(tmp_path), recipe))
    (recipe / "debian.lock").write_text("# epoch 1\n")
    seen.append(builder._key(_context(tmp_path), recipe))
    assert len(set(seen)) == len(seen)


def test_an_image_tells_systemd_when_it_was_built() -> None:
    """The clock of a board without a battery begins there: systemd sets it forward to the time of this file,
    which has the image's time as all of them. Before: at systemd's own release.
    """
    assert (RECIPE / "root/usr/lib/clock-epoch").is_file()
