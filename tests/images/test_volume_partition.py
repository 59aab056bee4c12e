# SPDX-License-Identifier: Apache-2.0
"""The volume's disk: only a blank one is formatted, once, and only the device's own is ever mounted."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import uuid
from pathlib import Path

import pytest

from millpond.base.errors import ConfigError, LocalError
from millpond.images.build import root
from millpond.images.build.recipe import RECIPE
from millpond.images.format import volume_disk
from millpond.images.format.volume_disk import VolumeDisk
from millpond.images.ondevice import boot_entries, gpt, volume_partition

MIB = 1 << 20
SIZE = 64 * MIB
NAME = "/dev/disk/by-id/nvme-ACME_S4XN0042"
MINE = VolumeDisk(NAME)
_SFDISK = shutil.which("sfdisk", path="/usr/sbin:/sbin:/usr/bin")
pytestmark = [
    pytest.mark.skipif(_SFDISK is None, reason="needs sfdisk: sudo apt install fdisk"),
    pytest.mark.skipif(not Path("/sbin/blkid").exists(), reason="needs blkid: sudo apt install util-linux"),
]


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A blank disk: a file, sparse."""
    path = tmp_path / "nvme1n1"
    path.touch()
    os.truncate(path, SIZE)
    return path


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return tmp_path / "state" / "volume.toml"


@pytest.fixture(autouse=True)
def _state(record: Path) -> None:
    record.parent.mkdir()


def partition(disk: Path, *, kind: str = volume_partition.TYPE, name: str = volume_partition.NAME) -> None:
    """A new table with one partition."""
    assert _SFDISK
    text = f'label: gpt\nstart=2048, size=20480, type={kind}, name="{name}"\n'
    argv = [_SFDISK, "--quiet", "--no-reread", "--wipe", "never", disk]
    subprocess.run(argv, input=text.encode(), check=True, timeout=60)


def settle(disk: Path, record: Path, wanted: VolumeDisk = MINE) -> str:
    return volume_partition.settle(wanted, disk, record, partition)


def refuse(_disk: Path) -> None:
    raise AssertionError("nothing may be made")


def test_a_blank_disk_gets_a_volume_once(disk: Path, record: Path) -> None:
    guid = settle(disk, record)
    assert [(one.type, one.guid, one.name) for one in gpt.partitions(disk)] == [
        (volume_partition.TYPE, guid, "flash")
    ]
    before = disk.read_bytes()
    assert volume_partition.settle(MINE, disk, record, refuse) == guid
    assert disk.read_bytes() == before


def put(disk: Path, place: int, data: bytes) -> None:
    with disk.open("r+b") as file:
        file.seek(place)
        file.write(data)


@pytest.mark.parametrize("place", [0, 1024, MIB, SIZE // 2, SIZE - 4096])
def test_raw_data_of_another_is_never_formatted(disk: Path, record: Path, place: int) -> None:
    """A disk of raw data, which blkid does not know, was formatted by the first boot."""
    put(disk, place, b"a database without a name")
    before = disk.read_bytes()
    with pytest.raises(LocalError) as caught:
        volume_partition.settle(MINE, disk, record, refuse)
    assert f"data of an unknown kind at byte {place // 4096 * 4096}" in str(caught.value)
    assert f"millpond flash ... --volume-disk {NAME} --erase-volume" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert disk.read_bytes() == before and not record.exists()


def test_what_others_have_made_is_never_formatted_without_a_word(disk: Path, record: Path) -> None:
    mke2fs = shutil.which("mke2fs", path="/usr/sbin:/sbin")
    assert mke2fs
    subprocess.run([mke2fs, "-q", "-F", disk], check=True, timeout=60)
    with pytest.raises(LocalError, match="holds ext"):
        volume_partition.settle(MINE, disk, record, refuse)
    assert settle(disk, record, VolumeDisk(NAME, erase=True)) == gpt.partitions(disk)[0].guid


def test_another_partition_is_no_volume(disk: Path, record: Path) -> None:
    for kind, name in ((str(uuid.uuid4()), "flash"), (volume_partition.TYPE, "backup")):
        partition(disk, kind=kind, name=name)
        with pytest.raises(LocalError, match="holds gpt"):
            volume_partition.settle(MINE, disk, record, refuse)


def test_a_device_that_is_flashed_anew_finds_its_volume(disk: Path, record: Path) -> None:
    guid = settle(disk, record)
    record.unlink()
    assert volume_partition.settle(MINE, disk, record, refuse) == guid
    record.unlink()
    assert settle(disk, record, VolumeDisk(NAME, erase=True)) != guid


@pytest.mark.parametrize("erase", [False, True])
def test_a_volume_that_is_away_is_no_reason_for_an_empty_one(disk: Path, record: Path, erase: bool) -> None:
    """With two drives, the one that came first was the volume: an empty one where the order had changed."""
    settle(disk, record)
    for other in (lambda: os.truncate(disk, 0), lambda: partition(disk)):
        other()
        os.truncate(disk, SIZE)
        with pytest.raises(LocalError, match="put its disk back, or flash the device anew"):
            volume_partition.settle(VolumeDisk(NAME, erase), disk, record, refuse)


def test_a_making_that_was_cut_is_done_again_on_the_same_disk_alone(disk: Path, record: Path) -> None:
    def cut(disk: Path) -> None:
        put(disk, 2 * MIB, b"half of a file system")
        raise LocalError("the power failed")

    with pytest.raises(LocalError, match="the power failed"):
        volume_partition.settle(MINE, disk, record, cut)
    with pytest.raises(LocalError, match="data of an unknown kind"):
        volume_partition.settle(VolumeDisk(NAME + "x"), disk, record, refuse)
    assert settle(disk, record) == gpt.partitions(disk)[0].guid


def test_tables_are_read_with_either_size_of_sectors(disk: Path) -> None:
    kind, guid = uuid.UUID(volume_partition.TYPE), uuid.uuid4()
    header = b"EFI PART".ljust(72, b"\0") + (2).to_bytes(8, "little") + bytes([4, 0, 0, 0, 128, 0, 0, 0])
    put(disk, 4096, header)
    put(disk, 8192 + 128, kind.bytes_le + guid.bytes_le + bytes(24) + "flash".encode("utf-16-le"))
    assert gpt.partitions(disk) == [gpt.TablePartition(2, str(kind), str(guid), "flash")]
    put(disk, 4096 + 80, b"\xff" * 8)  # a hostile header
    assert gpt.partitions(disk) == []


@pytest.mark.parametrize(
    "name", ["/dev/nvme0n1", "/dev/disk/by-id/nvme-X-part1", "/dev/disk/by-id/../sda", ""]
)
def test_only_a_name_that_stays_with_the_disk_names_it(tmp_path: Path, name: str) -> None:
    (tmp_path / volume_disk.FILE).write_text(f'disk = "{name}"\n')
    with pytest.raises(ConfigError, match="is no whole disk's name"):
        volume_disk.read(tmp_path)


def test_what_the_host_writes_the_device_reads(tmp_path: Path) -> None:
    for wanted in (MINE, VolumeDisk(NAME, erase=True)):
        (tmp_path / volume_disk.FILE).write_text(volume_disk.dumps(wanted))
        assert volume_disk.read(tmp_path) == wanted


def test_a_disk_that_does_not_come_is_told_with_those_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_id = tmp_path / "by-id"
    by_id.mkdir()
    (by_id / "nvme-OTHER").touch()
    (by_id / "nvme-OTHER-part1").touch()
    with pytest.raises(
        LocalError, match=r"there is no .*nvme-MINE, the volume's disk; there are: nvme-OTHER$"
    ):
        volume_partition.find(VolumeDisk(str(by_id / "nvme-MINE")), 0.0)
    monkeypatch.setattr(boot_entries, "boot_disk", lambda: "/dev/vda")
    with pytest.raises(LocalError, match="or none at all"):
        volume_partition.find(VolumeDisk(str(by_id / "nvme-OTHER")), 0.0)


def test_a_device_says_in_one_line_that_nothing_names_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(volume_partition, "IDENTITY", tmp_path)
    assert volume_partition.main() == 1
    assert capsys.readouterr().out.count("\n") == 1


def test_the_image_formats_nothing_by_a_name_of_the_kernels() -> None:
    lines = (RECIPE / "root/etc/fstab").read_text()
    assert "makefs" not in lines and "nvme" not in lines
    made = (RECIPE / "root/usr/lib/repart.d/60-flash.conf").read_text()
    assert f"Type={volume_partition.TYPE}" in made and f"Label={volume_partition.NAME}" in made


def test_an_image_whose_volume_has_its_own_disk_makes_none_on_the_boot_disk(tmp_path: Path) -> None:
    shutil.copytree(RECIPE / "root/usr/lib/repart.d", tmp_path / "usr/lib/repart.d")
    root._give_volume_its_disk(tmp_path)
    assert [path.name for path in (tmp_path / "usr/lib/repart.d").iterdir()] == ["50-state.conf"]
    assert (tmp_path / "usr/lib/millpond/volume-disk/flash.conf").exists()
    assert "x-systemd.requires=millpond-volume.service" in root._FLASH_OPTIONS["own"]


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("systemd-repart") is None, reason="root's systemd-repart"
)
def test_systemd_makes_the_partition_and_its_file_system(disk: Path, record: Path, tmp_path: Path) -> None:
    os.truncate(disk, 320 * MIB)
    definitions = tmp_path / "definitions"
    definitions.mkdir()
    shutil.copyfile(RECIPE / "root/usr/lib/repart.d/60-flash.conf", definitions / "flash.conf")
    try:
        guid = volume_partition.settle(
            MINE, disk, record, lambda disk: volume_partition.make_partition(disk, definitions)
        )
    except LocalError as error:
        if re.search("loop", str(error)):
            pytest.skip(f"no loop devices here: {error}")
        raise
    assert [one.guid for one in gpt.partitions(disk)] == [guid]
    argv = ["/sbin/blkid", "-p", "-O", str(MIB), "-s", "TYPE", "-o", "value", disk]
    assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout == "ext4\n"
