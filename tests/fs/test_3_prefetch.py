# SPDX-License-Identifier: Apache-2.0
"""Announced files: a program gets the same paths back, and the right bytes."""

from __future__ import annotations

import fcntl
import itertools
import os
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from millpond.fs.fuse.abi import PREFETCH_MOST, prefetch_command
from millpond.fs.mount import stats_socket
from millpond.fs.prefetch import prefetch

from ..effort import scaled
from ..waiting import eventually
from .conftest import World
from .support import Doing, errno_of

WithBoth = Callable[..., None]
ROUNDS = scaled(quick=5, full=15)


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))  # noqa: PTH208


def samples(top: Path, folders: int, each: int) -> list[Path]:
    """That many files, in some order."""
    found = []
    for label in range(folders):
        (top / str(label)).mkdir()
        for number in range(each):
            found.append(top / str(label) / f"{number:040}")
            found[-1].write_text(f"{label} {number}")
    random.Random(1).shuffle(found)
    return found


@pytest.mark.parametrize("window", [1, 2, 7, 512])
@pytest.mark.parametrize("count", [0, 1, 3, 40])
def test_a_plain_directory(tmp_path: Path, window: int, count: int) -> None:
    paths, before = samples(tmp_path, 1, count), descriptors()
    assert list(prefetch(iter(paths), window=window)) == paths
    assert descriptors() == before


def test_paths_of_any_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("f").touch()
    strings = [
        "f",
        "",
        "/",
        ".",
        "f/",
        "f/none",
        "none/none",
        "a\0b",
        "a\0b/c",
        "x" * 5000,
        "/proc/self/status",
    ]
    assert list(prefetch(strings)) == strings
    assert list(prefetch([b"f", b"\xff/x"])) == [b"f", b"\xff/x"]
    assert list(prefetch([Path("f")])) == [Path("f")]


def test_no_more_is_taken_than_the_window(tmp_path: Path) -> None:
    taken: list[Path] = []

    def paths() -> Iterable[Path]:
        for number in range(100):
            taken.append(tmp_path / str(number))
            yield taken[-1]

    before = descriptors()
    coming = prefetch(paths(), window=10)
    for number in range(50):
        assert next(coming).name == str(number)
        assert len(taken) <= number + 11
    coming.close()  # type: ignore[attr-defined]
    assert descriptors() == before


def test_many_directories(tmp_path: Path) -> None:
    paths, before = samples(tmp_path, 300, 2), descriptors()
    assert list(prefetch(paths)) == paths
    assert descriptors() == before


def test_the_host_reads_the_right_bytes(world: World, with_both: WithBoth) -> None:
    def body() -> None:
        paths = samples(world.backing / "public", 10, 100)
        contents = [path.read_bytes() for path in paths]
        here = [world.host / path.relative_to(world.backing) for path in paths]
        first, second = here[:500], here[500:]
        told(first)
        eventually(lambda: requests(world, "fs.fetch") > 3, "files are fetched")
        for path, content in zip(first, contents, strict=False):
            assert path.read_bytes() == content
        assert requests(world, "fs.walk", "fs.read", "fs.readfile") < 100  # folders, and few others
        assert [path.read_bytes() for path in prefetch(first)] == contents[:500]
        for path in second[::2]:  # a directory's names go to the kernel anew, too
            (world.device / path.relative_to(world.host)).write_bytes(b"changed")
        told(second)
        for path in second[1::4]:
            (world.device / path.relative_to(world.host)).write_bytes(b"changed, too")
        expected = [(world.backing / path.relative_to(world.host)).read_bytes() for path in second]
        assert [path.read_bytes() for path in second] == expected
        assert expected[:2] == [b"changed", b"changed, too"]

    with_both(body)


def requests(world: World, *kinds: str) -> int:
    """How many the host's mount has sent."""
    (numbers,) = stats_socket.read_stats(world.numbers, "csd0")
    return sum(sum(classes) for kind, classes in numbers.took.items() if kind in kinds)


def told(paths: Sequence[Path]) -> None:
    """Say that they are about to be read, and read none."""
    for _ in prefetch(paths, window=2 * len(paths)):
        pass


def test_files_that_are_changed_meanwhile(world: World, with_both: WithBoth) -> None:
    """What the device has written before a file is opened is what is read of it, or something newer."""

    def body() -> None:
        paths = samples(world.backing / "public", 5, 40)
        written, ended = dict.fromkeys(paths, 0), threading.Event()
        for path in paths:
            path.write_text("00000000")

        def write() -> None:
            for version in itertools.count(1):
                for path in paths[:: 1 + version % 7]:
                    if ended.is_set():
                        return
                    with (world.device / path.relative_to(world.backing)).open("r+b", buffering=0) as file:
                        file.write(b"%08d" % version)
                    written[path] = version

        writing = Doing(write)
        try:
            here = [world.host / path.relative_to(world.backing) for path in paths]
            rounds = itertools.count(1)
            while next(rounds) <= ROUNDS or (max(written.values()) < 2 and not writing.done):
                for path in prefetch(here, window=64):
                    least = written[world.backing / path.relative_to(world.host)]
                    assert int(path.read_bytes()) >= least
        finally:
            ended.set()
            writing.result()

    with_both(body)


def test_what_the_mount_is_not_asked_for(world: World, with_both: WithBoth) -> None:
    def body() -> None:
        (world.host / "public" / "f").write_text("one")
        for path, why in (
            (world.host / "public", "another command"),
            (world.host / "public" / "f", "a file"),
        ):
            descriptor = os.open(path, os.O_RDONLY)
            command = prefetch_command(1) + (why == "another command")
            assert errno_of(fcntl.ioctl, descriptor, command, bytearray(b"f"))
            os.close(descriptor)
        descriptor = os.open(world.host / "public", os.O_RDONLY)
        fcntl.ioctl(descriptor, prefetch_command(PREFETCH_MOST), bytearray(b"\0" * PREFETCH_MOST))
        os.close(descriptor)
        on_device = os.open(world.device / "public", os.O_RDONLY)
        assert errno_of(fcntl.ioctl, on_device, prefetch_command(1), bytearray(b"f"))
        os.close(on_device)
        assert [path.read_text() for path in prefetch([world.device / "public" / "f"])] == ["one"]
        assert [path.read_text() for path in prefetch([world.host / "public" / "f"])] == ["one"]

    with_both(body)


def test_somebody_who_may_only_read(world: World, with_both: WithBoth) -> None:
    def body() -> None:
        (world.host / "public" / "f").write_text("one")
        pid = os.fork()
        if pid == 0:
            os.chdir(world.host / "public")  # what is above is root's
            os.setuid(12345)
            os._exit([path.read_text() for path in prefetch([Path("f")])] != ["one"])
        assert os.waitpid(pid, 0)[1] == 0

    with_both(body)
