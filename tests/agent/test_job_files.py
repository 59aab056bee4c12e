# SPDX-License-Identifier: Apache-2.0
"""Files of jobs on their way from the host's worker of a device to the agent."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from millpond.agent.config import AgentConfig, LinkConfig
from millpond.agent.job_files import JobFiles, LaidOutFiles
from millpond.base.deadline import Deadline
from millpond.base.errors import ConfigError, LocalError, ProtocolError, Refused
from millpond.host.fleet.device import Device
from millpond.host.workers.worker import DeviceWorker
from millpond.train.job.file_cache import FileCache
from millpond.train.job.files import JobFile
from millpond.train.job.spec import ModelSpec, WorkSpec
from millpond.train.protocol import FileContents, MissingFiles, PrepareWorker, Ready, WarmUp
from millpond.wire.channel import Channel
from millpond.wire.messages import Failure, Message, Ok

from ..job_files import described, packed

SOURCES: dict[str, str | bytes] = {
    "net.py": "def build(): ...\n",
    "again.py": "def build(): ...\n",
    "data/weights.bin": os.urandom(3 << 20),
    "empty": b"",
}
FILES = described(SOURCES)


class Agent:
    """A device with the agent's part of a preparation; ``asked`` are the digests that it asked for."""

    name = "csd0"

    def __init__(self, state: Path, files: dict[str, JobFile], **changes: Any) -> None:
        link = LinkConfig("10.77.0.2/30", str(state / "s"))
        self.files = JobFiles(replace(AgentConfig("csd0", link, state=str(state)), **changes))
        self.request = PrepareWorker(WorkSpec("job", ModelSpec("net:build")), "csd0", (), files, ())
        self.found: dict[str, bytes] = {}
        self.sources: dict[str, str] = {}
        self.wheels: set[str] = set()
        self.asked: tuple[str, ...] = ()
        self.error: Exception | None = None
        self._threads: list[threading.Thread] = []

    def control(self, _deadline: Deadline) -> Channel:
        near, far = socket.socketpair()
        self._threads.append(threading.Thread(target=self._serve, args=(far,)))
        self._threads[-1].start()
        return Channel(near, "csd0")

    def bulk(self, _token: bytes, _tls: bool, _deadline: Deadline) -> Channel:
        near, far = socket.socketpair()
        far.close()
        return Channel(near, "csd0")

    def _serve(self, sock: socket.socket) -> None:
        with _Watched(sock, "the host") as host:
            host.expect(WarmUp, soon())
            host.send(Ok(), soon())
            request = host.expect(PrepareWorker, soon())
            try:
                with self.files.laid_out(request.files, host) as files:
                    self._look(files)
                    host.send(Ready((1,)), soon())
            except Refused as error:
                host.send(Failure(error.code, error.text), soon())
            except ConfigError as error:
                host.send(Failure("model", str(error)), soon())
            except (LocalError, ProtocolError) as error:
                self.error = error
                host.send(Failure("device", str(error)), soon())
            self.asked = host.asked

    def _look(self, files: LaidOutFiles) -> None:
        folder = files.worker.folder
        self.found = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        self.sources = files.sources()
        self.wheels = {path.name for path in (files.worker.wheels or folder).glob("*.py")}

    def prepare(self, contents: FileCache) -> Ready:
        worker = DeviceWorker(cast(Device, self), lambda _deadline: self.request, contents.path)
        try:
            return worker.prepare(soon())
        finally:
            worker.close()
            for thread in self._threads:
                thread.join(20)


class _Watched(Channel):
    asked: tuple[str, ...] = ()

    def send(self, message: Message, *others: Any, **more: Any) -> None:
        if isinstance(message, MissingFiles):
            self.asked = message.digests
        super().send(message, *others, **more)


def soon() -> Deadline:
    return Deadline.after(30)


@pytest.fixture
def host(tmp_path: Path) -> FileCache:
    """The host's contents of all files."""
    cache = FileCache(tmp_path / "host")
    for name, said in SOURCES.items():
        cache.add(FILES[name], [said.encode() if isinstance(said, str) else said])
    return cache


@contextmanager
def _damaged(path: Path) -> Iterator[None]:
    before = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(bytes(len(before)))
    yield
    path.write_bytes(before)


def test_each_content_comes_once_and_for_the_next_job_not_at_all(tmp_path: Path, host: FileCache) -> None:
    agent = Agent(tmp_path / "state", FILES)
    assert agent.prepare(host).parts == (1,)
    whole = {name: said.encode() if isinstance(said, str) else said for name, said in SOURCES.items()}
    assert agent.found == whole
    assert agent.sources == {name: str(SOURCES[name]) for name in ("net.py", "again.py")}
    assert sorted(agent.asked) == sorted({file.sha256 for file in FILES.values()})
    assert list((tmp_path / "state/code").iterdir()) == []  # the job has ended
    again = Agent(tmp_path / "state", FILES)
    assert again.prepare(host).parts == (1,)
    assert again.asked == () and again.found == whole


@pytest.mark.expected_log("is damaged, and removed")
def test_contents_that_the_flash_has_lost_come_again(tmp_path: Path, host: FileCache) -> None:
    Agent(tmp_path / "state", FILES).prepare(host)
    file = FILES["data/weights.bin"]
    kept = tmp_path / "state/files" / file.sha256
    kept.chmod(0o600)
    kept.write_bytes(bytes(file.size))
    again = Agent(tmp_path / "state", FILES)
    assert again.prepare(host).parts == (1,)
    assert again.asked == (file.sha256,)
    assert again.found["data/weights.bin"] == SOURCES["data/weights.bin"]


def test_wheels_that_fit_come_and_are_unpacked_once(tmp_path: Path) -> None:
    """Not the others, and when they are unpacked they need not be kept."""
    fits, other = "w/tiny-1-py3-none-any.whl", "w/tiny-1-cp27-cp27m-win32.whl"
    files = {"net.py": "import tiny\n", fits: packed({"tiny.py": ""}), other: packed({"tiny.py": "1"})}
    known, cache = described(files), FileCache(tmp_path / "host")
    for name, content in files.items():
        cache.add(known[name], [content.encode() if isinstance(content, str) else content])
    agent = Agent(tmp_path / "state", known)
    agent.prepare(cache)
    assert set(agent.asked) == {known["net.py"].sha256, known[fits].sha256}
    assert agent.found == {"net.py": b"import tiny\n"} and agent.wheels == {"tiny.py"}
    for path in (tmp_path / "state/files").iterdir():
        path.unlink()
    again = Agent(tmp_path / "state", known)
    again.prepare(cache)
    assert again.asked == (known["net.py"].sha256,) and again.wheels == {"tiny.py"}
    alone = Agent(tmp_path / "state", {other: known[other]})
    with pytest.raises(Refused, match="wheels: there is none of tiny for Python ") as caught:
        alone.prepare(cache)
    assert caught.value.code == "model"


def test_a_job_without_files_has_an_empty_folder(tmp_path: Path, host: FileCache) -> None:
    agent = Agent(tmp_path / "state", {})
    agent.prepare(host)
    assert agent.found == {} and agent.asked == ()


def test_the_hosts_damaged_copy_is_named(tmp_path: Path, host: FileCache) -> None:
    agent = Agent(tmp_path / "state", FILES)
    with _damaged(host.path(FILES["data/weights.bin"])), pytest.raises(Refused) as caught:
        agent.prepare(host)
    assert caught.value.text.startswith("the host's copy of 'data/weights.bin' is damaged: its SHA-256")
    assert caught.value.code == "model"  # no other try mends it
    assert agent.prepare(host).parts == (1,)


def test_more_than_the_cache_takes_is_refused_before_it_is_sent(tmp_path: Path, host: FileCache) -> None:
    agent = Agent(tmp_path / "state", FILES, files_cache=1 << 20)
    with pytest.raises(Refused, match="room for 1048576 more bytes of files; 31457"):
        agent.prepare(host)
    assert isinstance(agent.error, LocalError) and agent.asked == ()


class Wrong(Agent):
    """Asks for what is none of its job's."""

    digests: tuple[str, ...]

    def _serve(self, sock: socket.socket) -> None:
        with Channel(sock, "the host") as host:
            host.expect(WarmUp, soon())
            host.send(Ok(), soon())
            host.expect(PrepareWorker, soon())
            host.send(MissingFiles(self.digests), soon())


@pytest.mark.parametrize("digests", [("../../fleet.db",), ("0" * 64,), (FILES["net.py"].sha256,) * 9])
def test_a_device_gets_the_files_of_its_job_alone(
    tmp_path: Path, host: FileCache, digests: tuple[str, ...]
) -> None:
    agent = Wrong(tmp_path / "state", FILES)
    agent.digests = digests
    with pytest.raises(ProtocolError, match="csd0 asks for a file that the job does not have"):
        agent.prepare(host)


@pytest.mark.parametrize(
    ("message", "payload"),
    [
        (Ok(), b""),
        (FileContents("0" * 64), b"x"),
        (FileContents(FILES["net.py"].sha256), b"longer than was announced"),
    ],
)
def test_a_host_that_sends_something_else_is_cut_off(
    tmp_path: Path, message: Message, payload: bytes
) -> None:
    agent = Agent(tmp_path / "state", {})
    near, far = socket.socketpair()
    with Channel(near, "the agent") as host, Channel(far, "the host") as channel:
        host.send(message, soon(), payload)
        files = agent.files.laid_out({"net.py": FILES["net.py"]}, channel)
        with pytest.raises(ProtocolError, match="where a job's file belongs"), files:
            raise AssertionError
