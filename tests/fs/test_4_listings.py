# SPDX-License-Identifier: Apache-2.0
"""Listings through both mounts: names with attributes, what changes meanwhile, what the kernel forgets."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from millpond.fs.client import callbacks

from ..effort import scaled
from ..waiting import eventually
from .conftest import WithBoth, mounted, stats
from .world import World

_MANY = scaled(quick=3000, full=20_000)


def fill(folder: Path) -> None:
    """Files of all types, with other attributes each."""
    (folder / "dir").mkdir(mode=0o710)
    (folder / "link").symlink_to("nowhere")
    (folder / "empty").touch()
    (folder / "data").write_bytes(bytes(12345))
    (folder / "other name").hardlink_to(folder / "data")
    (folder / ("n" * 255)).write_text("long")
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff\xfe")).write_text("no UTF-8")
    os.mkfifo(folder / "fifo", 0o604)
    with socket.socket(socket.AF_UNIX) as sock:
        os.chdir(folder)
        sock.bind("sock")
    os.utime(folder / "empty", ns=(1_000_000_001, -1_500_000_000))
    for number in range(300):
        (folder / f"{number:03}").write_bytes(bytes(number))


def seen(folder: Path) -> dict[str, tuple[object, ...]]:
    """What a listing and lstat of each name show."""
    found = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            a = entry.stat(follow_symlinks=False)
            times = a.st_mtime_ns, a.st_ctime_ns, a.st_atime_ns
            found[entry.name] = (a.st_mode, a.st_nlink, a.st_size, a.st_blocks, a.st_ino, a.st_rdev, *times)
            assert entry.inode() == a.st_ino
    return found


@mounted()
def test_listed_attributes_are_those_of_the_files(world: World) -> None:
    there = world.backing / "public"
    fill(there)
    for top in (world.host / "public", world.device / "public"):
        expected = seen(there)
        for _ in range(2):
            found = seen(top)
            assert found == expected
        assert sorted(os.listdir(top)) == sorted(expected)  # noqa: PTH208


@mounted()
def test_a_listing_with_attributes_looks_up_no_name(world: World) -> None:
    there, top = world.backing / "public" / "d", world.host / "public" / "d"
    there.mkdir()
    for number in range(_MANY):
        (there / f"{number}").touch()
    said = subprocess.run(["ls", "-l", top], capture_output=True, check=True, text=True).stdout
    assert len(said.splitlines()) == _MANY + 1
    asked = stats(world).asked
    if not asked["readdirplus"]:
        pytest.skip("the kernel has no READDIRPLUS")
    assert asked["lookup"] < 20 and asked["getattr"] < _MANY / 10
    assert {name.name for name in top.iterdir()} == {str(number) for number in range(_MANY)}


def test_a_listing_goes_on_where_telldir_was(with_both: WithBoth, world: World) -> None:
    program = (
        "import ctypes, os, sys; libc = ctypes.CDLL(None, use_errno=True)\n"
        "libc.opendir.restype = libc.readdir64.restype = ctypes.c_void_p\n"
        "libc.telldir.restype = ctypes.c_long\n"
        "stream = ctypes.c_void_p(libc.opendir(os.fsencode(sys.argv[1])))\n"
        "def name(entry): return ctypes.string_at(entry + 19)\n"
        "def rest():\n"
        "    found = []\n"
        "    while entry := libc.readdir64(stream):\n"
        "        found.append((name(entry), libc.telldir(stream)))\n"
        "    return found\n"
        "all = rest()\n"
        "for at in (0, 1, 700, 1234, len(all) - 2, 5):\n"
        "    libc.seekdir(stream, ctypes.c_long(all[at][1]))\n"
        "    assert rest() == all[at + 1 :], at\n"
        "libc.rewinddir(stream)\n"
        "assert rest() == all and len({name for name, _ in all}) == len(all) == 1502\n"
        "open(sys.argv[1] + '/new', 'w').close()\n"
        "libc.rewinddir(stream)\n"
        "assert {name for name, _ in rest()} == {name for name, _ in all} | {b'new'}\n"
        "os.unlink(sys.argv[1] + '/new')\n"
    )

    def body() -> None:
        import sys

        there = world.backing / "public" / "d"
        there.mkdir()
        there.chmod(0o777)
        for number in range(1500):
            (there / f"{number}").touch()
        for top in (world.host, world.device):
            subprocess.run([sys.executable, "-c", program, top / "public" / "d"], check=True)

    with_both(body)


@mounted()
def test_names_that_stay_are_listed_once_while_others_come_and_go(world: World) -> None:
    there = world.backing / "public" / "d"
    there.mkdir()
    there.chmod(0o777)
    for top, other in ((world.host, world.device), (world.device, world.host)):
        names = {f"stays{number:04}" for number in range(1500)}
        for name in names:
            (there / name).touch()
        found = []
        with os.scandir(top / "public" / "d") as entries:
            for number, entry in enumerate(entries):
                found.append(entry.name)
                if number % 100 == 0:
                    (other / "public" / "d" / f"comes{number}").touch()
                    (top / "public" / "d" / f"{top.name}{number}").touch()
                if number % 200 == 150:
                    (other / "public" / "d" / f"comes{number - 50}").unlink()
        assert len(found) == len(set(found)) and names <= set(found)
        everything = {path.name for path in there.iterdir()}
        assert {path.name for path in (top / "public" / "d").iterdir()} == everything
        for path in there.iterdir():
            path.unlink()


def test_the_kernel_is_told_to_forget_when_it_knows_many(
    with_both: WithBoth, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callbacks, "MOST_KNOWN", 200)

    def body() -> None:
        there, here = world.backing / "public" / "d", world.host / "public" / "d"
        there.mkdir()
        for number in range(1000):
            (there / f"{number}").write_text(f"{number}")
        with (here / "7").open() as file:
            assert len(seen(here)) == 1000
            eventually(
                lambda: stats(world).asked["batch_forget"] + stats(world).asked["forget"],
                "the kernel forgets",
            )
            assert file.read() == "7"
        for number in range(0, 1000, 50):
            assert (here / f"{number}").read_text() == f"{number}"
        expected = seen(there)
        assert seen(here) == expected

    with_both(body)
