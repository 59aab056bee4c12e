# SPDX-License-Identifier: Apache-2.0
"""The folder that all ranks of a launch share: its server, a mount on the host and one on a device."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

import psutil
import pytest

from millpond.base.deadline import Deadline
from millpond.base.errors import LocalError, ProtocolError, RemoteError
from millpond.fs.mount import folder_server
from millpond.host.fleet import worker_user
from millpond.host.fleet.device import Device
from millpond.host.fleet.directory import DeviceConfig
from millpond.host.launch.shared import MOST_RELAYED, SharedFolder
from millpond.launch.shared_mount import SharedMount
from millpond.launch.sharing import SharedFolders
from millpond.linux import sockets
from millpond.linux.confinement import landlock
from millpond.linux.confinement.userns import has_many_uids
from millpond.train.distributed.launch_messages import EndSharing, ShareFolder
from millpond.wire.channel import Channel
from millpond.wire.control_messages import Ticket
from millpond.wire.messages import Ok
from millpond.wire.relay import relay

from ..waiting import eventually

InNamespace = Callable[[Callable[[], None]], None]
OWNER, SCRIPT = 4711, 64004
IS_ROOT = os.geteuid() == 0 and has_many_uids()


@dataclass
class NearDevice:
    """A device whose agent, in this process, mounts what it is told to below ``top``."""

    top: Path
    config: DeviceConfig = field(default_factory=lambda: DeviceConfig("csd0"))
    name: str = "csd0"
    mounts: dict[bytes, SharedMount] = field(default_factory=dict)
    served: list[threading.Thread] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folders = SharedFolders(self.top, SCRIPT)

    def control(self, _deadline: Deadline) -> Channel:
        near, far = socket.socketpair()
        self.served.append(threading.Thread(target=self._serve, args=(far,), daemon=True))
        self.served[-1].start()
        return Channel(near, self.name)

    def has_ended(self) -> None:
        """An agent outlives a launch: it takes a mount away after the host has heard that it has ended."""
        for thread in self.served:
            thread.join(20)

    def _serve(self, sock: socket.socket) -> None:
        with Channel(sock, "host") as host, contextlib.suppress(RemoteError):
            self.folders.serve(host.expect(ShareFolder, Deadline.after(10)), host, self._issue)

    def _issue(self, mount: SharedMount, tls: bool) -> Ticket:
        token = os.urandom(8)
        self.mounts[token] = mount
        return Ticket(token, tls)

    def bulk(self, token: bytes, encrypted: bool, _deadline: Deadline) -> Channel:
        near, far = socket.socketpair()
        mount = self.mounts.pop(token)
        assert encrypted == (self.config.encrypt == "always")
        if encrypted:
            threading.Thread(target=relay, args=(far, mount.hand_over), daemon=True).start()
        else:
            mount.hand_over(far)
        return Channel(near, self.name)


@dataclass
class Ranks:
    """The folder itself, and where the host's rank and a device's see it."""

    folder: Path
    host: Path
    device: Path


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)


@contextlib.contextmanager
def ranks(top: Path, encrypt: Literal["auto", "always"] = "auto") -> Iterator[Ranks]:
    folder, run = top / "folder", uuid.uuid4().hex
    folder.mkdir()
    if IS_ROOT:
        os.chown(folder, OWNER, OWNER)
    (top / "secret").write_text("of the host")
    near = NearDevice(top / "device", DeviceConfig("csd0", encrypt=encrypt))
    with opened(folder) as descriptor:
        served = SharedFolder(descriptor, top / "host")
    device = cast(Device, near)
    with contextlib.closing(served), served.on_host(run) as host, served.on_device(device, run):
        yield Ranks(folder, host, near.folders.place(run))
    near.has_ended()


def in_ranks(
    in_namespace: InNamespace,
    top: Path,
    body: Callable[[Ranks], None],
    encrypt: Literal["auto", "always"] = "auto",
) -> None:
    top.chmod(0o755)

    def inside() -> None:
        with ranks(top, encrypt) as all_of_them:
            body(all_of_them)

    in_namespace(inside)


@pytest.mark.parametrize("encrypt", ["auto", "always"])
def test_what_one_rank_writes_another_reads_and_the_owner_has(
    fuse_usable: None, in_namespace: InNamespace, tmp_path: Path, encrypt: Literal["auto", "always"]
) -> None:
    def body(r: Ranks) -> None:
        big = os.urandom(3 << 20)
        for number in range(50):
            (r.host / f"h{number}").write_bytes(b"h" * number)
            assert (r.device / f"h{number}").read_bytes() == b"h" * number
            (r.device / f"d{number}").write_bytes(big[: 40_000 * number])
            assert (r.host / f"d{number}").read_bytes() == big[: 40_000 * number]
        (r.device / "h7").write_bytes(b"again")
        assert (r.host / "h7").read_bytes() == b"again"
        (r.host / "deep").mkdir()
        (r.device / "deep" / "last").write_bytes(b"x")
        for place, user in ((r.host, worker_user.UID), (r.device, SCRIPT)):
            shown = {path.stat().st_uid for path in (place, place / "deep", place / "deep" / "last")}
            assert shown == {user if IS_ROOT else 0}

    in_ranks(in_namespace, tmp_path, body, encrypt)
    folder = tmp_path / "folder"
    assert (folder / "deep" / "last").read_bytes() == b"x" and (folder / "h7").read_bytes() == b"again"
    if IS_ROOT:
        assert {(p.stat().st_uid, p.stat().st_gid) for p in folder.rglob("*")} == {(OWNER, OWNER)}
    assert not list((tmp_path / "host").iterdir()) and not list((tmp_path / "device").iterdir())


def test_nothing_outside_the_folder_is_reached_or_made(
    fuse_usable: None, in_namespace: InNamespace, tmp_path: Path
) -> None:
    """A link is followed where it is read, in the rank's own sandbox; the server follows none."""

    def body(r: Ranks) -> None:
        (r.device / "up").symlink_to("../secret")
        (r.device / "passwd").symlink_to("/etc/passwd")
        (r.device / "folder").symlink_to("/etc")
        for name in ("up", "passwd", "folder"):
            assert (r.host / name).is_symlink()  # in a sandbox there is no such file
        assert not (r.host / "up").exists()
        (r.device / "run").touch()
        (r.device / "run").chmod(0o4755)
        assert stat.S_IMODE((r.folder / "run").stat().st_mode) == 0o755
        os.close(os.open(r.device / "made", os.O_CREAT | os.O_WRONLY, 0o6755))
        assert not (r.folder / "made").stat().st_mode & (stat.S_ISUID | stat.S_ISGID)
        (r.device / "group").mkdir()
        (r.device / "group").chmod(0o2755)
        assert not (r.folder / "group").stat().st_mode & stat.S_ISGID
        for kind in (stat.S_IFCHR, stat.S_IFBLK):
            with pytest.raises(PermissionError):
                os.mknod(r.device / "node", kind | 0o666, os.makedev(1, 3))
        with pytest.raises(OSError):
            os.chown(r.device / "run", 1234, -1)
        for name in ("security.capability", "trusted.overlay.opaque"):
            with pytest.raises(OSError) as refused:
                os.setxattr(r.device / "run", name, b"x")
            assert refused.value.errno in (errno.EOPNOTSUPP, errno.EPERM, errno.EINVAL)

    in_ranks(in_namespace, tmp_path, body)


@pytest.mark.skipif(not IS_ROOT, reason="needs root")
def test_folders_of_root_are_not_shared_without_landlock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(landlock, "why_off", lambda: "the kernel has none")
    with opened(tmp_path) as folder, pytest.raises(LocalError, match="share one of another user"):
        SharedFolder(folder, tmp_path / "host")


@pytest.mark.parametrize("run", ["../" + "0" * 29, "", "0" * 31 + "G"])
def test_a_launch_names_no_other_place_on_a_device(tmp_path: Path, run: str) -> None:
    near, far = (Channel(end, "the other end") for end in socket.socketpair())
    with near, far, pytest.raises(ProtocolError, match="no name of a new launch"):
        SharedFolders(tmp_path, SCRIPT).serve(ShareFolder(run, False), far, NearDevice(tmp_path)._issue)
    assert not list(tmp_path.iterdir())


def processes_of(process: psutil.Process, module: str = "millpond.fs.mount.passed") -> list[psutil.Process]:
    found = process.children(recursive=True)
    return [each for each in found if module in each.cmdline()]


@pytest.mark.skipif(not IS_ROOT, reason="needs root")
def test_what_understands_the_network_has_no_rights(
    fuse_usable: None, in_namespace: InNamespace, tmp_path: Path
) -> None:
    def body(r: Ranks) -> None:
        uids = {process.uids().effective for process in processes_of(psutil.Process())}
        assert uids == {worker_user.UID, SCRIPT}
        for process in processes_of(psutil.Process()):
            for thread in process.threads():
                status = Path(f"/proc/{process.pid}/task/{thread.id}/status").read_text()
                assert "CapPrm:\t0000000000000000" in status and "NoNewPrivs:\t1" in status

    in_ranks(in_namespace, tmp_path, body)


def test_a_rank_that_stands_still_holds_others_up_no_longer_than_its_lease(
    fuse_usable: None, in_namespace: InNamespace, tmp_path: Path
) -> None:
    def body(r: Ranks) -> None:
        (r.device / "kept").write_bytes(b"1")
        assert (r.device / "kept").read_bytes() == b"1"
        (device,) = [p for p in processes_of(psutil.Process()) if str(r.device) in p.cmdline()]
        device.suspend()
        (r.host / "kept").write_bytes(b"2")
        (r.host / "other").write_bytes(b"3")
        device.resume()
        eventually(lambda: (r.device / "kept").read_bytes() == b"2", "the rank goes on")

    in_ranks(in_namespace, tmp_path, body)
    assert (tmp_path / "folder" / "kept").read_bytes() == b"2"


def test_ranks_whose_server_has_died_fail(
    fuse_usable: None, in_namespace: InNamespace, tmp_path: Path
) -> None:
    def body(r: Ranks) -> None:
        (r.host / "file").write_bytes(b"x")
        for process in processes_of(psutil.Process(), "millpond.fs.mount.folder_server"):
            process.kill()
        for place in (r.host, r.device):
            with pytest.raises(OSError) as told:
                (place / "new").write_bytes(b"x")
            assert told.value.errno == errno.EIO

    in_ranks(in_namespace, tmp_path, body)


def test_nothing_is_left_of_a_mount_that_is_killed(
    fuse_usable: None, in_namespace: InNamespace, tmp_path: Path
) -> None:
    def body(r: Ranks) -> None:
        (r.host / "file").write_bytes(b"x")
        for process in processes_of(psutil.Process()):
            process.kill()
        with pytest.raises(OSError) as told:
            (r.host / "file").read_bytes()
        assert told.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)

    in_ranks(in_namespace, tmp_path, body)
    assert not list((tmp_path / "host").iterdir()) and not list((tmp_path / "device").iterdir())


@dataclass
class WantingDevice(NearDevice):
    """A device that wants encrypted connections without end, and keeps its ends of them."""

    wanted: int = 0
    kept: list[socket.socket] = field(default_factory=list)

    def _serve(self, sock: socket.socket) -> None:
        with Channel(sock, "host") as host:
            host.expect(ShareFolder, Deadline.after(10))
            for _ in range(self.wanted):
                host.send(Ticket(b"token", True), Deadline.after(10))
            host.send(Ok(), Deadline.after(10))
            host.expect(EndSharing, Deadline.after(30))
            host.send(Ok(), Deadline.after(10))

    def bulk(self, _token: bytes, _encrypted: bool, _deadline: Deadline) -> Channel:
        near, far = socket.socketpair()
        self.kept.append(far)
        return Channel(near, self.name)


class SilentDevice(NearDevice):
    """A device whose agent stands still."""

    def _serve(self, sock: socket.socket) -> None:
        with Channel(sock, "host") as host:
            host.expect(ShareFolder, Deadline.after(10))
            host.sock.recv(1)


def test_a_launch_that_is_over_waits_for_no_mount(tmp_path: Path) -> None:
    with opened(tmp_path) as descriptor:
        served = SharedFolder(descriptor, tmp_path / "host")
    over = iter([False, False, True])
    mounted = served.on_device(cast(Device, SilentDevice(tmp_path)), uuid.uuid4().hex, lambda: next(over))
    with contextlib.closing(served), pytest.raises(RemoteError, match="the launch is over"):
        mounted.__enter__()


def relays() -> int:
    return sum("_relay" in thread.name for thread in threading.enumerate())


def test_a_device_takes_a_bounded_number_of_the_hosts_threads_and_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    near = WantingDevice(tmp_path, wanted=MOST_RELAYED + 50)
    with opened(tmp_path) as descriptor:
        served = SharedFolder(descriptor, tmp_path / "host")
    device = cast(Device, near)
    with contextlib.closing(served), served.on_device(device, uuid.uuid4().hex):
        assert len(near.kept) == near.wanted
        assert [end.recv(1) for end in near.kept[-50:]] == [b""] * 50
        eventually(lambda: relays() == MOST_RELAYED, "all others go on")
        near.kept[0].close()
        eventually(lambda: relays() < MOST_RELAYED, "a place is free")
    assert caplog.text.count("one more was refused") == 1
    for end in near.kept:
        end.close()
    eventually(lambda: not relays(), "all relays have ended")


def test_clients_of_a_folder_cannot_fill_the_hosts_log(tmp_path: Path) -> None:
    near, far = socket.socketpair()
    shared, written = tmp_path / "shared", tmp_path / "log"
    shared.mkdir()

    def lines() -> int:
        return len(written.read_bytes().splitlines())

    with opened(shared) as folder, near:
        with far, written.open("wb") as log:
            descriptors = (folder, far.fileno())
            server = subprocess.Popen(
                [sys.executable, "-m", folder_server.__name__, *map(str, descriptors)],
                pass_fds=descriptors,
                stderr=log,
            )
        with server:
            for _ in range(folder_server.MOST_LINES + 100):
                ours, theirs = socket.socketpair()
                with ours, theirs:
                    sockets.send_descriptors(near, [theirs.fileno()])
                    ours.sendall(b"this is no message")
                    theirs.close()
                    while ours.recv(1 << 10):
                        pass
            eventually(lambda: lines() >= folder_server.MOST_LINES, "as many lines as there may be")
            near.close()
        assert lines() == folder_server.MOST_LINES
