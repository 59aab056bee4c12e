# SPDX-License-Identifier: Apache-2.0
"""Edge: run a process tree in namespaces of its own, with a root directory that holds only chosen files.

Emulated devices, the volume server, the SSH server and job workers are each started in one: files that a
process must not reach do not exist for it. Works as root and, with one uid, in a user namespace.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import millpond.linux
from millpond.linux import syscalls
from millpond.linux.confinement import seccomp
from millpond.linux.confinement.userns import has_many_uids

_ROOT_SIZE, _TMPFS_SIZE = "size=5%", "size=25%"
"""The part of the machine's memory that files in a sandbox take at most, in the root file system and in all
others together; the kernel's default is half of it for each. A control group counts them as the memory of the
processes that write them."""
TMPFS = (Path("/tmp"), Path("/dev/shm"))  # noqa: S108 - the sandbox's own
"""What programs expect to write to: shared memory, semaphores and Python's process pools need the second."""


@dataclass(frozen=True, slots=True)
class Bind:
    """A bind mount into a sandbox: ``source`` outside, at ``target`` inside. Symbolic links in it
    lead nowhere unless ``follow_links``.
    """

    source: Path
    target: Path
    read_only: bool = True
    follow_links: bool = True


@dataclass(frozen=True, slots=True)
class Sandbox:
    """The namespaces, files and privileges of a process tree.

    ``binds`` None keeps the whole file system; of nested targets the deeper one is on top. ``files`` are
    readable by all, and programs if they begin with ``#!``; ``secrets`` by the sandbox's user alone. Both map
    names inside to contents, so that these never stand in a command line. Without ``capabilities``
    root has none; with ``only`` it has these CAP_* and no others, whatever it executes. ``own_network`` is a
    new network namespace: a loopback that is down and nothing else. ``uid`` None stays root of the sandbox;
    where only one uid exists, any other uid is mapped to that one. ``gid`` None is the uid's
    number.
    """

    binds: tuple[Bind, ...] | None = None
    tmpfs: tuple[Path, ...] = TMPFS
    files: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    hostname: str | None = None
    own_network: bool = False
    own_pids: bool = False
    new_session: bool = False
    uid: int | None = None
    gid: int | None = None
    capabilities: bool = True
    only: tuple[int, ...] | None = None

    @property
    def renames(self) -> bool:
        """Whether the sandbox takes a user namespace of its own here, which its other
        namespaces belong to.
        """
        return os.geteuid() != 0 or (self.uid is not None and not has_many_uids())

    @property
    def restricted(self) -> bool:
        """Whether the process in the sandbox must not be able to modify it: its root file system is then
        mounted read-only.
        """
        return self.uid is not None or not self.capabilities or self.only is not None


def become_root_of_namespace(flags: int) -> None:
    """Unshare ``flags``; without privilege, in a new user namespace in which this user is root."""
    if os.geteuid() == 0:
        syscalls.unshare(flags)
    else:
        enter_user_namespace(0, flags)


def enter_user_namespace(inside_uid: int, flags: int = 0) -> None:
    """Enter a new user namespace whose only user, ``inside_uid``, is the present one."""
    uid, gid = os.geteuid(), os.getegid()
    syscalls.unshare(syscalls.CLONE_NEWUSER | flags)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{inside_uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{inside_uid} {gid} 1")


def spawn(sandbox: Sandbox, body: Callable[[], int], *, keep: Sequence[int] = ()) -> int:
    """Fork; run ``body`` in the sandbox and exit with its result. Returns the pid to wait for.

    The child dies with the calling thread. With ``own_pids`` the body runs as PID 1 and all its descendants
    die with it; SIGTERM, SIGINT and SIGHUP are blocked until it calls ``accept_signals``, because the kernel
    discards those that a PID 1 has no handler for. Descriptors stay open as their close-on-exec flags say,
    ``keep`` in any case.
    """
    parent = os.getpid()
    _flush()  # or the child would write buffered output a second time
    pid = os.fork()
    if pid:
        return pid
    try:
        syscalls.die_with_parent(signal.SIGKILL)
        if os.getppid() == parent:  # or the parent died before prctl
            become(sandbox, body, keep=keep)
    finally:
        os._exit(70)


def become(
    sandbox: Sandbox, body: Callable[[], int], *, keep: Sequence[int] = (), is_first: bool = False
) -> NoReturn:
    """Do as ``spawn`` does, in this process, which must have one thread and no other purpose. ``is_first``:
    it is PID 1 of its PID namespace already.
    """
    code = 70
    try:
        for descriptor in keep:
            os.set_inheritable(descriptor, True)
        code = enter(sandbox, body, is_first=is_first)
    except OSError as error:
        os.write(2, f"sandbox: {error}\n".encode())
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - nothing may go on in a copy of the caller
        traceback.print_exc()
    finally:
        _flush()
        os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # a daemon may have none
            with contextlib.suppress(OSError, ValueError):
                stream.flush()


def enter(sandbox: Sandbox, body: Callable[[], int], *, is_first: bool = False) -> int:
    """Run ``body`` in the sandbox, which this thread never leaves. Returns its result. Raises OSError."""
    if sandbox.new_session:  # Ctrl-C of a terminal is for the process that started this one
        os.setsid()
    many_uids = os.geteuid() == 0 and has_many_uids()  # only root may switch to another uid
    flags = syscalls.CLONE_NEWNS
    flags |= syscalls.CLONE_NEWNET if sandbox.own_network else 0
    new_pids = sandbox.own_pids and not is_first
    flags |= syscalls.CLONE_NEWPID if new_pids else 0
    flags |= syscalls.CLONE_NEWUTS if sandbox.hostname else 0
    flags |= syscalls.CLONE_NEWIPC if sandbox.binds is not None else 0  # shared memory is a way out, too
    renamed = sandbox.uid is not None and not many_uids
    if renamed:
        enter_user_namespace(sandbox.uid or 0, flags)
    else:
        become_root_of_namespace(flags)
    if new_pids:
        _become_first_process()
    mask = os.umask(0o022)  # a strict umask must not close the root directory to the sandbox's user
    _build_root(sandbox, many_uids)
    os.umask(mask)
    if sandbox.hostname:
        syscalls.set_hostname(sandbox.hostname)
    if sandbox.uid is not None:
        _drop_to(sandbox.uid, sandbox.uid if sandbox.gid is None else sandbox.gid, many_uids)
    elif sandbox.only is not None:
        syscalls.drop_bounding_set(*sandbox.only)
        syscalls.no_new_privileges()
    elif not sandbox.capabilities:
        syscalls.drop_capabilities()
        syscalls.no_new_privileges()
    return body()


FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def _become_first_process() -> None:
    mask = signal.pthread_sigmask(
        signal.SIG_BLOCK, FORWARDED_SIGNALS
    )  # none may come before it can be handed on
    if pid := os.fork():
        _relay(pid, mask)
    syscalls.die_with_parent(signal.SIGKILL)


def accept_signals() -> None:
    """Unblock the forwarded signals, also earlier ones; call it as PID 1 once handlers are in place."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED_SIGNALS)


def _relay(pid: int, mask: set[int | signal.Signals]) -> NoReturn:
    """Wait, outside the PID namespace, for its PID 1: forward signals to it, and exit with its code."""

    def forward(number: int, _frame: object) -> None:
        os.kill(pid, number)

    for number in FORWARDED_SIGNALS:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    _, status = os.waitpid(pid, 0)
    os._exit(exit_code(status))


def exit_code(status: int) -> int:
    """Return the exit code of a wait status, 128 + N for signal N, as shells do."""
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def _drop_to(uid: int, gid: int, many_uids: bool) -> None:
    if many_uids:
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    elif uid:
        syscalls.drop_capabilities()  # a new user namespace gives all of them, whatever the uid
    syscalls.no_new_privileges()
    syscalls.die_with_parent(signal.SIGKILL)  # a change of credentials clears it
    machine = os.uname().machine
    if seccomp.known(machine) and syscalls.has_system_call_filters():
        syscalls.filter_system_calls(seccomp.denying(machine, seccomp.KEYRINGS))


def _write(path: Path, text: str, mode: int, owner: int | None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=mode)
    path.write_text(text)
    if owner is not None:
        os.chown(path, owner, owner)


def _build_root(sandbox: Sandbox, many_uids: bool) -> None:
    syscalls.mount("none", Path("/"), "", syscalls.MS_REC | syscalls.MS_PRIVATE)
    if sandbox.binds is None:
        if sandbox.own_pids:
            syscalls.mount(
                "proc", Path("/proc"), "proc", syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
            )
        return
    secrets = {name: Path(source).read_text() for name, source in sandbox.secrets.items()}
    with contextlib.ExitStack() as stack:
        sources = [_open(item.source, stack) for item in sandbox.binds]
        root = Path("/tmp")  # noqa: S108 - covered by our own tmpfs at once
        syscalls.mount("tmpfs", root, "tmpfs", syscalls.MS_NOSUID, f"mode=755,{_ROOT_SIZE}")
        _fill(root, sandbox, sources, stack)
    for name, text in sandbox.files.items():
        _write(inside(root, Path(name)), text, 0o755 if text.startswith("#!") else 0o644, None)
    for name, text in secrets.items():
        _write(inside(root, Path(name)), text, 0o600, sandbox.uid if many_uids else None)
    for name, target in sandbox.links.items():
        inside(root, Path(name)).parent.mkdir(parents=True, exist_ok=True)
        inside(root, Path(name)).symlink_to(target)
    _mount_kernel_trees(root, sandbox)
    syscalls.pivot_root(root)
    if sandbox.restricted:
        # Where the user is root renamed, permissions alone would not protect it.
        flags = syscalls.MS_BIND | syscalls.MS_REMOUNT | syscalls.MS_RDONLY | syscalls.MS_NOSUID
        syscalls.mount("", Path("/"), "", flags)


def inside(root: Path, path: Path) -> Path:
    """Return the absolute ``path`` as seen below ``root``."""
    return root / path.relative_to("/")


def _open(source: Path, stack: contextlib.ExitStack) -> Path | None:
    """Return a path to ``source`` that stays valid when /tmp is covered; None for a dangling link."""
    if source.is_symlink() and not source.exists():
        return None
    descriptor = os.open(source, os.O_PATH | os.O_CLOEXEC)
    stack.callback(os.close, descriptor)
    return Path(f"/proc/self/fd/{descriptor}")


def _fill(root: Path, sandbox: Sandbox, sources: Sequence[Path | None], stack: contextlib.ExitStack) -> None:
    shown = _scratch(root, sandbox.tmpfs, stack)
    for item, source in zip(sandbox.binds or (), sources, strict=True):
        if source:
            shown.append((item.target, functools.partial(_show, source, inside(root, item.target), item)))
    for _, show in sorted(shown, key=lambda entry: len(entry[0].parts)):
        show()


def _scratch(
    root: Path, paths: Sequence[Path], stack: contextlib.ExitStack
) -> list[tuple[Path, Callable[[], None]]]:
    """Mount one tmpfs, in which each of ``paths`` is a folder: its size is for all of them together."""
    shown: list[tuple[Path, Callable[[], None]]] = []
    if not paths:
        return shown
    first = inside(root, paths[0])
    first.mkdir(parents=True, exist_ok=True)
    flags = syscalls.MS_NOSUID | syscalls.MS_NODEV
    syscalls.mount("tmpfs", first, "tmpfs", flags, f"mode=755,{_TMPFS_SIZE}")
    for number, path in enumerate(paths):
        folder = first / str(number)
        folder.mkdir()
        folder.chmod(0o1777)
        if source := _open(folder, stack):
            item = Bind(folder, path, read_only=False)
            shown.append((path, functools.partial(_show, source, inside(root, path), item)))
    return shown


def _show(source: Path, target: Path, item: Bind) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        target.mkdir(exist_ok=True)
    elif not target.exists():
        target.touch()
    try:
        syscalls.bind(source, target, read_only=item.read_only)
        if not item.follow_links:
            syscalls.follow_no_links_in_tree(target)
    except OSError as error:
        if error.errno != errno.ENOENT or not source.is_file():
            raise
        # A file that was replaced after this process's own sandbox had bound it: it cannot be bound again.
        target.write_bytes(source.read_bytes())
        target.chmod(source.stat().st_mode & 0o777)


def _mount_kernel_trees(root: Path, sandbox: Sandbox) -> None:
    proc = root / "proc"
    proc.mkdir(exist_ok=True)
    closed = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
    if sandbox.own_pids:
        syscalls.mount("proc", proc, "proc", closed)
        if sandbox.restricted:
            _close_settings(proc)
    else:
        syscalls.bind(Path("/proc"), proc)
    if sandbox.own_network and sandbox.hostname:  # an emulated machine sees its own interfaces
        (root / "sys").mkdir()
        with contextlib.suppress(PermissionError):  # a user namespace may be denied it: /sys stays empty
            syscalls.mount("sysfs", root / "sys", "sysfs", closed | syscalls.MS_RDONLY)
    pts = root / "dev" / "pts"
    pts.mkdir(parents=True, exist_ok=True)
    syscalls.mount(
        "devpts", pts, "devpts", syscalls.MS_NOSUID | syscalls.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620"
    )
    (root / "dev" / "ptmx").symlink_to("pts/ptmx")


def _close_settings(proc: Path) -> None:
    """Mount settings below /proc read-only: the kernel guards them by uid alone, so root without capabilities
    could change them.
    """
    for name in ("sys", "sysrq-trigger", "irq", "bus", "fs"):
        if (proc / name).exists():
            syscalls.bind(proc / name, proc / name, read_only=True)


DEVICES = tuple(Path("/dev") / name for name in ("null", "zero", "full", "random", "urandom", "tty"))


def system_binds() -> tuple[Bind, ...]:
    """Return read-only binds of the programs and libraries of this machine, and of harmless device nodes."""
    trees = [Path(name) for name in ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")]
    etc = [
        Path("/etc") / name
        for name in ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime")
    ]
    found = [path for path in (*trees, *etc) if path.exists()]
    # Read-only devices can be written to: their times, which all sandboxes see, cannot be set.
    return tuple(Bind(path, path) for path in (*found, *DEVICES))


def python_binds() -> tuple[Bind, ...]:
    """Return read-only binds, in place, of this interpreter, its virtual environment and
    millpond's own code.
    """
    portions = [Path(entry) for entry in millpond.__path__]  # also a folder of that name where Python began
    code = {portion.parent for portion in portions if any(portion.glob("*/__init__.py"))}
    found = {Path(sys.base_prefix), Path(sys.prefix), *code}
    outermost = [path for path in found if not any(parent in found for parent in path.parents)]
    return tuple(Bind(path, path) for path in sorted(outermost) if not path.is_relative_to("/usr"))
