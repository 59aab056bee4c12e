# SPDX-License-Identifier: Apache-2.0
"""Sandboxes: forbidden files do not exist inside. As root, and as a user without any privilege."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

import millpond
from millpond.linux import syscalls
from millpond.linux.confinement import seccomp
from millpond.linux.confinement.sandbox import (
    Bind,
    Sandbox,
    exit_code,
    python_binds,
    spawn,
    system_binds,
)
from millpond.linux.confinement.sandbox_exec import confined
from millpond.linux.confinement.userns import has_many_uids

SOON = 30.0


NOBODY = 65534


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts and uids of this machine")


def wait(pid: int) -> int:
    return exit_code(os.waitpid(pid, 0)[1])


def run(sandbox: Sandbox, body: Callable[[], object]) -> object:
    """What ``body`` returns in the sandbox, brought out as JSON."""
    reading, writing = os.pipe()

    def inside() -> int:
        os.write(writing, json.dumps(body()).encode())
        return 0

    pid = spawn(sandbox, inside)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    assert wait(pid) == 0
    return json.loads(data)


def names(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def status(field: str) -> str:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line.split(":")[1].strip() for line in lines if line.startswith(f"{field}:"))


def raised_by(call: Callable[[], object]) -> str:
    try:
        call()
    except OSError as error:
        return type(error).__name__
    return "nothing"


@needs_root
def test_only_what_is_given_exists(tmp_path: Path) -> None:
    (tmp_path / "shown").write_text("seen")
    (tmp_path / "hidden").write_text("unseen")
    binds = (Bind(tmp_path / "shown", Path("/data/here")),)

    def body() -> object:
        return [
            names("/"),
            names("/data"),
            Path("/data/here").read_text(),
            names("/tmp"),
            Path(tmp_path / "hidden").exists(),
        ]

    assert run(Sandbox(binds=binds), body) == [
        ["data", "dev", "proc", "tmp"],
        ["here"],
        "seen",
        [],
        False,
    ]


SHARED_MEMORY = """
import multiprocessing, os, sys
from multiprocessing.shared_memory import SharedMemory
block = SharedMemory(create=True, size=1 << 20)
with multiprocessing.Pool(1) as pool:
    print(sorted(pool.map(abs, [-1, 2])))
block.close()
block.unlink()
shown = [os.statvfs(path) for path in ("/tmp", "/dev/shm")]
memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
with open("/dev/shm/file", "wb") as file:
    file.write(bytes(8 << 20))
left = [os.statvfs(path) for path in ("/tmp", "/dev/shm")]
print([one.f_bavail - two.f_bavail == (8 << 20) // one.f_frsize for one, two in zip(shown, left)])
print([0 < each.f_blocks * each.f_frsize < memory // 4 + (1 << 20) for each in shown])
"""


@pytest.mark.parametrize("uid", [None, NOBODY])
def test_shared_memory_is_there_and_is_bounded_together_with_other_files(uid: int | None) -> None:
    """Before: FileNotFoundError of a DataLoader with workers, a Pool, SharedMemory."""
    sandbox = Sandbox(binds=(*system_binds(), *python_binds()), own_pids=True, uid=uid)
    command = confined(sandbox, [sys.executable, "-c", SHARED_MEMORY])
    done = subprocess.run(command, capture_output=True, text=True, timeout=SOON, check=False)
    assert done.stdout == "[1, 2]\n[True, True]\n[True, True]\n", done.stderr


def test_a_folder_named_millpond_shows_nothing_of_what_is_beside_it(tmp_path: Path) -> None:
    """Before: Python began beside a clone took it for code, and sandboxes showed all of that directory."""
    (tmp_path / "millpond" / "docs").mkdir(parents=True)
    code = "from millpond.linux.confinement.sandbox import python_binds; print(*python_binds(), sep='\\n')"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SOON, check=True, cwd=tmp_path)
    assert str(Path(sys.prefix)) in done.stdout and str(tmp_path) not in done.stdout


@needs_root
def test_read_only_and_writable(tmp_path: Path) -> None:
    for name in ("fixed", "free"):
        (tmp_path / name).mkdir()
    binds = (
        Bind(tmp_path / "fixed", Path("/fixed")),
        Bind(tmp_path / "free", Path("/free"), read_only=False),
    )

    def body() -> object:
        Path("/free/new").write_text("from inside")
        return raised_by(lambda: Path("/fixed/new").write_text("x"))

    assert run(Sandbox(binds=binds), body) == "OSError"  # EROFS has no class of its own
    assert (tmp_path / "free/new").read_text() == "from inside"
    assert not any((tmp_path / "fixed").iterdir())


@needs_root
def test_read_only_holds_for_what_is_mounted_below(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "below").mkdir(parents=True)

    def outer() -> object:
        syscalls.mount("tmpfs", source / "below", "tmpfs")
        inner = Sandbox(binds=(Bind(source, Path("/shown")),))
        return run(inner, lambda: raised_by(lambda: Path("/shown/below/new").write_text("x")))

    assert run(Sandbox(), outer) == "OSError"


@needs_root
def test_a_bind_below_tmp_is_not_covered(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("seen")
    binds = (Bind(tmp_path, Path("/tmp/deep/there")), Bind(tmp_path / "f", Path("/tmp/deep/there/f")))
    assert run(Sandbox(binds=binds), lambda: Path("/tmp/deep/there/f").read_text()) == "seen"


@needs_root
def test_files_links_and_secrets(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret")
    sandbox = Sandbox(
        binds=(),
        files={"/etc/hosts": "127.0.0.1 localhost\n"},
        secrets={"/etc/key": str(tmp_path / "key")},
        links={"/etc/mtab": "/proc/self/mounts"},
        uid=NOBODY,
    )

    def body() -> object:
        key = Path("/etc/key").stat()
        return [
            Path("/etc/hosts").read_text(),
            Path("/etc/key").read_text(),
            key.st_mode & 0o777,
            key.st_uid,
            str(Path("/etc/mtab").readlink()),
        ]

    assert run(sandbox, body) == ["127.0.0.1 localhost\n", "secret", 0o600, NOBODY, "/proc/self/mounts"]


@needs_root
def test_mounts_stay_inside(tmp_path: Path) -> None:
    before = Path("/proc/self/mounts").read_text()
    assert wait(spawn(Sandbox(binds=(Bind(tmp_path, Path("/x")),)), lambda: 0)) == 0
    assert Path("/proc/self/mounts").read_text() == before


@needs_root
def test_a_missing_source_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sandbox = Sandbox(binds=(Bind(tmp_path / "nothing", Path("/x")),))
    assert wait(spawn(sandbox, lambda: 0)) == 70
    assert capfd.readouterr().err == (f"sandbox: [Errno 2] No such file or directory: '{tmp_path}/nothing'\n")


@needs_root
def test_the_whole_file_system_by_default() -> None:
    assert run(Sandbox(), lambda: Path(__file__).exists()) is True


@needs_root
def test_own_network_has_only_a_loopback() -> None:
    def body() -> object:
        with socket.socket() as sock:
            return [
                [name for _, name in socket.if_nameindex()],
                raised_by(lambda: sock.connect(("127.0.0.1", 9))),
            ]

    assert run(Sandbox(own_network=True), body) == [["lo"], "OSError"]


@needs_root
def test_own_pids_sees_only_itself() -> None:
    def body() -> object:
        return [os.getpid(), [name for name in names("/proc") if name.isdigit()]]

    assert run(Sandbox(own_pids=True), body) == [1, ["1"]]
    assert run(Sandbox(binds=(), own_pids=True), body) == [1, ["1"]]


@needs_root
def test_own_host_name() -> None:
    before = os.uname().nodename
    assert run(Sandbox(hostname="csd7"), lambda: os.uname().nodename) == "csd7"
    assert os.uname().nodename == before


@needs_root
def test_another_uid_has_no_way_back() -> None:
    def body() -> object:
        return [
            os.getresuid(),
            os.getresgid(),
            os.getgroups(),
            [int(status(name), 16) for name in ("CapPrm", "CapEff", "CapInh", "CapAmb")],
            status("NoNewPrivs"),
            raised_by(lambda: os.setuid(0)),
            raised_by(lambda: syscalls.mount("tmpfs", Path("/tmp"), "tmpfs")),
        ]

    assert run(Sandbox(uid=NOBODY), body) == [
        [NOBODY] * 3,
        [NOBODY] * 3,
        [],
        [0, 0, 0, 0],
        "1",
        "PermissionError",
        "PermissionError",
    ]


@needs_root
def test_a_root_of_few_capabilities_gets_no_others_by_executing() -> None:
    only = (syscalls.CAP_CHOWN, syscalls.CAP_NET_BIND_SERVICE)
    expected = f"{sum(1 << number for number in only):016x}"

    def body() -> object:
        command = ["/bin/grep", "-hE", "Cap(Prm|Eff|Bnd)|NoNewPrivs", "/proc/self/status"]
        executed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        return [
            os.getuid(),
            executed[1::2],
            raised_by(lambda: syscalls.mount("tmpfs", Path("/tmp"), "tmpfs")),
            raised_by(lambda: Path("/new").touch()),
            raised_by(lambda: Path("/proc/sys/kernel/core_pattern").write_text("x")),
            Path("/etc/secret").read_text(),
        ]

    secret = Path(__file__)
    sandbox = Sandbox(binds=system_binds(), secrets={"/etc/secret": str(secret)}, own_pids=True, only=only)
    seen = run(sandbox, body)
    assert seen == [0, [expected] * 3 + ["1"], "PermissionError", "OSError", "OSError", secret.read_text()]


def exiting(value: object) -> Callable[[], int]:
    def body() -> int:
        sys.exit(value)  # type: ignore[arg-type]

    return body


def failing() -> int:
    raise ValueError("for a reason")


def killed() -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


@needs_root
@pytest.mark.parametrize("own_pids", [False, True])
@pytest.mark.parametrize(
    ("body", "code"),
    [
        (lambda: 0, 0),
        (lambda: 3, 3),
        (exiting(4), 4),
        (exiting(None), 0),
        (exiting("text"), 1),
        (failing, 70),
    ],
)
def test_exit_codes(
    body: Callable[[], int], code: int, own_pids: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    assert wait(spawn(Sandbox(own_pids=own_pids), body)) == code
    assert ("ValueError: for a reason" in capfd.readouterr().err) == (body is failing)


@needs_root
def test_death_by_signal() -> None:
    assert wait(spawn(Sandbox(), killed)) == 128 + signal.SIGKILL


@needs_root
def test_what_is_printed_comes_out_once() -> None:
    code = """
        import os, sys
        from millpond.linux.confinement.sandbox import Sandbox, spawn
        print("before")
        pid = spawn(Sandbox(), lambda: print("inside") or 0)
        os.waitpid(pid, 0)
        print("after")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=SOON
    )
    assert (done.stdout, done.stderr) == ("before\ninside\nafter\n", "")


def test_what_binds_there_are() -> None:
    shown = {item.target: item for item in (*system_binds(), *python_binds())}
    assert shown[Path("/usr")].read_only
    assert Path("/etc/passwd") not in shown
    assert Path("/etc") not in shown
    assert all(any(Path(entry).is_relative_to(path) for path in shown) for entry in millpond.__path__)


# Without privilege. One process, started as nobody, reports on all that follows.


@needs_root
def test_many_uids() -> None:
    if not has_many_uids():
        pytest.skip("this is already a user namespace with one uid")
    assert run(Sandbox(uid=NOBODY), has_many_uids) is True


@needs_root
def test_a_strict_umask_does_not_close_the_root(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("seen")
    (tmp_path / "data").chmod(0o644)
    sandbox = Sandbox(
        binds=(Bind(tmp_path / "data", Path("/a/b/data")),), files={"/etc/x/hosts": "local"}, uid=NOBODY
    )
    before = os.umask(0o077)
    try:
        seen = run(
            sandbox, lambda: [Path("/a/b/data").read_text(), Path("/etc/x/hosts").read_text(), os.umask(0)]
        )
    finally:
        os.umask(before)
    assert seen == ["seen", "local", 0o077]


@needs_root
def test_a_file_that_was_replaced_behind_a_bind_is_shown_as_it_was(tmp_path: Path) -> None:
    """As the linker's cache on an emulated device, after ldconfig on its machine. Before: no worker and no
    server started any more: mount: No such file or directory.
    """
    shown, cache, new = tmp_path / "shown", tmp_path / "cache", tmp_path / "new"
    shown.touch()
    cache.write_text("old")
    cache.chmod(0o644)
    new.write_text("new")
    inner = Sandbox(binds=(*system_binds(), Bind(shown, Path("/etc/cache"))), own_pids=True)

    def body() -> int:
        syscalls.bind(cache, shown)
        new.rename(cache)
        pid = spawn(inner, lambda: int(Path("/etc/cache").read_text() != "old"))
        return exit_code(os.waitpid(pid, 0)[1])

    pid = spawn(Sandbox(binds=None), body)
    assert exit_code(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.skipif(not seccomp.known(os.uname().machine), reason="no filter for this processor")
def test_no_user_of_a_sandbox_has_a_keyring_which_a_later_one_would_find() -> None:
    """A worker without private folders could send what another one has left there."""
    sandbox = Sandbox(binds=(*system_binds(), *python_binds()), own_pids=True, uid=NOBODY)
    number = {"x86_64": 248, "aarch64": 217}[os.uname().machine]  # add_key(2)

    def leave() -> list[int]:
        libc = ctypes.CDLL(None, use_errno=True)
        rings = (-3, -4, -5)  # of the session, of the user, of the user's session
        return [libc.syscall(number, b"user", b"millpond test", b"x", 1, ring) for ring in rings]

    assert run(sandbox, leave) == [-1, -1, -1]


@pytest.mark.parametrize("uid", [None, NOBODY])
def test_devices_can_be_written_to_and_keep_their_times(uid: int | None) -> None:
    """A later sandbox would see what an earlier one has set them to."""

    def body() -> list[str]:
        return [raised_by(lambda: os.utime(os.devnull)), raised_by(lambda: Path(os.devnull).write_text("x"))]

    sandbox = Sandbox(binds=(*system_binds(), *python_binds()), own_pids=True, uid=uid)
    assert run(sandbox, body) == ["OSError", "nothing"]
