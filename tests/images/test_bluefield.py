# SPDX-License-Identifier: Apache-2.0
"""Boot streams for BlueField cards. There is no card: ``boot`` is a file or a FIFO in place of its rshim."""

from __future__ import annotations

import io
import os
import struct
import sys
import threading
import zlib
from pathlib import Path

import pytest

from millpond.base.errors import LocalError, RemoteError
from millpond.images.flash import bluefield

KERNEL = b"MZ".ljust(0x38, b"\0") + b"ARMd" + b"kernel" * 100


def part(identifier: int, data: bytes, following: int) -> bytes:
    """One image of a boot stream, as NVIDIA's tool packs it."""
    padded = data.ljust(-(-len(data) // 8) * 8, b"\0")
    word = 0x13026642 | 1 << 32 | 2 << 36 | 3 << 52 | identifier << 56
    return struct.pack("<QIIQ", word, len(data), zlib.crc32(padded), following) + padded


def stream() -> bytes:
    return part(1, b"firmware", 1 << 62 | 1 << 63) + part(62, b"k" * 1001, 1 << 63) + part(63, b"", 0)


TOOL = f"""#!{sys.executable}
# In place of mlx-mkbfb: takes the options that are used, and packs as it does.
import sys
sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
from images.test_bluefield import part
from pathlib import Path
_, image, kernel, initramfs, initrd, *more, base, result = sys.argv
assert (image, initramfs) == ("--image", "--initramfs"), sys.argv
if Path(initrd).read_bytes() == b"bad":
    sys.exit("mlx-mkbfb: something\\nis wrong with it")
text = more[1].removeprefix("=").encode() if more else b""
Path(result).write_bytes(
    part(1, Path(base).read_bytes(), 7) + part(59, text, 6) + part(62, Path(kernel).read_bytes(), 4)
    + part(63, Path(initrd).read_bytes(), 0)
)
"""


def tool(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    (folder / "mlx-mkbfb").write_text(TOOL)
    (folder / "mlx-mkbfb").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def folder(base: Path) -> Path:
    base.mkdir()
    for name, data in (("kernel", KERNEL), ("initrd", b"initrd"), ("default.bfb", b"firmware")):
        (base / name).write_bytes(data)
    return base


def check(data: bytes) -> int:
    return bluefield.check(io.BytesIO(data), "x.bfb")


def test_a_stream_is_known_by_its_headers_and_sums() -> None:
    assert check(stream()) == 3


@pytest.mark.parametrize("cut", [0, 1, 23, 24, 30, 32, 40, 1000, len(stream()) - 1])
def test_a_stream_that_is_cut_is_refused(cut: int) -> None:
    with pytest.raises(LocalError, match=r"x\.bfb: "):
        check(stream()[:cut])


@pytest.mark.parametrize("at", [0, 4, 6, 8, 12, 25, 60, 400])
def test_a_changed_byte_is_refused(at: int) -> None:
    changed = bytearray(stream())
    changed[at] ^= 0x11
    with pytest.raises(LocalError, match=r"x\.bfb: image \d"):
        check(bytes(changed))


@pytest.mark.parametrize("target", ["rshim0", "/dev/rshim0", "/dev/rshim0/boot"])
def test_a_card_is_known_by_its_names(tmp_path: Path, target: str) -> None:
    (tmp_path / "rshim0").mkdir()
    (tmp_path / "rshim0" / "boot").touch()
    assert bluefield.rshim(target, tmp_path) == tmp_path / "rshim0" / "boot"


def test_a_card_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="rshim driver running"):
        bluefield.rshim("rshim7", tmp_path)
    for other in ("rshim", "./rshim0", "/tmp/rshim0", "sda", "rshim0.img"):
        assert bluefield.rshim(other, tmp_path) is None


def test_all_bytes_reach_the_card_in_order(tmp_path: Path) -> None:
    large = part(1, os.urandom(3_000_001), 2) + stream()
    (tmp_path / "x.bfb").write_bytes(large)
    os.mkfifo(tmp_path / "boot")  # in place of the card: takes some bytes at a time
    seen: list[bytes] = []
    card = threading.Thread(target=lambda: seen.append((tmp_path / "boot").read_bytes()))
    card.start()
    told: list[int] = []
    assert bluefield.push(tmp_path / "x.bfb", tmp_path / "boot", told.append) == len(large) == sum(told)
    card.join(20)
    assert seen == [large]


def test_a_bad_stream_never_reaches_the_card(tmp_path: Path) -> None:
    (tmp_path / "x.bfb").write_bytes(stream()[:-4])
    (tmp_path / "boot").touch()
    with pytest.raises(LocalError):
        bluefield.push(tmp_path / "x.bfb", tmp_path / "boot", lambda count: None)
    assert (tmp_path / "boot").read_bytes() == b""


def test_a_card_that_fails_is_told(tmp_path: Path) -> None:
    (tmp_path / "x.bfb").write_bytes(stream())
    with pytest.raises(RemoteError, match="No space left on device: the same command"):
        bluefield.push(tmp_path / "x.bfb", Path("/dev/full"), lambda count: None)
    with pytest.raises(RemoteError, match="Is a directory"):
        bluefield.push(tmp_path / "x.bfb", tmp_path, lambda count: None)


def test_a_stream_is_built_by_the_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path / "bin", monkeypatch)
    image = folder(tmp_path / "image")
    (image / "cmdline").write_text("console=ttyAMA0 quiet\n")
    bluefield.build(image, tmp_path / "made.bfb")
    made = (tmp_path / "made.bfb").read_bytes()
    assert check(made) == 4
    for piece in (KERNEL, b"initrd", b"console=ttyAMA0 quiet", b"firmware"):
        assert piece in made


def test_what_a_stream_needs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image, made = folder(tmp_path / "image"), tmp_path / "made.bfb"

    def complaint() -> str:
        with pytest.raises(LocalError) as error:
            bluefield.build(image, made)
        assert "\n" not in str(error.value)
        return str(error.value)

    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no mlx-mkbfb in PATH: it is in NVIDIA's rshim package" in complaint()
    tool(tmp_path / "bin", monkeypatch)
    (image / "initrd").write_bytes(b"bad")
    assert complaint() == "mlx-mkbfb failed: is wrong with it"
    (image / "initrd").unlink()
    assert "initrd: no such file" in complaint()
    (image / "kernel").write_bytes(b"\x1f\x8b compressed")
    assert "is no uncompressed arm64 kernel" in complaint()
    (image / "default.bfb").unlink()
    assert bluefield.BASE.exists() or "NVIDIA's package mlxbf-bootimages has it" in complaint()
