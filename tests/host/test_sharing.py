# SPDX-License-Identifier: Apache-2.0
"""A fleet that a group of users shares: what they reach, as another user with a closed home."""

from __future__ import annotations

import contextlib
import ctypes
import grp
import os
import platform
import shutil
import sqlite3
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from millpond.base.errors import ConfigError, LocalError, Refused
from millpond.fs.client.metrics import MountStats
from millpond.fs.mount.stats_socket import read_stats, serve_stats
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.daemon import main as daemon
from millpond.host.fleet import directory, provisioning
from millpond.host.fleet.directory import default_directory
from millpond.host.fleet.sharing import shared_with
from millpond.host.monitor.dashboard import main
from millpond.host.monitor.dashboard.access import Access, Role
from millpond.host.monitor.dashboard.server import Dashboard
from millpond.host.monitor.feed import Feed
from millpond.train.job import file
from millpond.train.job.spec import TrackSpec

from ..conftest import InNamespace
from ..job_files import written
from ..waiting import eventually
from .daemon_rig import Rig
from .dashboard_rig import COOKIE, Served

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
USER = 4711
GROUP = next(group for group in grp.getgrall() if group.gr_gid != 0)
SYSCALLS = {"x86_64": (116, 119, 117), "aarch64": (159, 149, 147)}  # setgroups, setresgid, setresuid
JOB = """
name = "shared"
data = { private = "private/digits", test = "data" }
model = { factory = "net:build", files = ["net.py"] }
"""


def as_user(groups: list[int], body: Callable[[], None]) -> None:
    """Run ``body`` in a thread that alone has become another user; what it raises is raised here."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            setgroups, setresgid, setresuid = SYSCALLS[platform.machine()]
            listed = (ctypes.c_uint32 * len(groups))(*groups)
            assert libc.syscall(setgroups, len(groups), listed) == 0
            assert libc.syscall(setresgid, USER, USER, USER) == 0
            assert libc.syscall(setresuid, USER, USER, USER) == 0
            body()
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that other users may enter, with a fleet, and a home that is closed to all but its user."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    try:
        (folder / "fleet").mkdir(mode=0o700)
        (folder / "fleet" / "fleet.toml").write_text('name = "shared"\n')
        home = written({"job.toml": JOB, "net.py": "x = 1\n", "data/a.npy": "test data"}, folder / "home")
        for path in (home, *home.rglob("*")):
            path.chmod(0o700 if path.is_dir() else 0o600)
            with contextlib.suppress(PermissionError):
                os.chown(path, USER, USER)
        yield folder
    finally:
        shutil.rmtree(folder)


def test_members_enter_the_directory_and_open_nothing_but_its_configuration(
    tmp_path: Path, restored_umask: None
) -> None:
    own = grp.getgrgid(os.getegid())
    written({"fleet.toml": "", "fleet.db": "", "ca/ca.key": "", "jobs/1/model": ""}, tmp_path / "fleet")
    fleet = tmp_path / "fleet"
    assert shared_with(fleet, own.gr_name) == own.gr_gid
    found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (fleet, *fleet.iterdir())}
    assert found == {"fleet": 0o710, "fleet.toml": 0o644, "fleet.db": 0o600, "ca": 0o700, "jobs": 0o700}
    (fleet / "later").mkdir()
    assert stat.S_IMODE((fleet / "later").stat().st_mode) == 0o700


def test_nobody_else_enters_a_fleet_that_is_not_shared(tmp_path: Path, in_namespace: InNamespace) -> None:
    def mode(path: Path) -> int:
        return stat.S_IMODE(path.stat().st_mode)

    made = provisioning.create(tmp_path / "made", "made", ["csd0"]).directory
    (tmp_path / "open").mkdir(mode=0o755)
    given = provisioning.create(tmp_path / "open", "given", ["csd0"]).directory
    assert (mode(made), mode(given)) == (0o700, 0o750)
    made.chmod(0o755)  # as earlier versions have made it

    def body() -> None:
        with daemon.running(directory.read(made)):
            assert mode(made) == 0o750

    in_namespace(body)


@pytest.fixture
def restored_umask() -> Iterator[None]:
    before = os.umask(0o022)
    try:
        yield
    finally:
        os.umask(before)


def test_a_group_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no group 'no-such-group' on this host"):
        shared_with(tmp_path, "no-such-group")


def test_users_of_an_installed_daemon_need_not_name_its_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(os, "geteuid", lambda: USER)
    own, installed = tmp_path / "home/.local/state/millpond", tmp_path / "installed"
    assert default_directory(installed) == own
    written({"fleet.toml": ""}, installed)  # without a socket: the daemon is not running, and commands say so
    assert default_directory(installed) == installed
    written({"fleet.toml": ""}, own)
    assert default_directory(installed) == own


@needs_root
@pytest.mark.expected_log("job 1")
def test_a_member_trains_from_a_closed_home_and_owns_the_model(
    place: Path, in_namespace: InNamespace
) -> None:
    fleet, home = place / "fleet", place / "home"

    def train() -> None:
        with pytest.raises(PermissionError):
            list(fleet.iterdir())
        job, code = file.read(home / "job.toml")
        with DaemonClient(fleet) as client, contextlib.suppress(Refused):  # it may have failed by then
            client.submit(job, code)

    def fetch() -> None:
        for path in (fleet / "fleet.db", fleet / "jobs/1/model.safetensors"):
            with pytest.raises(PermissionError):
                path.open("rb")
        with DaemonClient(fleet) as client:
            client.save_model(1, home / "model.safetensors")

    def body() -> None:
        with daemon.running(directory.read(fleet), GROUP.gr_name), DaemonClient(fleet) as client:
            as_user([GROUP.gr_gid], train)
            eventually(lambda: client.jobs()[0].state == "failed", "it has no devices", 60, 0.1)
            (job,) = client.jobs()
            assert (job.owner, job.error) == (USER, "no device is ready (the fleet is empty)")
            test = Path(client.job(1).job.data.test)
            assert test.parent == fleet / "test-data" / str(USER)
            assert [path.read_text() for path in test.iterdir()] == ["test data"]
            (fleet / "jobs/1/model.safetensors").write_bytes(b"values")
            with sqlite3.connect(fleet / "fleet.db") as db:
                model = str(fleet / "jobs/1/model.safetensors")
                db.execute("UPDATE jobs SET state = 'done', model = ?", (model,))
            db.close()
            as_user([GROUP.gr_gid], fetch)
        saved = home / "model.safetensors"
        assert saved.read_bytes() == b"values" and saved.stat().st_uid == USER
        assert sorted(path.name for path in home.iterdir()) == [
            "data",
            "job.toml",
            "model.safetensors",
            "net.py",
        ]

    in_namespace(body)


@needs_root
def test_another_user_reaches_nothing(place: Path, in_namespace: InNamespace) -> None:
    fleet = place / "fleet"

    def body() -> None:
        with daemon.running(directory.read(fleet), GROUP.gr_name):
            with pytest.raises(LocalError, match="Permission denied"):
                as_user([], lambda: DaemonClient(fleet).jobs())
            found = (fleet / "host.sock").stat()
            assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o660, GROUP.gr_gid)

    in_namespace(body)


@contextlib.contextmanager
def dashboard(fleet: Path) -> Iterator[Served]:
    """The dashboard of a user, with both roles."""
    with main.listen("127.0.0.1", 0) as sock, Feed(fleet, period=0.1) as feed:
        port = sock.getsockname()[1]
        access = Access.fresh((f"http://127.0.0.1:{port}",), control=True)
        server = main.WebServer(Dashboard(feed, "shared", access, COOKIE))
        thread = threading.Thread(target=server.run, args=([sock],))  # of the same user as this one
        thread.start()
        try:
            eventually(lambda: server.started and feed.snapshot.at, "a dashboard that answers")
            yield Served(cast(Rig, None), feed, access, port, Role.CONTROL)
        finally:
            server.should_exit = True
            thread.join()


@needs_root
@pytest.mark.expected_log("job 1")
def test_a_member_sees_on_the_dashboard_what_the_socket_tells_a_member(
    place: Path, in_namespace: InNamespace
) -> None:
    fleet, secret = place / "fleet", str(place / "fleet" / "test-data")
    mount = MountStats("csd0", "/mnt/of-the-owner")

    def looks() -> None:
        with dashboard(fleet) as served:
            assert "shared" in served.ask("/").text and "/jobs/1" in served.ask("/").text
            page = served.ask("/jobs/1").text
            assert "no device is ready" in page and "net:build" in page
            assert secret not in page and "the-owners-runs" not in page
            assert not read_stats(directory.read(fleet).mount_stats)
            answer = served.ask("/prune", method="POST", form={"keep": "0", "confirmed": "yes"})
            assert answer.status != 200 and "for the daemon" in answer.text
            assert "/jobs/1" in served.ask("/").text

    def body() -> None:
        job, code = file.read(place / "home" / "job.toml")
        job = replace(
            job,
            data=replace(job.data, test=str(place / "home" / "data")),
            track=TrackSpec(tensorboard="the-owners-runs"),
        )
        shared = directory.read(fleet)
        with daemon.running(shared, GROUP.gr_name), serve_stats(shared.mount_stats, lambda: mount):
            with DaemonClient(fleet) as client, contextlib.suppress(Refused):
                client.submit(job, code)
            with DaemonClient(fleet) as client:
                eventually(lambda: client.jobs()[0].state == "failed", "it has no devices", 60, 0.1)
            assert [each.mountpoint for each in read_stats(shared.mount_stats)] == [mount.mountpoint]
            with dashboard(fleet) as owners:  # by which all modules are loaded, which the member may not read
                assert secret in owners.ask("/jobs/1").text and owners.ask("/").status == 200
            as_user([GROUP.gr_gid], looks)
            with pytest.raises(LocalError, match="Permission denied"):
                as_user([], lambda: DaemonClient(fleet).jobs())

    in_namespace(body)
