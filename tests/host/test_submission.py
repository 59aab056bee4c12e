# SPDX-License-Identifier: Apache-2.0
"""A job's files on their way from a command to the daemon, over its socket."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from millpond.base.deadline import Deadline
from millpond.base.errors import ConnectionLost, LocalError, Refused, RemoteError
from millpond.host.api import daemon
from millpond.host.client import submission
from millpond.host.client.daemon_client import DaemonClient
from millpond.host.daemon.server import DaemonServer
from millpond.host.fleet import directory
from millpond.host.fleet.directory import Fleet
from millpond.linux import sockets
from millpond.train.job.file import describe
from millpond.train.job.file_cache import FileCache
from millpond.train.job.files import JobFile
from millpond.train.job.spec import DataSpec, Job, ModelSpec
from millpond.train.protocol import FileContents, MissingFiles
from millpond.wire.channel import Channel
from millpond.wire.messages import Ok

from ..job_files import described, written

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
        fleet, {}, cast(Any, made), FileCache(fleet.files), cast(Any, None), dict, cast(Any, None)
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
