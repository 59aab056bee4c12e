# SPDX-License-Identifier: Apache-2.0
"""Seeds: their content, and the device's refusals at its first boot."""

from __future__ import annotations

import hashlib
import io
import os
import struct
import tarfile
from pathlib import Path

import pytest

from millpond.base.errors import LocalError
from millpond.images.format import seed
from millpond.images.format.seed import Member


def identity(folder: Path) -> Path:
    folder.mkdir()
    for name, mode in (("agent.toml", 0o644), ("key.pem", 0o600), ("empty", 0o640)):
        (folder / name).write_text("" if name == "empty" else f"the text of {name}")
        (folder / name).chmod(mode)
    return folder


def wrapped(content: bytes) -> bytes:
    """A header as the format says, written here once more."""
    head = b"millpond-seed\0" + struct.pack("<IQ", 1, len(content)) + hashlib.sha256(content).digest()
    return head.ljust(512, b"\0") + content


def packed(*abouts: tarfile.TarInfo, kind: int = tarfile.USTAR_FORMAT) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=kind) as tar:
        for about in abouts:
            tar.addfile(about, io.BytesIO(bytes(about.size)))
    return archive.getvalue()


def about(name: str, kind: bytes = tarfile.REGTYPE, **more: object) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type = kind
    for key, value in more.items():
        setattr(made, key, value)
    return made


def read(data: bytes) -> tuple[Member, ...]:
    return seed.read(io.BytesIO(data))


def test_a_seed_gives_the_files_back_with_their_modes(tmp_path: Path) -> None:
    made = seed.seed(identity(tmp_path / "etc"))
    assert made[:14] == b"millpond-seed\0" and made == wrapped(made[512:])
    assert read(made.ljust(1 << 20, b"\0")) == (
        Member("agent.toml", 0o644, b"the text of agent.toml"),
        Member("empty", 0o640, b""),
        Member("key.pem", 0o600, b"the text of key.pem"),
    )


def test_a_seed_tells_nothing_of_the_machine_that_made_it(tmp_path: Path) -> None:
    folder = identity(tmp_path / "etc")
    made = seed.seed(folder)
    for path in folder.iterdir():
        os.utime(path, (5, 5))
        if os.geteuid() == 0:
            os.chown(path, 1234, 1234)
    assert seed.seed(folder) == made
    with tarfile.open(fileobj=io.BytesIO(made[512:])) as tar:
        assert {(m.mtime, m.uid, m.gid, m.uname, m.gname) for m in tar} == {(0, 0, 0, "", "")}


def test_without_a_seed_there_is_nothing() -> None:
    assert read(b"") == read(bytes(4096)) == read(seed.WIPED + bytes(4096)) == ()
    assert len(seed.WIPED) == 512


@pytest.mark.parametrize("position", [0, 10, 14, 18, 30, 512, 600, -1])
def test_a_changed_byte_is_noticed(tmp_path: Path, position: int) -> None:
    made = bytearray(seed.seed(identity(tmp_path / "etc")))
    made[position] ^= 1
    with pytest.raises(LocalError, match="flash"):
        read(bytes(made))


@pytest.mark.parametrize("length", [1, 100, 511, 512, 1000])
def test_a_seed_that_is_cut_is_noticed(tmp_path: Path, length: int) -> None:
    with pytest.raises(LocalError):
        read(seed.seed(identity(tmp_path / "etc"))[:length])


@pytest.mark.parametrize(
    "content",
    [
        packed(about("../passwd")),
        packed(about("/etc/passwd")),
        packed(about("a/b")),
        packed(about("..")),
        packed(about("new\nline")),
        packed(about("link", tarfile.SYMTYPE, linkname="/etc/shadow")),
        packed(about("a"), about("hard", tarfile.LNKTYPE, linkname="a")),
        packed(about("folder", tarfile.DIRTYPE)),
        packed(about("null", tarfile.CHRTYPE, devmajor=1, devminor=3)),
        packed(about("fifo", tarfile.FIFOTYPE)),
        packed(about("setuid", mode=0o4755)),
        packed(about("a"), about("a")),
        packed(*(about(f"f{number}") for number in range(65))),
        packed(about("a", pax_headers={"comment": "x"}), kind=tarfile.PAX_FORMAT),
        packed(about("b" * 120), kind=tarfile.GNU_FORMAT),
        packed(about("a", size=5000))[:2048],
        b"no tar at all".ljust(1024, b"x"),
    ],
)
def test_what_no_identity_holds_is_refused(content: bytes) -> None:
    with pytest.raises(LocalError, match="seed"):
        read(wrapped(content))


def test_a_length_is_checked_before_it_is_read() -> None:
    huge = bytearray(wrapped(b""))
    struct.pack_into("<Q", huge, 18, 1 << 62)
    with pytest.raises(LocalError, match="claims"):
        read(bytes(huge))


def test_another_version_is_told() -> None:
    other = bytearray(wrapped(b""))
    struct.pack_into("<I", other, 14, 2)
    with pytest.raises(LocalError, match="version 2, not 1"):
        read(bytes(other))


def test_what_can_not_be_in_a_seed_is_told(tmp_path: Path) -> None:
    folder = identity(tmp_path / "etc")
    (folder / "deeper").mkdir()
    with pytest.raises(LocalError, match="deeper is no regular file"):
        seed.seed(folder)
    (folder / "deeper").rmdir()
    (folder / "deeper").symlink_to("/etc/shadow")
    with pytest.raises(LocalError, match="deeper is no regular file"):
        seed.seed(folder)
    (folder / "deeper").unlink()
    (folder / "large").write_bytes(bytes(1 << 20))
    with pytest.raises(LocalError, match="too large"):
        seed.seed(folder)
    (folder / "large").unlink()
    (folder / ("n" * 101)).touch()
    with pytest.raises(LocalError, match="can not be the name"):
        seed.seed(folder)
