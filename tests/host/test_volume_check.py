# SPDX-License-Identifier: Apache-2.0
"""`millpond volume`: the findings of a check, and their printed form."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from millpond.fs.client.metrics import MountStats
from millpond.fs.coherence.manager import DelegationManager
from millpond.fs.proto.status import ClientIs, StatusIs
from millpond.fs.server.connection import serve
from millpond.fs.server.sessions import SessionTable
from millpond.fs.store.backing_fs import BackingFs
from millpond.fs.store.layout import PUBLIC, prepare
from millpond.fs.vfs.path_adapter import PathAdapter
from millpond.fs.vfs.path_api import Attributes, os_error
from millpond.host.records.volume import Checked, VolumeReport
from millpond.host.remote.volume_check import TreeWalk, check_status, probe
from millpond.host.remote.volume_report import how_mounted, of_mount
from millpond.host.terminal.volume_table import lines, show, show_operations
from millpond.wire.channel import Channel
from millpond.wire.control_messages import AtRest

STATUS = StatusIs(None, 4096, 1, 10.0, (), True, 0, "Landlock: on, version 3")
CLIENT = ClientIs(1, 2.5, 3, 4, True)


@pytest.fixture
def backing(tmp_path: Path) -> Path:
    prepare(tmp_path / "flash")
    return tmp_path / "flash"


@pytest.fixture
def root(backing: Path) -> Iterator[int]:
    descriptor = os.open(backing, os.O_PATH | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)


def found_in(root: int, now: float) -> tuple[int, list[str]]:
    walk = TreeWalk(PathAdapter(BackingFs(root)), lambda: now)
    walk.check()
    return walk.files, [str(finding) for finding in walk.findings]


def test_a_sound_tree_has_no_findings(backing: Path, root: int) -> None:
    public = backing / PUBLIC
    (public / "d").mkdir()
    (public / "d" / "f").write_text("x")
    (public / "g").hardlink_to(public / "d" / "f")
    (public / "l").symlink_to("/nowhere")
    os.mkfifo(public / "fifo")
    (public / ".new.0123456789ab.part").write_text("just being written")
    now = (public / ".new.0123456789ab.part").stat().st_mtime
    assert found_in(root, now + 5) == (7, [])


def test_unfinished_copies_and_missing_names_are_found(backing: Path, root: int) -> None:
    part = backing / PUBLIC / ".big.bin.0123456789ab.part"
    part.write_text("x")
    (backing / PUBLIC / "f").write_text("x")
    (backing / PUBLIC / "seen").write_text("x")
    (backing / "elsewhere").hardlink_to(backing / PUBLIC / "seen")
    _, (unfinished, linked) = found_in(root, part.stat().st_mtime + 7300)
    assert unfinished.startswith(f"public/{part.name} is an unfinished copy, last written 2 hours ago: ")
    assert linked.startswith("public/seen has 2 links, and 1 names were found: ")


class Failing(PathAdapter):
    """A volume some of whose names cannot be looked at, or change."""

    def __init__(self, root: int) -> None:
        super().__init__(BackingFs(root))
        self.failures: dict[str, int] = {}
        self.changing = 0

    def getattr(self, path: str) -> Attributes:
        if code := self.failures.get(path):
            raise os_error(code, path)
        found = super().getattr(path)
        self.changing += 1
        return replace(found, ctime=self.changing)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.EACCES, "Permission denied: give the user of the volume's server a right"),
        (errno.EIO, "Input/output error: look at the flash's health"),
        (errno.ENOENT, None),
    ],
)
def test_what_cannot_be_read_is_told_with_its_errno(
    backing: Path, root: int, code: int, words: str | None
) -> None:
    volume = Failing(root)
    (backing / PUBLIC / "f\n").write_text("x")
    volume.failures["public/f\n"] = code
    walk = TreeWalk(volume)
    walk.check()
    assert [str(finding).startswith(f"public/f  cannot be read: {words}") for finding in walk.findings] == (
        [True] if words else []
    )


def test_a_volume_without_a_public_part_is_a_finding(backing: Path, root: int) -> None:
    (backing / PUBLIC).rmdir()
    _, (finding,) = found_in(root, 0)
    assert "public cannot be read: No such file or directory" in finding


def test_links_that_change_meanwhile_are_no_finding(backing: Path, root: int) -> None:
    (backing / PUBLIC / "f").write_text("x")
    (backing / "elsewhere").hardlink_to(backing / PUBLIC / "f")
    walk = TreeWalk(Failing(root))
    walk.check()
    assert walk.findings == []


def probed(root: int, public: bytes | None) -> list[str]:
    """What is found of a server that knows which part is public, or not."""
    ours, theirs = socket.socketpair()
    sessions = SessionTable(BackingFs(root, public=public), DelegationManager())
    server = threading.Thread(target=serve, args=(Channel(theirs, "the host"), sessions))
    server.start()
    with Channel(ours, "csd0") as channel:
        found = [str(finding) for finding in probe(channel)]
    server.join()
    return found


def test_a_server_that_shows_the_private_part_is_found_out(backing: Path, root: int) -> None:
    (first,) = probed(root, None)  # its root has both parts
    assert first.startswith("the host gets 'fs.found' for private: unmount it everywhere")
    assert probed(root, PUBLIC.encode()) == []
    (backing / "private").rmdir()
    assert probed(root, None) == []


def test_what_a_server_reports_is_judged() -> None:
    assert list(check_status(STATUS)) == []
    gone = ClientIs(1, None, 5, 0, False)
    bad = replace(STATUS, device=False, quota=4000, clients=(gone, CLIENT))
    told = [finding.problem for finding in check_status(bad)]
    assert [text.split()[0] for text in told] == ["the", "client", "the"]
    assert "5 files" in told[1] and "96 bytes more" in told[2]


def test_how_the_device_mounted_is_in_its_log() -> None:
    mounted = "2026-01-01 INFO the volume is mounted at /volume: by the kernel itself: (FUSE passthrough)"
    assert how_mounted(["x", mounted, "y"]) == "by the kernel itself: (FUSE passthrough)"
    assert how_mounted(["x"]) == ""


def shown(info: VolumeReport) -> str:
    console = Console(width=160, highlight=False, markup=False)
    with console.capture() as capture:
        console.print(show(info))
    return capture.get()


def test_people_see_all_of_it() -> None:
    took = tuple(3 if bits == 8 else 0 for bits in range(32))
    mount = of_mount(MountStats("csd0", "/mnt", "kept", {"lookup": 9}, {"fs.walk": took}, 2000, 1000, 7))
    assert mount.kept["lookup"] == (6, 9)
    status = replace(STATUS, quota=8192, clients=(CLIENT, replace(CLIENT, heard=None)))
    info = VolumeReport("csd0", status, "somehow", 1000, 250, 5, AtRest("AES", ""), (mount,))
    text = " ".join(shown(info).split())
    for words in (
        "4.1 kB in 1 file, 50% of a quota of 8.2 kB",
        "private 5 B, encrypted (AES)",
        "750 B of 1.0 kB free",
        "present, somehow",
        "2.5 of 10 s",
        "over",
        "lookup 6 of 9",
        "2.0 kB, 1.0 kB of it used",
        "7 B of new files are not on the device yet",
        "walk 3 192 us 192 us",
    ):
        assert words in text, (words, text)


def test_people_see_the_operations_of_mounts() -> None:
    took = tuple(2 if bits == 8 else 1 if bits == 24 else 0 for bits in range(32))
    about = MountStats("csd0", "/mnt", operations={"fsync": took}, errors={"fsync": {"EIO": 1, "ENOSPC": 2}})
    info = VolumeReport("csd0", STATUS, "", None, None, None, None, (of_mount(about),))
    console = Console(width=160, highlight=False, markup=False)
    with console.capture() as capture:
        console.print(show_operations(info))
        console.print(show_operations(replace(info, mounts=())))
    text = " ".join(capture.get().split())
    assert "mount /mnt" in text and "fsync 3 192 us 12.6 s 12.6 s 1 EIO, 2 ENOSPC" in text
    assert "not mounted on this host" in text


def test_people_see_what_little_is_known() -> None:
    text = shown(
        VolumeReport("csd0", replace(STATUS, used=None, device=False), "", None, None, None, None, ())
    )
    assert "not counted, no quota" in text and "has not reported" in text


def test_a_check_ends_with_its_result() -> None:
    clean = Checked("csd0", 3, "a sandbox", AtRest("", "no key"), ())
    assert lines(clean) == [
        "server: a sandbox",
        "private data at rest: plain: no key",
        "csd0: 3 files, clean",
    ]
    assert lines(replace(clean, findings=("a: b",)))[0] == "a: b"
    assert lines(replace(clean, findings=("a: b",)))[-1] == "csd0: 3 files, findings: 1"
