# SPDX-License-Identifier: Apache-2.0
"""What the builder makes of a tree: the root, its programs and Python, kernel modules, the boot program."""

from __future__ import annotations

import os
import shutil
import stat
import struct
import subprocess
import zipfile
from pathlib import Path

import pytest

from millpond.base.errors import LocalError
from millpond.images import boards
from millpond.images.build import __main__ as builder
from millpond.images.build import kernel, python, root
from millpond.images.build.boot import command_line, take_time_away
from millpond.images.build.context import Context
from millpond.images.build.verity import VerifiedRoot

NEWEST = 1_700_000_000


def context(tmp_path: Path) -> Context:
    board = boards.read("qemu-virt")
    return Context(
        "qemu-virt", board, builder.SOURCE, tmp_path / "out", tmp_path / "cache", "1", 1, NEWEST, 3
    )


def git(*arguments: object) -> None:
    who = {f"GIT_{role}_{key}": "x" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}
    when = {f"GIT_{role}_DATE": f"{NEWEST} +0000" for role in ("AUTHOR", "COMMITTER")}
    subprocess.run(
        ["git", *map(str, arguments)], check=True, capture_output=True, env=os.environ | who | when
    )


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working tree with one commit."""
    if not shutil.which("git"):
        pytest.skip("there is no git")
    monkeypatch.setenv("HOME", str(tmp_path))
    git("init", "-q", tmp_path / "tree")
    git("-C", tmp_path / "tree", "commit", "-q", "--allow-empty", "-m", "x")
    return tmp_path / "tree"


def test_the_serial_is_the_time_of_the_newest_commit(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert builder._serial(tree) == NEWEST
    monkeypatch.setenv("GIT_DIR", "/nowhere")  # as in a hook
    assert builder._serial(tree) == NEWEST


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a tree to another user")
def test_another_users_tree_has_a_serial(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """git calls its ownership dubious: the serial was 0, and the image older than all others."""
    for path in (tree, *tree.rglob("*")):
        os.chown(path, 4242, 4242)
    monkeypatch.delenv("SUDO_UID", raising=False)
    assert builder._serial(tree) == NEWEST


def test_a_tree_that_is_no_repository_has_no_serial_of_one_around_it(tree: Path) -> None:
    (tree / "unpacked").mkdir()
    with pytest.raises(
        LocalError, match=r"unpacked does not tell its newest commit .*name the image's --serial"
    ):
        builder._serial(tree / "unpacked")


@pytest.mark.skipif(
    shutil.which("mksquashfs") is None, reason="needs mksquashfs: sudo apt install squashfs-tools"
)
def test_a_packagers_clock_is_not_the_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mksquashfs takes one clock alone."""
    (tmp_path / "opt").mkdir()
    (tmp_path / "opt/x").write_text("x")
    made = [tmp_path / name for name in ("one", "two")]
    root.squash(context(tmp_path), made[0], tmp_path / "opt")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    root.squash(context(tmp_path), made[1], tmp_path / "opt")
    assert made[0].read_bytes() == made[1].read_bytes()


@pytest.mark.parametrize("mask", [0o077, 0o002])
def test_what_is_made_is_for_all_users_whatever_the_builders_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mask: int
) -> None:
    """With 077 no worker could import millpond; with 002 the image was another one."""

    def wheel(*_argv: object, **_more: object) -> bytes:
        (tmp_path / "out/work/wheel").mkdir(parents=True)
        with zipfile.ZipFile(tmp_path / "out/work/wheel/millpond.whl", "w") as archive:
            archive.writestr("millpond/wire/__init__.py", "")
        return b""

    monkeypatch.setattr(root, "run", wheel)
    monkeypatch.setattr(python, "compile_all", lambda *_: None)
    before = os.umask(mask)
    try:
        last = root.make_millpond(context(tmp_path))
    finally:
        os.umask(before)
    modes = {path.relative_to(last): stat.S_IMODE(path.stat().st_mode) for path in last.rglob("*")}
    wanted = {path: 0o755 if (last / path).is_dir() or path.parent.name == "bin" else 0o644 for path in modes}
    assert modes == wanted and len(modes) == 8


HEAD = "  Type           Offset   VirtAddr           PhysAddr           FileSiz  MemSiz   Flg Align\n"


@pytest.mark.parametrize(
    ("lines", "good"),
    [
        (
            "  LOAD           0x000000 0x0000000000000000 0x0000000000000000 0x01000 0x01000 R E 0x10000\n",
            True,
        ),
        (
            "  LOAD           0x0200a8 0x00000000000300a8 0x00000000000300a8 0x01000 0x01000 RW  0x10000\n",
            True,
        ),
        (
            "  LOAD           0x0010a8 0x00000000000300a8 0x00000000000300a8 0x01000 0x01000 RW  0x10000\n",
            False,
        ),
        ("  DYNAMIC        0x001000 0x0000000000030000 0x0000000000030000 0x00100 0x00100 RW  0x8\n", False),
    ],
)
def test_what_no_loader_takes_is_noticed(lines: str, good: bool) -> None:
    assert python.loadable(HEAD + lines) is good


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    folder = tmp_path / "6.1.0-made-up"
    folder.mkdir()
    lines = [
        "kernel/nvme/nvme.ko.xz: kernel/drivers/nvme/host/nvme-core.ko.xz kernel/lib/crc64.ko.xz",
        "kernel/drivers/nvme/host/nvme-core.ko.xz: kernel/lib/crc64.ko.xz",
        "kernel/lib/crc64.ko.xz:",
        "kernel/fs/squashfs/squashfs.ko:",
        "kernel/drivers/virtio/virtio_blk.ko.zst:",
    ]
    (folder / "modules.dep").write_text("\n".join(lines) + "\n")
    (folder / "modules.builtin").write_text(
        "kernel/fs/ext4/ext4.ko\nkernel/arch/arm64/crypto/aes-ce-blk.ko\n"
    )
    return folder


def names(found: list[str]) -> list[str]:
    return [Path(path).name.partition(".")[0] for path in found]


def test_what_others_need_comes_first(modules: Path) -> None:
    assert names(kernel.in_order(modules, ["nvme"])) == ["crc64", "nvme-core", "nvme"]


def test_nothing_comes_twice(modules: Path) -> None:
    found = names(kernel.in_order(modules, ["crc64", "nvme_core", "nvme", "nvme-core", "squashfs", "nvme"]))
    assert found == ["crc64", "nvme-core", "nvme", "squashfs"]


def test_what_is_built_in_has_no_file(modules: Path) -> None:
    assert kernel.in_order(modules, ["ext4", "aes_ce_blk", "aes-ce-blk"]) == []


def test_dashes_and_underscores_are_the_same(modules: Path) -> None:
    assert kernel.in_order(modules, ["virtio-blk"]) == ["kernel/drivers/virtio/virtio_blk.ko.zst"]


def test_an_unknown_module_is_refused(modules: Path) -> None:
    with pytest.raises(LocalError, match=r"the kernel 6\.1\.0-made-up has no module nvmee"):
        kernel.in_order(modules, ["nvme", "nvmee"])


def test_a_program_goes_with_all_its_libraries(tmp_path: Path) -> None:
    """Programs of the first file system are found there with the libraries of their libraries."""
    folder = tmp_path / "usr/lib/aarch64-linux-gnu"
    folder.mkdir(parents=True)
    needs = {"dmsetup": ["liba.so.1", "libc.so.6"], "liba.so.1": ["libc.so.6"], "libc.so.6": ["ld.so.1"]}
    for name in ("liba.so.1", "libc.so.6", "ld.so.1"):
        (folder / name).touch()
    found = kernel.libraries(folder, folder / "dmsetup", lambda path: needs.get(path.name, []))
    assert found == {name: folder / name for name in ("liba.so.1", "libc.so.6", "ld.so.1")}
    with pytest.raises(LocalError, match="libz"):
        kernel.libraries(folder, folder / "x", lambda _path: ["libz.so.1"])


def test_readelf_tells_the_libraries() -> None:
    text = """
Dynamic section at offset 0x2fd68 contains 30 entries:
  Tag        Type                         Name/Value
 0x0000000000000001 (NEEDED)             Shared library: [libdevmapper.so.1.02.1]
 0x0000000000000001 (NEEDED)             Shared library: [libc.so.6]
 0x000000000000000c (INIT)               0x4000
"""
    assert kernel.needed(text) == ["libdevmapper.so.1.02.1", "libc.so.6"]


def test_a_program_does_not_say_when_it_was_made(tmp_path: Path) -> None:
    def made(time: int) -> Path:
        dos = b"MZ".ljust(0x3C, b"\1") + struct.pack("<I", 0x80) + b"stub".ljust(0x40, b"\2")
        coff = b"PE\0\0" + struct.pack("<HHIIIHH", 0xAA64, 4, time, 0, 0, 240, 0x206)
        optional = struct.pack("<H62xI", 0x20B, 0x1234 + time).ljust(240, b"\3")
        path = tmp_path / f"{time}.efi"
        path.write_bytes(dos + coff + optional + b"sections")
        return path

    first, second = made(1_700_000_000), made(1_700_000_256)
    before = first.read_bytes()
    assert before != second.read_bytes()
    for path in (first, second):
        take_time_away(path)
    after = first.read_bytes()
    assert after == second.read_bytes()
    zeros = bytes(4)
    assert after == before[:0x88] + zeros + before[0x8C:0xD8] + zeros + before[0xDC:]


def test_the_command_line_vouches_for_the_root() -> None:
    """The first program reads these two words, and maps no other root."""
    words = command_line(boards.read("qemu-virt"), VerifiedRoot(32768, "0f" * 32).argument).split()
    assert words.count(f"millpond.verity=32768,{'0f' * 32}") == 1
    assert words[0] == "console=ttyAMA0"
