# SPDX-License-Identifier: Apache-2.0
"""Targets of flashing, on real loop devices and in made trees of /sys and /proc, and the refusals."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.base.errors import LocalError
from millpond.images.flash import disk_inventory, disk_names
from millpond.images.flash.disk_inventory import DiskInventory
from millpond.images.flash.open_target import opened
from millpond.images.flash.writer import flash

from .flash_support import MIB, loop, make_image, mounted, run, tables, without_identifiers

SIZE = 64 * MIB


@pytest.fixture(params=[pytest.param(SIZE, id="loop", marks=pytest.mark.serial)])
def device(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    with loop(tmp_path / "backing", request.param) as made:
        yield made


def with_partition(device: Path) -> Path:
    try:
        run("addpart", device, "1", "2048", "65536")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no partitions on loop devices: {error}")
    return Path(f"{device}p1")


def refusal(target: str | Path, **more: int) -> str:
    with (
        pytest.raises(LocalError) as error,
        opened(str(target), **{"least": 8 * MIB, **more}),  # type: ignore[arg-type]
    ):
        pass
    assert "\n" not in str(error.value) and str(error.value).startswith(str(target))
    return str(error.value)


def test_a_disk_is_flashed(device: Path, tmp_path: Path) -> None:
    image, manifest = make_image(tmp_path / "image")
    with device.open("r+b") as file:
        file.write(os.urandom(8 * MIB))
        file.seek(-MIB, os.SEEK_END)
        file.write(os.urandom(MIB))
    with opened(str(device), least=manifest.image.bytes) as medium:
        assert medium.about.bytes == SIZE and str(tmp_path / "backing") in medium.about.model
        assert "another program has it" in refusal(device)  # nobody else gets it meanwhile
        flash(image, manifest, medium, b"", lambda phase, count: None)
        assert medium.finish()
    found, whole = without_identifiers(device.read_bytes(), 8 * MIB), without_identifiers(image.read_bytes())
    for used in manifest.image.ranges:
        assert found[used.offset : used.end] == whole[used.offset : used.end]
    assert tables(found) == {"mbr", "primary"} and found[-MIB:] == bytes(MIB)


def test_what_is_read_back_comes_from_the_disk(device: Path, tmp_path: Path) -> None:
    """The kernel still has in memory what was written; the disk itself has lost it."""
    with opened(str(device), least=MIB) as medium:
        medium.write(b"x" * 8192, MIB)
        medium.settle()
        assert bytes(medium.read(8192, MIB)) == b"x" * 8192
        with device.open("rb") as reader:  # in the memory of the device from now on
            reader.seek(MIB)
            assert reader.read(8192) == b"x" * 8192
        with (tmp_path / "backing").open("r+b") as below:
            below.seek(MIB)
            below.write(b"y" * 8192)
        assert bytes(medium.read(8192, MIB)) == b"y" * 8192


def test_a_file_system_that_reads_in_no_other_way(tmp_path: Path) -> None:
    """Reading goes on where the medium refuses to be read past the kernel's memory."""
    path = tmp_path / "file"
    path.write_bytes(b"z" * 8192)
    with opened(str(path), least=8192) as medium:
        medium.settle()
        medium._direct = (
            os.open(path, os.O_RDONLY | os.O_DIRECT) if medium._direct is None else medium._direct
        )
        assert bytes(medium.read(4096, 4096)) == b"z" * 4096
        odd = memoryview(bytearray(100))  # not aligned, as it would seem to such a file system
        assert medium._read_once(odd, 1) == 100 and bytes(odd) == b"z" * 100
        assert bytes(medium.read(8192, 4096)) == b"z" * 4096


def test_a_mounted_disk_is_refused(device: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at = tmp_path / "a mount"
    with mounted(device, at):
        assert f"is in use: {device.name} is mounted at {at}; 'umount' it first" in refusal(device)
    monkeypatch.setenv("PATH", "/usr/local/bin:/usr/bin:/bin")  # as after `su`: blkid is in sbin
    with opened(str(device), least=MIB) as medium:
        assert medium.about.contents == ("holiday (ext4)",)


def test_where_nothing_tells_what_is_on_a_disk_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_inventory.shutil, "which", lambda _name, path: None)
    assert disk_inventory.contents(Path("/sys/block/none")) == ["unknown: there is no blkid"]


def test_a_disk_with_a_mounted_partition_is_refused(device: Path, tmp_path: Path) -> None:
    partition = with_partition(device)
    with mounted(partition, tmp_path / "at"):
        assert f"is in use: {partition.name} is mounted at" in refusal(device)
    assert "is a partition: an image is for a whole disk, such as loop" in refusal(partition)
    with opened(str(device), least=MIB) as medium:
        assert medium.about.contents == ("holiday (ext4)",)


def test_a_disk_that_another_program_has_is_refused(device: Path) -> None:
    descriptor = os.open(device, os.O_RDONLY | os.O_EXCL)
    try:
        assert "is in use: another program has it" in refusal(device)
    finally:
        os.close(descriptor)


def test_swap_is_refused(device: Path) -> None:
    run("mkswap", device)
    if subprocess.run(["swapon", device], capture_output=True, check=False).returncode:
        pytest.skip("no swap here")
    try:
        assert "is swap space; 'swapoff' it first" in refusal(device)
    finally:
        run("swapoff", device)


def test_a_disk_that_does_not_fit_is_refused(device: Path, tmp_path: Path) -> None:
    assert "is too small: it has 67108864 bytes, a device needs 67112960" in refusal(
        device, least=SIZE + 4096
    )
    assert "has the size it has" in refusal(device, size=SIZE)
    with loop(tmp_path / "large sectors", SIZE, "--sector-size", "4096") as other:
        assert "has sectors of 4096 bytes" in refusal(other)
    with loop(tmp_path / "read only", SIZE, "--read-only") as other:
        assert "is write-protected" in refusal(other)


def test_the_file_of_a_loop_device_is_refused(device: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("backing")
    for name in ("backing", "link"):
        assert f"it is the disk {device.name}" in refusal(tmp_path / name)


def test_the_disk_of_this_system_is_refused() -> None:
    node = DiskInventory().node(Path("/").stat().st_dev)
    if node is None:
        pytest.skip("the root of this system is on no disk")
    disk = node.parent if (node / "partition").exists() else node
    assert "runs from (/ is on it)" in (DiskInventory().refusal_reason(disk) or "")
    assert "runs from" in refusal(f"/dev/{disk.name}")


def test_what_is_neither_disk_nor_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for target in (tmp_path, tmp_path / "fifo", Path("/dev/null")):
        assert "is neither a disk nor a file" in refusal(target)
    with pytest.raises(FileNotFoundError), opened(str(tmp_path / "none" / "x"), least=4096):
        pass


def test_a_disk_that_is_not_there_does_not_become_a_file() -> None:
    assert "there is no such disk" in refusal("/dev/sdzz")
    assert not Path("/dev/sdzz").exists()


def test_a_disks_name_without_its_folder_is_asked_about(
    device: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert f"write {device} for the disk, ./{device.name} for a file" in refusal(device.name)
    with opened(f"./{device.name}", least=4096) as medium:
        assert medium.about.new
    assert (tmp_path / device.name).is_file()


def test_a_file_that_is_too_small_is_not_made(tmp_path: Path) -> None:
    assert "is too small" in refusal(tmp_path / "x", size=4096)
    assert not (tmp_path / "x").exists()


def test_the_disk_of_a_running_virtual_machine_is_refused(tmp_path: Path) -> None:
    """QEMU has locks of open files on some bytes of it."""
    path = tmp_path / "disk"
    path.write_bytes(bytes(8192))
    lock = b"\0\0\0\0\0\0\0\0" + (100).to_bytes(8, "little") + (1).to_bytes(8, "little") + bytes(8)
    with path.open("rb") as file:
        fcntl.fcntl(file, 37, lock)  # F_OFD_SETLK, for reading
        assert "such as a virtual machine" in refusal(path, least=4096)
    with opened(str(path), least=4096):
        pass


class Tree:
    """What the kernel would tell of a machine that isn't there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in ("sys/class/block", "sys/dev/block", "proc/self", "dev/mapper"):
            (root / folder).mkdir(parents=True)
        (root / "proc/swaps").write_text("Filename Type Size Used Priority\n")

    def block(self, name: str, number: str, parent: Path | None = None) -> Path:
        node = (parent or self.root / "sys/devices") / name
        for folder in ("holders", "slaves", "queue"):
            (node / folder).mkdir(parents=True)
        if parent:
            (node / "partition").write_text("1\n")
            (node / "uevent").write_text("DEVNAME=x\nPARTNAME=system\n")
        (self.root / "sys/class/block" / name).symlink_to(node)
        (self.root / "sys/dev/block" / number).symlink_to(node)
        return node

    def on(self, upper: Path, lower: Path) -> None:
        (upper / "slaves" / lower.name).symlink_to(lower)
        (lower / "holders" / upper.name).symlink_to(upper)

    def mount(self, at: str, number: str, source: str) -> None:
        text = f"22 1 {number} / {at} rw,relatime shared:1 - ext4 {source} rw\n"
        with (self.root / "proc/self/mountinfo").open("a") as file:
            file.write(text)

    def refusal_reason(self, disk: Path) -> str:
        (self.root / "proc/self/mountinfo").touch()
        return DiskInventory(self.root).refusal_reason(disk) or ""


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "machine")


def test_a_system_on_lvm_on_raid_on_a_partition(tree: Tree) -> None:
    disk, other = tree.block("sda", "8:0"), tree.block("sdb", "8:16")
    raid, volume = tree.block("md0", "9:0"), tree.block("dm-0", "253:0")
    tree.on(raid, tree.block("sda2", "8:2", disk))
    tree.on(volume, raid)
    tree.mount("/", "253:0", "/dev/mapper/system-root")
    for node in (disk, raid, volume):
        assert "the disk that this system runs from (/ is on it)" in tree.refusal_reason(node)
    assert tree.refusal_reason(other) == ""


def test_a_system_whose_file_system_has_a_number_of_its_own(tree: Tree) -> None:
    disk = tree.block("nvme0n1", "259:0")
    tree.block("nvme0n1p2", "259:2", disk)
    tree.mount("/", "0:31", "/dev/nvme0n1p2")  # btrfs
    assert "runs from (/ is on it)" in tree.refusal_reason(disk)


def test_a_disk_of_boot_alone(tree: Tree) -> None:
    disk = tree.block("mmcblk0", "179:0")
    tree.block("mmcblk0p1", "179:1", disk)
    tree.mount("/boot/efi", "179:1", "/dev/mmcblk0p1")
    assert "(/boot/efi is on it)" in tree.refusal_reason(disk)


def test_a_disk_that_is_part_of_something(tree: Tree) -> None:
    disk = tree.block("sdb", "8:16")
    assert tree.refusal_reason(disk) == ""
    tree.on(tree.block("dm-3", "253:3"), tree.block("sdb1", "8:17", disk))
    assert "sdb1 is part of dm-3 (LVM, RAID or encryption)" in tree.refusal_reason(disk)


def test_swap_on_a_volume_and_a_mount_with_a_blank(tree: Tree) -> None:
    disk, volume = tree.block("sdb", "8:16"), tree.block("dm-1", "253:1")
    (tree.root / "dev/dm-1").touch()
    (tree.root / "dev/mapper/swap").symlink_to("../dm-1")
    with (tree.root / "proc/swaps").open("a") as file:
        file.write("/dev/mapper/swap partition 1 0 -2\n/my\\040swap file 1 0 -3\n")
    assert "dm-1 is swap space" in tree.refusal_reason(volume)
    assert "is swap space" in (DiskInventory(tree.root).file_use(Path("/my swap")) or "")
    assert DiskInventory(tree.root).file_use(Path("/other")) is None
    tree.mount("/mnt/my\\040disk", "8:16", "/dev/sdb")
    assert "sdb is mounted at /mnt/my disk" in tree.refusal_reason(disk)


def test_what_a_disk_calls_itself_and_its_partitions(tree: Tree) -> None:
    disk = tree.block("sdb", "8:16")
    assert disk_inventory.model(disk) == "sdb"
    (disk / "device").mkdir()
    (disk / "device/vendor").write_text("SanDisk \n")
    (disk / "device/model").write_text("Ultra   \n")
    assert disk_inventory.model(disk) == "SanDisk Ultra"
    (disk / "device/vendor").write_text("0x1af4\n")
    assert disk_inventory.model(disk) == "Ultra"
    tree.block("sdb1", "8:17", disk)
    assert disk_inventory.contents(disk, tree.root / "dev") == ["system"]


def test_equal_disks_are_told_apart_by_serial_number_and_slot(tree: Tree) -> None:
    """A host has 36 of them, all blank, and the kernel's names move between boots."""
    disks = []
    for number in range(3):
        disk = tree.block(
            f"nvme{number}n1", f"259:{number}", tree.root / f"sys/devices/pci/0000:4{number}:00.0"
        )
        (disk / "partition").unlink()
        (disk / "device").mkdir()
        (disk / "device/model").write_text("ACME CSD\n")
        (disk / "device/serial").write_text(f"S4XN004{number}      \n")
        (disk / "wwid").write_text(f"eui.00{number}\n")
        (disk / "size").write_text("100\n")
        disks.append(disk)
    loop_device = tree.block("loop0", "7:0")
    (loop_device / "size").write_text("100\n")
    (disks[2] / "size").write_text("200\n")
    assert [disk_names.alike(disk) for disk in disks] == [2, 2, 1]
    assert disk_names.alike(loop_device) == 1
    names = disk_names.names(disks[1])
    assert names.described() == ("serial S4XN0041", "WWN eui.001", "slot 0000:41:00.0")
    assert names.proof == "0041"


def test_a_scsi_disk_tells_its_serial_number_in_a_page(tree: Tree) -> None:
    disk = tree.block("sdb", "8:16", tree.root / "sys/devices/0000:00:1f.2/host1/1:0:3:0/block")
    (disk / "device").mkdir()
    (disk / "device/vpd_pg80").write_bytes(b"\0\x80\0\x08  ZC\x1b1234")
    names = disk_names.names(disk)
    assert (names.serial, names.slot) == ("ZC 1234", "0000:00:1f.2 1:0:3:0")
