# SPDX-License-Identifier: Apache-2.0
"""A job's files and test data on their way from a command to the daemon: sent, laid out, refused, removed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from millpond.base.deadline import Deadline
from millpond.base.errors import ConfigError, ConnectionLost, LocalError, Refused, RemoteError
from millpond.host.api import daemon
from millpond.host.api.launch import StartLaunch
from millpond.host.client import submission
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.daemon.server import DaemonServer
from millpond.host.fleet import directory, worker_user
from millpond.host.fleet.directory import Fleet
from millpond.host.jobs.handed_folders import HandedFolders
from millpond.linux import sockets
from millpond.train.job.file import describe
from millpond.train.job.file_cache import FileCache
from millpond.train.job.files import JobFile
from millpond.train.job.folder import FolderManifest, manifest_of
from millpond.train.job.host_spec import TrackSpec
from millpond.train.job.spec import DataSpec, Job, ModelSpec
from millpond.train.protocol import FileContents, MissingFiles
from millpond.wire.channel import Channel
from millpond.wire.messages import Message, Ok

from ..job_files import described, written
from .daemon_rig import Rig
from .stored import jobs_of

__all__ = ["fleet", "jobs"]

JOB = Job("job", DataSpec("private", str(Path(__file__).parent)), ModelSpec("net:build"))
OTHER_UID = 4711
FILES: dict[str, str | bytes] = {
    "net.py": "x = 1",
    "again.py": "x = 1",
    "big.bin": os.urandom(2 << 20),
    "e": "",
}


class Jobs:
    """Takes jobs."""

    def __init__(self) -> None:
        self.taken: list[dict[str, JobFile]] = []
        self.jobs: list[Job] = []
        self.owners: list[int] = []

    def submit(self, job: Job, files: dict[str, JobFile], owner: int) -> int:
        self.taken.append(files)
        self.jobs.append(job)
        self.owners.append(owner)
        return len(self.taken)


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    (tmp_path / "fleet.toml").write_text('name = "tests"\n')
    return directory.read(tmp_path)


@pytest.fixture
def jobs(fleet: Fleet) -> Iterator[Jobs]:
    made = Jobs()
    server = DaemonServer(
        fleet,
        {},
        cast(Any, made),
        FileCache(fleet.files),
        cast(Any, None),
        dict,
        cast(Any, None),
        cast(Any, None),
    )
    yield made
    server.close()


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, Path]:
    folder = written(FILES, tmp_path / "job")
    return {name: folder / name for name in FILES}


def soon() -> Deadline:
    return Deadline.after(30)


def raw(fleet: Fleet) -> Channel:
    return Channel(sockets.connect(fleet.socket), "the host daemon")


def test_contents_go_over_once(
    fleet: Fleet, jobs: Jobs, paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Path] = []
    send = DaemonClient._send_files
    monkeypatch.setattr(
        DaemonClient, "_send_files", lambda *given: (sent.extend(p for _, p in given[1]), send(*given))
    )
    with DaemonClient(fleet.directory) as client:
        assert [client.submit(JOB, paths), client.submit(JOB, paths)] == [1, 2]
    assert jobs.taken == [described(FILES)] * 2
    assert len(sent) == 3 and paths["big.bin"] in sent
    cache = FileCache(fleet.files)
    stored = [cache.path(file).read_bytes() for file in described(FILES).values()]
    assert stored == [path.read_bytes() for path in paths.values()]


def test_how_much_of_large_files_is_sent_is_told(
    fleet: Fleet, jobs: Jobs, paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, told = list[int](), list[int]()

    def begin(_name: str, total: int) -> Callable[[int], None]:
        begun.append(total)
        return told.append

    with DaemonClient(fleet.directory) as client:
        client.submit(JOB, {"net.py": paths["net.py"]}, begin)  # at once
        monkeypatch.setattr(submission, "MUCH_BYTES", 1 << 20)
        client.submit(JOB, paths, begin)
    assert begun == [2 << 20] and sum(told) == 2 << 20


def test_a_file_that_changes_meanwhile_is_named(
    fleet: Fleet, jobs: Jobs, paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with DaemonClient(fleet.directory) as client:
        for before, text in (
            ({"net.py": "y = 2"}, "another SHA-256"),
            ({"net.py": "longer"}, "it has changed"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(submission, "describe", lambda _paths, _where, known=before: described(known))
                with pytest.raises((Refused, LocalError), match=rf"net\.py: .*{text}"):
                    client.submit(JOB, {"net.py": paths["net.py"]})
        assert client.submit(JOB, paths) == 1
    assert len(list(fleet.files.iterdir())) == 3


def test_many_small_files_wait_for_the_disk_a_few_times(
    fleet: Fleet, jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: twice for each, and a test folder of 10,000 files took two minutes."""
    count = daemon.MOST_SMALL + 5
    (folder := tmp_path / "many").mkdir()
    for number in range(count):
        (folder / f"{number}").write_bytes(f"{number:07}".encode())
    (folder / "large").write_bytes(bytes(daemon.SMALL_BYTES + 1))
    known = describe({path.name: path for path in folder.iterdir()}, "many")
    waits, really = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (waits.append(descriptor), really(descriptor)))
    with DaemonClient(fleet.directory) as client:
        client._send_contents({file.sha256: (file, folder / name) for name, file in known.items()})
    cache = FileCache(fleet.files)
    assert all(cache.path(file).read_bytes() == (folder / name).read_bytes() for name, file in known.items())
    assert {path.stat().st_mode & 0o777 for path in fleet.files.iterdir()} == {0o444}
    assert len(list(fleet.files.iterdir())) == count + 1
    assert len(waits) < 10


def test_small_files_are_stored_all_or_none(fleet: Fleet, jobs: Jobs) -> None:
    good, bad = described({"a": "1", "b": "2"}).values()
    for files, text in (
        ((good, bad), "another SHA-256"),
        ((good, JobFile("../x", 1)), "not a relative file name"),
        ((good,) * (daemon.MOST_SMALL + 1), "more small files"),
    ):
        with raw(fleet) as channel, pytest.raises((Refused, RemoteError), match=text):
            channel.call(daemon.SmallFiles(files), Ok, soon(), b"13")
    assert list(fleet.files.iterdir()) == []
    with raw(fleet) as channel:
        channel.call(daemon.SmallFiles((good, bad)), Ok, soon(), b"12")
    assert len(list(fleet.files.iterdir())) == 2


def test_a_job_without_its_contents_is_refused(fleet: Fleet, jobs: Jobs) -> None:
    with raw(fleet) as channel, pytest.raises(Refused, match=r"the contents of 'net\.py' are not here"):
        channel.call(daemon.Submit(JOB, described({"net.py": "x"})), daemon.Submitted, soon())
    assert jobs.taken == []


def test_contents_that_nothing_is_known_of_are_read_and_refused(fleet: Fleet, jobs: Jobs) -> None:
    with raw(fleet) as channel:
        for digest in ("../../etc/passwd", "", "0" * 64):
            with pytest.raises(Refused, match=r"are no file|another SHA-256"):
                channel.call(FileContents(digest), Ok, soon(), bytes(1 << 20))
        assert channel.call(daemon.AnnounceFiles({}), MissingFiles, soon()) == MissingFiles(())
        too_much = {"a": JobFile("0" * 64, 1 << 60)}
        with pytest.raises(Refused, match="more bytes of files; 1152921504606846976 are needed"):
            channel.call(daemon.AnnounceFiles(too_much), MissingFiles, soon())
    assert list(fleet.files.iterdir()) == []


def test_a_payload_of_another_message_ends_the_connection(fleet: Fleet, jobs: Jobs) -> None:
    with raw(fleet) as channel:
        channel.send(daemon.GetJobs(), soon(), b"payload")
        with pytest.raises(ConnectionLost):
            channel.receive(soon())


TEST_DATA: dict[str, str | bytes] = {
    "images.npy": os.urandom(3 << 20),
    "labels.npy": "labels",
    "again": "labels",
}


@pytest.fixture
def other_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients are of another user than the daemon."""
    monkeypatch.setattr(sockets, "peer_uid", lambda _sock: OTHER_UID)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = written(TEST_DATA, tmp_path / "own" / "data")
    (folder / "empty").mkdir()
    return folder


def job_on(folder: Path) -> Job:
    return replace(JOB, data=DataSpec("private", str(folder)))


def submit(fleet: Fleet, job: Job) -> int:
    with DaemonClient(fleet.directory) as client:
        return client.submit(job, {})


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_the_daemon_of_the_same_user_reads_the_folder_in_its_place(
    fleet: Fleet, jobs: Jobs, data: Path
) -> None:
    submit(fleet, job_on(data))
    assert jobs.jobs == [job_on(data)] and jobs.owners == [os.geteuid()]
    assert not fleet.test_data.exists()


def test_the_folder_of_another_user_is_sent_once(
    fleet: Fleet, jobs: Jobs, data: Path, other_user: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Path] = []
    send = DaemonClient._send_file
    monkeypatch.setattr(DaemonClient, "_send_file", lambda *given: (sent.append(given[2]), send(*given)))
    for _ in range(2):
        submit(fleet, job_on(data))
    assert data / "images.npy" in sent and len(sent) == 3  # the contents of two files, and the manifest
    assert jobs.owners == [OTHER_UID] * 2
    first, second = (Path(job.data.test) for job in jobs.jobs)
    assert first == second and first.parent == fleet.test_data / str(OTHER_UID)
    assert contents(first) == contents(data) and (first / "empty").is_dir()
    data.joinpath("labels.npy").write_text("others")
    submit(fleet, job_on(data))
    third = Path(jobs.jobs[-1].data.test)
    assert third != first and contents(third) == contents(data) != contents(first)


def test_how_much_of_large_test_data_is_read_is_told(
    fleet: Fleet, jobs: Jobs, data: Path, other_user: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: a command that hashed hundreds of gigabytes said nothing meanwhile."""
    monkeypatch.setattr(submission, "MUCH_BYTES", 1)
    told = dict[str, list[int]]()

    def begin(name: str, total: int) -> Callable[[int], None]:
        told[name] = [total]
        return told[name].append

    with DaemonClient(fleet.directory) as client:
        client.submit(job_on(data), {}, begin)
    total, *parts = told[f"reading the test data in {data}"]
    assert total == sum(parts) == sum(path.stat().st_size for path in data.rglob("*") if path.is_file())


def test_a_folder_that_the_daemon_sees_otherwise_is_sent(
    fleet: Fleet, jobs: Jobs, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root's home is hidden from the installed daemon, and another /tmp lies over that of users."""
    found = data.stat()
    with raw(fleet) as channel:
        for path, inode, seen in (
            (data, found.st_ino, True),
            (data, found.st_ino + 1, False),
            (data / "nowhere", found.st_ino, False),
            (Path("/a\0b"), found.st_ino, False),
        ):
            request = daemon.LookForFolder(str(path), found.st_dev, inode)
            assert channel.call(request, daemon.FolderSeen, soon()) == daemon.FolderSeen(seen)


def test_no_path_of_another_user_is_opened_or_told_of(
    fleet: Fleet, jobs: Jobs, data: Path, other_user: None
) -> None:
    found = data.stat()
    with raw(fleet) as channel:
        request = daemon.LookForFolder(str(data), found.st_dev, found.st_ino)
        assert channel.call(request, daemon.FolderSeen, soon()) == daemon.FolderSeen(False)
        with pytest.raises(Refused, match="data: test: the daemon opens no folder for another user"):
            channel.call(daemon.Submit(job_on(data), {}), daemon.Submitted, soon())
    assert jobs.jobs == []


@pytest.mark.parametrize("digest", ["../files", "x", "0" * 64, "0" * 63 + "/"])
def test_test_data_that_were_not_sent_are_refused(fleet: Fleet, jobs: Jobs, data: Path, digest: str) -> None:
    with raw(fleet) as channel, pytest.raises(Refused, match=r"no digest of a folder|are not here"):
        channel.call(daemon.Submit(job_on(data), {}, digest), daemon.Submitted, soon())
    assert jobs.jobs == []


def test_test_data_are_for_the_user_who_has_sent_them(
    fleet: Fleet, jobs: Jobs, data: Path, other_user: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(fleet, job_on(data))
    digest = Path(jobs.jobs[0].data.test).name
    size = len(manifest_of(data, "").data)
    with raw(fleet) as channel:
        channel.call(daemon.Submit(job_on(data), {}, digest), daemon.Submitted, soon())
        monkeypatch.setattr(sockets, "peer_uid", lambda _sock: OTHER_UID + 1)
        with pytest.raises(Refused, match="the test data are not here"):
            channel.call(daemon.Submit(job_on(data), {}, digest), daemon.Submitted, soon())
        announced = channel.call(daemon.AnnounceFolder(JobFile(digest, size)), MissingFiles, soon())
        assert announced.digests == (digest,)
        with pytest.raises(Refused, match="the contents of 'list' are not here"):  # it names all contents
            files = {"list": JobFile(digest, size)}
            channel.call(daemon.Submit(JOB, files), daemon.Submitted, soon())


def test_another_user_is_not_told_where_test_data_and_trackers_are(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An address may have a password in it."""
    rig.submit(text='track = { mlflow = "https://me:secret@tracker.example" }\n')
    with DaemonClient(rig.directory) as client:
        job = client.job(1).job
        assert job.data.test and job.track.mlflow
        monkeypatch.setattr(sockets, "peer_uid", lambda _sock: OTHER_UID)
        job = client.job(1).job
        assert (job.data.test, job.track) == ("", TrackSpec())


def test_the_daemons_user_does_not_write_where_a_member_of_its_group_says(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "peer_uid", lambda _sock: OTHER_UID)
    rig.submit(text='track = { tensorboard = "/etc/cron.d" }\n')
    for own in (os.geteuid(), 0):
        monkeypatch.setattr(sockets, "peer_uid", lambda _sock, own=own: own)
        with DaemonClient(rig.directory) as client:
            job = client.job(1).job
        assert job.data.test and job.track == TrackSpec()


def test_a_signature_of_many_bytes_is_refused_before_a_job_has_it(rig: Rig) -> None:
    rig.write_job("signed", "synchronous = {}\n")
    text = (
        rig.directory.joinpath("signed.toml")
        .read_text()
        .replace('digits_cnn" }', 'digits_cnn", signature = "s" }')
    )
    rig.directory.joinpath("signed.toml").write_text(text)
    rig.directory.joinpath("s").write_bytes(bytes(1 << 20))
    code, _, err = rig.command("train", str(rig.directory / "signed.toml"), "--detach")
    assert (code, err) == (2, "millpond: signed: signature: 1048576 bytes are no signature of a job's code\n")
    assert jobs_of(rig.store) == []


@pytest.mark.skipif(not worker_user.is_separate(), reason="only root starts workers of another user")
@pytest.mark.parametrize("closed", ["images.npy", "empty", "."])
def test_what_the_jobs_user_cannot_read_is_handed_over(
    fleet: Fleet, jobs: Jobs, data: Path, closed: str
) -> None:
    (data / closed).chmod(0o700 if (data / closed).is_dir() else 0o600)
    submit(fleet, job_on(data))
    handed = Path(jobs.jobs[0].data.test)
    assert handed.parent == fleet.test_data / str(os.geteuid())
    assert contents(handed) == contents(data) and worker_user.can_read(handed)


def test_what_members_of_the_group_may_not_do(fleet: Fleet, jobs: Jobs, other_user: None) -> None:
    forbidden: tuple[tuple[Message, str], ...] = (
        (daemon.RemoveDevice("csd0"), "the removal of a device"),
        (daemon.PruneJobs(), "the removal of jobs' files"),
        (StartLaunch("a.py", (), {}, (), True, 0, False, (), ""), "a launch"),
    )
    with raw(fleet) as channel:
        for request, what in forbidden:
            with pytest.raises(Refused, match=f"{what} is for the daemon's own user alone"):
                channel.call(request, Ok, soon())


class Laid:
    """A cache with contents, and the folders over it."""

    def __init__(self, folder: Path) -> None:
        self.cache = FileCache(folder / "files")
        self.folder = folder / "test-data"
        self.folders = HandedFolders(self.folder, self.cache)

    def add(self, files: dict[str, str | bytes]) -> None:
        for name, file in described(files).items():
            content = files[name]
            self.cache.add(file, [content.encode() if isinstance(content, str) else content])

    def manifest(self, manifest: FolderManifest) -> JobFile:
        self.add({"manifest": manifest.data})
        return described({"manifest": manifest.data})["manifest"]


@pytest.fixture
def laid(tmp_path: Path) -> Laid:
    return Laid(tmp_path)


def test_a_folder_is_there_whole_or_not_at_all(laid: Laid) -> None:
    manifest = laid.manifest(FolderManifest(described({"a": "1", "b": "2"})))
    laid.add({"a": "1"})
    with pytest.raises(LocalError, match="the stored contents of 'b' are damaged or gone"):
        laid.folders.lay_out(manifest, 7)
    assert not laid.folders.has(manifest.sha256, 7)
    laid.add({"b": "2"})
    for _ in range(2):
        laid.folders.lay_out(manifest, 7)
    assert [path.name for path in (laid.folder / "7").iterdir()] == [manifest.sha256]
    assert contents(laid.folders.path(manifest.sha256, 7)) == {"a": b"1", "b": b"2"}


def test_a_manifest_that_is_none_is_refused(laid: Laid) -> None:
    for text in ("no manifest", '{"files": {"../x": {"sha256": "' + "0" * 64 + '", "size": 0}}}'):
        laid.add({"manifest": text})
        with pytest.raises(ConfigError, match="the test data"):
            laid.folders.lay_out(described({"manifest": text})["manifest"], 7)
    with pytest.raises(LocalError, match="manifest"):
        laid.folders.lay_out(JobFile("0" * 64, 1), 7)
    assert not laid.folder.exists()


def test_two_jobs_with_the_same_data_at_once(laid: Laid, monkeypatch: pytest.MonkeyPatch) -> None:
    laid.add({"a": "1"})
    manifest = laid.manifest(FolderManifest(described({"a": "1"})))
    link, again = FileCache.link, HandedFolders(laid.folder, laid.cache)

    def beside(cache: FileCache, *given: Any) -> None:
        monkeypatch.setattr(FileCache, "link", link)
        again.lay_out(manifest, 7)
        link(cache, *given)

    monkeypatch.setattr(FileCache, "link", beside)
    laid.folders.lay_out(manifest, 7)
    assert contents(laid.folders.path(manifest.sha256, 7)) == {"a": b"1"}
    assert [path.name for path in (laid.folder / "7").iterdir()] == [manifest.sha256]


def test_folders_of_no_job_go(laid: Laid) -> None:
    laid.folders.keep(())
    laid.add({"a": "1", "b": "2"})
    made = [laid.manifest(FolderManifest(described({name: text}))) for name, text in (("a", "1"), ("b", "2"))]
    for manifest in made:
        laid.folders.lay_out(manifest, 7)
    written({"half": "done"}, laid.folder / ".new-x" / "folder")
    laid.cache.keep(())
    laid.folders.keep({made[1].sha256})
    assert [path.name for path in (laid.folder / "7").iterdir()] == [made[1].sha256]
    assert contents(laid.folders.path(made[1].sha256, 7)) == {"b": b"2"}  # without the cache, too
