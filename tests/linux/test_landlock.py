# SPDX-License-Identifier: Apache-2.0
"""A process that has restricted itself by Landlock: its remaining rights, and its refusals."""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from millpond.linux.confinement import landlock
from millpond.linux.confinement.landlock import Handled
from millpond.linux.confinement.sandbox import Bind, Sandbox, spawn
from millpond.linux.syscalls import filter_system_calls, no_new_privileges


def found() -> int:
    """The kernel's version; skips the test where there is none that serves."""
    try:
        version = landlock.version()
    except OSError as error:
        pytest.skip(f"this kernel has no active Landlock: {error.strerror}")
    if version < 2:
        pytest.skip("this kernel's Landlock forbids to move files between directories")
    return version


@pytest.fixture
def restricted(tmp_path: Path) -> Callable[..., None]:
    """Run a function in a child that has restricted itself to a directory; ``before`` runs before that."""
    version = found()

    def run(body: Callable[[], None], directory: Path, sandbox: Sandbox | None = None) -> None:
        report, note = os.pipe()

        def inside() -> int:
            try:
                assert landlock.restrict(directory) == f"on, version {version}"
                body()
            except BaseException:  # noqa: BLE001 - the parent raises it
                os.write(note, traceback.format_exc().encode())
                return 1
            return 0

        pid = spawn(sandbox or Sandbox(), inside, keep=[note])
        os.close(note)
        with os.fdopen(report) as words:
            text = words.read()
        _, status = os.waitpid(pid, 0)
        if status:
            pytest.fail(text or f"the child ended with {status}")

    return run


@pytest.fixture
def inner(tmp_path: Path) -> Path:
    """A directory to stay in, beside one with a secret."""
    directory = tmp_path / "inner"
    for name in ("one", "two"):
        (directory / name).mkdir(parents=True)
    (tmp_path / "outer").mkdir()
    (tmp_path / "outer" / "secret").write_text("outside")
    return directory


def errno_of(call: Callable[[], object]) -> str:
    """What it fails with, or that it does not."""
    try:
        call()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "done"


def names(directory: str | Path) -> list[str]:
    return sorted(path.name for path in Path(directory).iterdir())


def opened(path: str | Path, flags: int, within: int | None = None) -> int:
    return os.open(path, flags, 0o600, dir_fd=within)


def test_each_version_adds_what_it_is_documented_to() -> None:
    assert landlock.handled(1) == Handled(0x1FFF)
    assert landlock.handled(2) == Handled(0x3FFF)
    assert landlock.handled(3) == Handled(0x7FFF)
    assert landlock.handled(4) == Handled(0x7FFF, 0b11)
    assert landlock.handled(5) == Handled(0xFFFF, 0b11)
    assert landlock.handled(6) == landlock.handled(99) == Handled(0xFFFF, 0b11, 0b11)


def test_below_the_directory_everything_works(inner: Path, restricted: Callable[..., None]) -> None:
    def body() -> None:
        one, two = inner / "one", inner / "two"
        (one / "file").write_text("some words")
        assert (one / "file").read_text() == "some words"
        os.truncate(one / "file", 4)
        (one / "file").rename(two / "moved")
        (one / "linked").hardlink_to(two / "moved")
        (one / "symbolic").symlink_to("linked")
        assert (one / "symbolic").read_text() == "some"
        (one / "directory").mkdir()
        (one / "directory").rename(two / "directory")
        os.mkfifo(one / "fifo")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(one / "socket"))
        assert names(one) == ["fifo", "linked", "socket", "symbolic"]
        for name in names(one):
            (one / name).unlink()
        (two / "directory").rmdir()
        one.rmdir()

    restricted(body, inner)


def test_descriptors_that_only_tell_a_place_can_be_opened_again(
    inner: Path, restricted: Callable[..., None]
) -> None:
    (inner / "one" / "file").write_text("words")

    def body() -> None:
        root = opened(inner, os.O_PATH | os.O_DIRECTORY)
        place = opened("one/file", os.O_PATH | os.O_NOFOLLOW, root)
        again = opened(f"/proc/self/fd/{place}", os.O_RDWR)
        assert os.read(again, 9) == b"words"
        Path(f"/proc/self/fd/{place}").chmod(0o640)
        assert names(f"/proc/self/fd/{root}") == ["one", "two"]
        (inner / "one" / "file").unlink()
        assert os.read(opened(f"/proc/self/fd/{place}", os.O_RDONLY), 9) == b"words"

    restricted(body, inner)


def test_what_lies_elsewhere_is_refused_however_it_is_named(
    inner: Path, restricted: Callable[..., None]
) -> None:
    outer = inner.parent / "outer"
    secret = outer / "secret"
    (inner / "link").symlink_to(secret)
    directory, place = opened(outer, os.O_PATH), opened(secret, os.O_PATH)
    open_before = opened(secret, os.O_RDONLY)

    def body() -> None:
        refused = {
            "read": lambda: secret.read_text(),
            "write": lambda: opened(secret, os.O_WRONLY),
            "truncate": lambda: opened(secret, os.O_RDONLY | os.O_TRUNC),
            "a symbolic link": lambda: (inner / "link").read_text(),
            "..": lambda: opened(inner / ".." / "outer" / "secret", os.O_RDONLY),
            "by a directory": lambda: opened("secret", os.O_RDONLY, directory),
            "by a place": lambda: opened(f"/proc/self/fd/{place}", os.O_RDONLY),
            "list": lambda: names(outer),
            "create": lambda: (outer / "new").touch(),
            "make a directory": lambda: (outer / "new").mkdir(),
            "remove": lambda: secret.unlink(),
            "a process's memory": lambda: opened(f"/proc/{os.getppid()}/mem", os.O_RDONLY),
            "its own": lambda: opened("/proc/self/environ", os.O_RDONLY),
            "programs": lambda: os.execv("/bin/true", ["true"]),
        }
        assert {what: errno_of(call) for what, call in refused.items()} == dict.fromkeys(refused, "EACCES")
        (inner / "mine").touch()
        for moved in (
            lambda: secret.rename(inner / "stolen"),
            lambda: (inner / "stolen").hardlink_to(secret),
            lambda: (inner / "mine").rename(outer / "given"),
            lambda: (outer / "given").hardlink_to(inner / "mine"),
        ):
            assert errno_of(moved) in ("EACCES", "EXDEV")
        assert os.read(open_before, 9) == b"outside"

    try:
        restricted(body, inner)
    finally:
        for descriptor in (directory, place, open_before):
            os.close(descriptor)
    assert secret.read_text() == "outside" and names(outer) == ["secret"]


def test_programs_below_the_directory_are_not_run(inner: Path, restricted: Callable[..., None]) -> None:
    (inner / "program").write_text("#!/bin/sh\n")
    (inner / "program").chmod(0o755)

    def body() -> None:
        assert errno_of(lambda: os.execv(inner / "program", ["program"])) == "EACCES"

    restricted(body, inner)


def test_where_the_kernel_can_there_is_no_tcp(inner: Path, restricted: Callable[..., None]) -> None:
    if found() < 4:
        pytest.skip("this kernel's Landlock knows no TCP")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()

        def body() -> None:
            with socket.socket() as one, socket.socket() as two:
                assert errno_of(lambda: one.connect(address)) == "EACCES"
                assert errno_of(lambda: two.bind(("127.0.0.1", 0))) == "EACCES"

        restricted(body, inner)


def test_where_the_kernel_can_there_are_no_others(inner: Path, restricted: Callable[..., None]) -> None:
    if found() < 6:
        pytest.skip("this kernel's Landlock knows no scopes")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("")  # the kernel chooses an abstract name
        server.listen()
        name = server.getsockname()
        ours, theirs = socket.socketpair()

        def body() -> None:
            assert errno_of(lambda: os.kill(os.getppid(), 0)) == "EPERM"
            os.kill(os.getpid(), 0)
            with socket.socket(socket.AF_UNIX) as other:
                assert errno_of(lambda: other.connect(name)) == "EPERM"
            theirs.sendall(b"what is connected already stays so")

        with ours, theirs:
            restricted(body, inner)
            assert ours.recv(99).startswith(b"what")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts and uids of this machine")
def test_it_holds_in_a_sandbox_whose_directory_is_a_mount(
    inner: Path, restricted: Callable[..., None]
) -> None:
    volume = Path("/volume")
    inner.parent.chmod(0o755)
    for path in (inner, inner / "one", inner / "two"):
        path.chmod(0o777)
    binds = (
        Bind(inner, volume / "public", read_only=False),
        Bind(inner.parent / "outer", Path("/etc/other")),
    )

    def body() -> None:
        assert errno_of(lambda: Path("/etc/other/secret").read_text()) == "EACCES"
        assert errno_of(lambda: names("/")) == "EACCES"
        assert names(volume) == ["public"]
        (volume / "public" / "one" / "file").write_text("words")
        root = opened(volume, os.O_PATH | os.O_DIRECTORY)
        os.rename("public/one/file", "public/two/file", src_dir_fd=root, dst_dir_fd=root)
        os.link("public/two/file", "public/one/again", src_dir_fd=root, dst_dir_fd=root)
        assert (volume / "public" / "one" / "again").read_text() == "words"

    restricted(body, volume, Sandbox(binds=binds, own_network=True, own_pids=True, uid=65534))


def test_it_comes_before_the_first_thread(inner: Path) -> None:
    going = threading.Event()
    thread = threading.Thread(target=going.wait)
    thread.start()
    try:
        with pytest.raises(RuntimeError, match="threads"):
            landlock.restrict(inner)
    finally:
        going.set()
        thread.join()


@pytest.mark.parametrize(
    ("code", "said"),
    [(errno.ENOSYS, "off: the kernel has none"), (errno.EOPNOTSUPP, "off: the kernel's is not active")],
)
def test_a_kernel_that_has_none_is_told_and_nothing_else_changes(code: int, said: str, inner: Path) -> None:
    landlock_fails_with = [
        (0x20, 0, 0, 0),  # load the number of the system call
        (0x15, 0, 1, 444),
        (0x06, 0, 0, 0x00050000 | code),
        (0x06, 0, 0, 0x7FFF0000),
    ]

    def inside() -> int:
        no_new_privileges()
        filter_system_calls(b"".join(struct.pack("=HBBI", *step) for step in landlock_fails_with))
        assert landlock.restrict(inner) == said
        assert (inner.parent / "outer" / "secret").read_text() == "outside"
        return 0

    _, status = os.waitpid(spawn(Sandbox(), inside), 0)
    assert os.waitstatus_to_exitcode(status) == 0
