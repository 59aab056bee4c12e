# SPDX-License-Identifier: Apache-2.0
"""The kernel's modules, ordered by their dependencies."""

from __future__ import annotations

from pathlib import Path

import pytest

from millpond.base.errors import LocalError
from millpond.images.build import kernel


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
