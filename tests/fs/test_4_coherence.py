# SPDX-License-Identifier: Apache-2.0
"""Real mounts: each side's next operation sees the other side's change, despite the kernel's caches."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ..waiting import eventually
from .conftest import WithBoth, mounted
from .support import below, errno_of
from .world import World

PAGE = 4096
SERVER = 65534
OLD, NEW = b"old " * 3000, b"new " * 3000


@pytest.fixture(params=["device", "host"])
def writer(request: pytest.FixtureRequest) -> str:
    """Who changes things; the other side looks."""
    return str(request.param)


def parts(world: World, writer: str = "device") -> tuple[Path, Path]:
    """The public part as the writer and as the other side has it."""
    device, host = world.device / "public", world.host / "public"
    return (device, host) if writer == "device" else (host, device)


def seen(top: Path, unit: int = 1) -> dict[str, tuple[object, ...]]:
    """All that is to be seen of a tree; names, too, that are not there; times in so many nanoseconds."""
    found: dict[str, tuple[object, ...]] = {}
    for name in ("none", "new", "f", "d/f"):
        found[f"{name}?"] = (errno_of(os.lstat, top / name),)
    for path in [top, *below(top)]:
        status = path.lstat()
        listed: object = sorted(os.listdir(path)) if stat.S_ISDIR(status.st_mode) else None  # noqa: PTH208
        data: object = path.read_bytes() if stat.S_ISREG(status.st_mode) else None
        target = os.readlink(path) if stat.S_ISLNK(status.st_mode) else None  # noqa: PTH115
        uid = 0 if status.st_uid == SERVER else status.st_uid  # the host shows the server's as root's
        facts = (status.st_mode, status.st_nlink, uid, status.st_size, status.st_mtime_ns // unit)
        found[str(path.relative_to(top))] = (*facts, listed, data, target)
    return found


def store(path: Path, data: bytes, at: int = 0) -> None:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        view[at : at + len(data)] = data
        view.flush()


def write_at(path: Path, data: bytes, at: int) -> None:
    with path.open("r+b", buffering=0) as file:
        file.seek(at)
        file.write(data)


def append(path: Path, data: bytes) -> None:
    with path.open("ab", buffering=0) as file:
        file.write(data)


def replace(path: Path, data: bytes) -> None:
    path.with_name("replacement").write_bytes(data)
    path.with_name("replacement").rename(path)


def punch(path: Path) -> None:
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, 3 * len(OLD))


def without_a_trace(path: Path) -> None:
    """Neither size nor times tell."""
    before = path.stat()
    write_at(path, NEW[:PAGE], PAGE)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def remade(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def exchange(top: Path) -> None:
    (top / "f").rename(top / "tmp")
    (top / "g").rename(top / "f")
    (top / "tmp").rename(top / "g")


CHANGES: dict[str, Callable[[Path], object]] = {
    "written": lambda top: write_at(top / "f", NEW, 0),
    "written in the middle": lambda top: write_at(top / "f", b"!", PAGE + 1),
    "written without a trace": lambda top: without_a_trace(top / "f"),
    "written anew": lambda top: (top / "f").write_bytes(NEW[:100]),
    "written behind its end": lambda top: write_at(top / "f", b"!", 5 * PAGE),
    "appended to": lambda top: append(top / "f", b"more"),
    "stored to": lambda top: store(top / "f", b"stored"),
    "cut": lambda top: os.truncate(top / "f", 5),
    "emptied": lambda top: os.truncate(top / "f", 0),
    "extended": lambda top: os.truncate(top / "f", 3 * PAGE),
    "allocated": lambda top: punch(top / "f"),
    "replaced": lambda top: replace(top / "f", NEW),
    "exchanged": exchange,
    "removed": lambda top: (top / "f").unlink(),
    "removed and made anew": lambda top: remade(top / "f", lambda path: path.write_bytes(NEW)),
    "a directory now": lambda top: remade(top / "f", Path.mkdir),
    "a link now": lambda top: remade(top / "f", lambda path: path.symlink_to("g")),
    "renamed": lambda top: (top / "f").rename(top / "new"),
    "moved": lambda top: (top / "f").rename(top / "d" / "f"),
    "its directory renamed": lambda top: (top / "d").rename(top / "new"),
    "linked": lambda top: (top / "new").hardlink_to(top / "f"),
    "unlinked once": lambda top: (top / "d" / "link").unlink(),
    "its mode": lambda top: (top / "f").chmod(0o646),
    "its times": lambda top: os.utime(top / "f", (1000, 2000)),
    "the directory's mode": lambda top: (top / "d").chmod(0o705),
    "a directory made": lambda top: (top / "none").mkdir(),
    "a file made": lambda top: (top / "none").touch(),
    "a file made elsewhere": lambda top: (top / "d" / "f").write_bytes(NEW),
    "a directory removed": lambda top: (top / "e").rmdir(),
    "a link made": lambda top: (top / "none").symlink_to("f"),
    "a fifo made": lambda top: os.mkfifo(top / "none"),
}


def make(top: Path) -> None:
    (top / "d").mkdir(exist_ok=True)
    (top / "e").mkdir()
    (top / "f").write_bytes(OLD)
    (top / "g").write_bytes(b"g")
    (top / "d" / "link").hardlink_to(top / "f")


def clear(top: Path) -> None:
    for path in reversed(below(top)):
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()


@pytest.mark.parametrize("binding", ["auto", "fuse-python"])
def test_every_change_is_seen_at_once(world: World, with_both: WithBoth, writer: str, binding: str) -> None:
    world.binding = binding

    def body() -> None:
        os.umask(0)
        here, there = parts(world, writer)
        unit = 10**9 if binding == "fuse-python" else 1
        for what, change in CHANGES.items():
            if what == "stored to" and writer == "device" and binding == "fuse-python":
                continue  # which knows no shared mappings
            make(here)
            looked, before = seen(there, unit), seen(here, unit)
            assert looked == before, what
            assert seen(there, unit) == before, what  # as it has been kept
            change(here)
            assert seen(there, unit) == seen(here, unit), what
            clear(here)
            assert seen(there, unit) == seen(here, unit), what

    with_both(body)


class Looking:
    """A file that stays open, read in several ways."""

    def __init__(self, path: Path, *, mapped: bool) -> None:
        self._file = os.open(path, os.O_RDONLY)
        self._map = mmap.mmap(self._file, PAGE, mmap.MAP_SHARED, mmap.PROT_READ) if mapped else None

    def __enter__(self) -> Looking:
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._map:
            self._map.close()
        os.close(self._file)

    def see(self) -> tuple[object, ...]:
        status = os.fstat(self._file)
        view = self._map[:PAGE] if self._map and status.st_size >= PAGE else None
        whole = os.pread(self._file, 1 << 20, 0)
        assert view is None or view == whole[:PAGE]
        end = os.lseek(self._file, 0, os.SEEK_END)
        return status.st_size, status.st_nlink, status.st_mode, end, whole


OF_AN_OPEN_FILE = [
    "written", "written in the middle", "written without a trace", "written anew", "written behind its end",
    "appended to", "stored to", "cut", "emptied", "extended", "allocated", "replaced", "removed", "renamed",
    "moved", "linked", "unlinked once", "its mode",
]  # fmt: skip


@pytest.mark.parametrize("mapped", [False, True], ids=["open", "mapped"])
@mounted()
def test_changes_of_a_file_that_is_held_open(world: World, writer: str, mapped: bool) -> None:
    """The device's kernel leaves a file to the daemon that the host has open; there it cannot be mapped."""
    os.umask(0)
    here, there = parts(world, writer)
    for what in OF_AN_OPEN_FILE:
        if what == "stored to" and writer == "device":
            continue
        make(here)
        # That the writer has closed it is heard of an instant later.
        if mapped:
            eventually(functools.partial(can_be_mapped, there / "f"), "the host can map the file")
        with (
            Looking(there / "f", mapped=mapped) as there_seen,
            Looking(here / "f", mapped=False) as truth,
        ):
            for _ in range(2):
                assert there_seen.see() == truth.see(), what
            CHANGES[what](here)
            assert there_seen.see() == truth.see(), what
        clear(here)


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags)
    try:
        yield file
    finally:
        os.close(file)


@pytest.mark.parametrize("reader_first", [False, True])
@pytest.mark.parametrize("also_read_here", [False, True], ids=["", "also-read-on-the-device"])
@mounted()
def test_both_have_a_file_open_to_write(world: World, reader_first: bool, also_read_here: bool) -> None:
    """In whichever order they opened it, and whoever of them else has it open."""
    os.umask(0)
    here, there = parts(world)
    (here / "f").write_bytes(OLD)
    with contextlib.ExitStack() as stack:

        def device() -> int:
            return stack.enter_context(opened(here / "f", os.O_RDWR))

        if also_read_here:
            assert os.pread(stack.enter_context(opened(here / "f", os.O_RDONLY)), 3, 0) == b"old"
        writing = -1 if reader_first else device()
        reading = stack.enter_context(opened(there / "f", os.O_RDWR))
        assert os.pread(reading, PAGE, 0) == OLD[:PAGE]
        writing = device() if reader_first else writing
        for number in range(100):
            os.pwrite(writing, b"%4d" % number, 0)
            assert os.pread(reading, 4, 0) == b"%4d" % number
            os.pwrite(reading, b"%4d" % number, 2 * PAGE)
            assert os.pread(writing, 4, 2 * PAGE) == b"%4d" % number
        os.ftruncate(writing, 6)
        assert os.fstat(reading).st_size == 6 and os.pread(reading, PAGE, 0) == b"  99" + OLD[4:6]
        os.ftruncate(reading, 2)
        assert os.fstat(writing).st_size == 2 and os.pread(writing, PAGE, 0) == b"  "
    (here / "f").write_bytes(NEW)
    assert (there / "f").read_bytes() == NEW


@pytest.mark.parametrize("keeps", ["the file open", "only the mapping"])
@mounted()
def test_what_the_device_stores_in_a_mapping(world: World, keeps: str) -> None:
    here, there = parts(world)
    (here / "f").write_bytes(OLD)
    with (here / "f").open("r+b") as file:
        libc_map = _Mapping(file.fileno(), PAGE)
        if keeps == "only the mapping":
            file.close()
            eventually(lambda: (there / "f").read_bytes() == OLD, "the host reads the file")
        with (there / "f").open("rb") as looking:
            for number in range(20):
                libc_map.view[:4] = b"%4d" % number
                assert (there / "f").read_bytes()[:4] == b"%4d" % number
                assert os.pread(looking.fileno(), 4, 0) == b"%4d" % number
    libc_map.close()


@mounted()
def test_a_reader_on_the_device_does_not_keep_a_file_written(world: World) -> None:
    """Though the kernel was given the file by who wrote it."""
    here, there = parts(world)
    (here / "f").write_bytes(OLD)
    with (here / "f").open("r+b") as file, (here / "f").open("rb") as reading:
        file.close()
        eventually(lambda: can_be_mapped(there / "f"), "the host can map the file")
        assert (there / "f").read_bytes() == reading.read() == OLD


def can_be_mapped(path: Path) -> bool:
    """A host's kernel maps what it may keep."""
    with path.open("rb") as file, contextlib.suppress(OSError):
        mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ).close()
        return True
    return False


class _Mapping:
    """Memory that is a file. (Python's mmap keeps a descriptor of its own.)"""

    def __init__(self, file: int, size: int) -> None:
        self._libc, self._size = ctypes.CDLL(None, use_errno=True), size
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._at = self._libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file, 0)
        assert self._at not in (None, ctypes.c_void_p(-1).value), ctypes.get_errno()
        self.view = memoryview((ctypes.c_char * size).from_address(self._at)).cast("B")

    def close(self) -> None:
        self.view.release()
        self._libc.munmap(self._at, self._size)


@mounted()
def test_what_the_host_stores_in_a_mapping_is_there_when_it_was_flushed(world: World) -> None:
    os.umask(0)
    here, there = parts(world)
    (there / "f").write_bytes(OLD)
    assert (here / "f").read_bytes() == OLD
    with (there / "f").open("r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        view[:3] = b"new"
        view.flush()
        assert (here / "f").read_bytes()[:3] == b"new"
        write_at(here / "f", b"device", PAGE)
        assert view[PAGE : PAGE + 6] == b"device"
        view[2 * PAGE : 2 * PAGE + 4] = b"host"
        write_at(here / "f", b"both", 2 * PAGE + 8)  # in the same page, of which the host's is not flushed
        assert view[2 * PAGE : 2 * PAGE + 12] == b"hostold both"
    assert (here / "f").read_bytes()[2 * PAGE : 2 * PAGE + 12] == b"hostold both"


@mounted()
def test_two_hosts(world: World) -> None:
    os.umask(0)
    second = world.host.with_name("second")
    second.mkdir()
    world.mount_host(at=second)
    here, there, elsewhere = world.host / "public", second / "public", world.device / "public"
    for what, change in CHANGES.items():
        make(here)
        assert seen(there) == seen(elsewhere) == seen(here), what
        change(there)
        assert seen(here) == seen(elsewhere) == seen(there), what
        clear(elsewhere)
        assert seen(here) == seen(there) == seen(elsewhere), what
    (here / "f").write_bytes(b"")
    with (here / "f").open("ab", buffering=0) as one, (there / "f").open("ab", buffering=0) as two:
        for number in range(50):
            one.write(b"%4d" % number)
            two.write(b"%4d" % number)
            assert (elsewhere / "f").read_bytes()[-8:] == b"%4d" % number * 2
