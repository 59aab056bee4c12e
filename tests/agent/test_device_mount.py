# SPDX-License-Identifier: Apache-2.0
"""The device's own mount of its volume, as the agent starts and stops it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from millpond.agent.config import AgentConfig, read
from millpond.agent.gate import LedgerCounters
from millpond.agent.volume import DeviceMount, VolumeServer
from millpond.base.errors import LocalError
from millpond.fs.fuse import mounts
from millpond.fs.mount.volume_root import is_laid_out
from millpond.fs.store.layout import prepare
from millpond.linux import syscalls
from millpond.linux.confinement.sandbox import enter_user_namespace

from ..starved import starved
from ..waiting import eventually

InNamespace = Callable[[Callable[[], None]], None]
_ANY_KERNEL = '[privacy]\nlandlock = "best-effort"\n'


@pytest.fixture
def config(tmp_path: Path) -> Path:
    tmp_path.chmod(0o755)
    prepare(tmp_path / "flash")
    file = tmp_path / "agent.toml"
    places = "".join(f'{name} = "{tmp_path}/{name}"\n' for name in ("flash", "volume", "state"))
    (tmp_path / "state").mkdir()
    file.write_text(f'name = "csd0"\n{places}[link]\nsocket = "/s"\naddress = "10.77.0.2/30"\n{_ANY_KERNEL}')
    return file


def started(file: Path) -> tuple[AgentConfig, VolumeServer, DeviceMount]:
    config = read(file)
    return config, VolumeServer(config, file, LedgerCounters.in_memory()), DeviceMount(config)


def test_no_mount_is_left_where_its_process_hangs(
    fuse_usable: None, config: Path, in_namespace: InNamespace
) -> None:
    def body() -> None:
        found, server, mount = started(config)
        volume = Path(found.volume)
        assert is_laid_out(volume) and mounts.is_volume(volume / "public")
        os.kill(mount.process.pid, signal.SIGSTOP)
        mount.stop()
        server.stop()
        assert not is_laid_out(volume)
        assert list(volume.iterdir()) == []

    in_namespace(body)


def test_what_a_killed_agent_left_mounted_is_taken_away(
    fuse_usable: None, config: Path, in_namespace: InNamespace
) -> None:
    def body() -> None:
        found, server, mount = started(config)
        mount.process.kill()
        mount.process.wait()
        assert mounts.is_volume(Path(found.volume, "public"))
        again = DeviceMount(found)
        assert sorted(path.name for path in Path(found.volume).iterdir()) == ["private", "public"]
        again.stop()
        server.stop()
        assert not is_laid_out(Path(found.volume))

    in_namespace(body)


def test_private_files_outlive_the_public_mount(
    fuse_usable: None, config: Path, in_namespace: InNamespace
) -> None:
    def body() -> None:
        found, server, mount = started(config)
        private, flash = Path(found.volume, "private"), Path(found.flash, "private")
        (private / "f").write_text("before")
        assert (private / "f").stat().st_dev == flash.stat().st_dev
        with (private / "f").open("a") as file:
            server.process.kill()
            mount.process.kill()
            mount.process.wait()
            file.write(" and after")
        assert (flash / "f").read_text() == (private / "f").read_text() == "before and after"
        with pytest.raises(OSError, match="not connected"):
            os.listdir(Path(found.volume, "public"))  # noqa: PTH208
        mount.stop()
        server.stop()

    in_namespace(body)


def test_the_server_is_restarted_alone(fuse_usable: None, config: Path, in_namespace: InNamespace) -> None:
    def body() -> None:
        found, server, mount = started(config)
        public = Path(found.volume, "public")
        with (public / "f").open("w", buffering=1) as file:
            for number in range(3):
                server.process.kill()
                server.process.wait()
                assert not server.alive
                ours, theirs = socket.socketpair()
                restart = threading.Timer(0.1, server.restart)
                restart.start()
                server.hand_over(theirs)
                restart.join()
                assert server.alive
                ours.sendall(b"\xff" * 64)  # no message: the server ends the connection
                while ours.recv(4096):  # it says what is wrong first
                    pass
                ours.close()
                file.write(f"{number}")
                (public / f"{number}").touch()
        assert (public / "f").read_text() == "012"
        mount.stop()
        server.stop()

    in_namespace(body)


def test_a_server_that_stands_still_is_noticed_and_restarted_alone(
    fuse_usable: None, config: Path, in_namespace: InNamespace
) -> None:
    def body() -> None:
        found, server, mount = started(config)
        public = Path(found.volume, "public")
        eventually(lambda: server.is_well() and server.unanswered == 1, "the server answers")
        with (public / "f").open("w", buffering=1) as file:
            file.write("before")
            os.kill(server.process.pid, signal.SIGSTOP)
            ours, theirs = socket.socketpair()
            with ours, theirs, pytest.raises(BlockingIOError):
                for _ in range(100_000):
                    server.hand_over(theirs.dup())
            eventually(lambda: not server.is_well(), "it is noticed")
            assert not server.alive
            server.restart()
            file.write(" and after")
            (public / "g").touch()
        assert (public / "f").read_text() == "before and after"
        mount.stop()
        server.stop()

    in_namespace(body)


def test_a_server_that_has_no_processor_is_kept(config: Path) -> None:
    server = VolumeServer(read(config), config, LedgerCounters.in_memory())
    eventually(lambda: server.is_well() and server.unanswered == 1, "the server answers")
    with starved(server.process.pid):
        for _ in range(40):
            time.sleep(0.05)
            assert server.is_well()
    eventually(lambda: server.is_well() and server.unanswered <= 1, "it answers again")
    server.stop()


def test_of_the_volume_only_its_parts_are_written(
    fuse_usable: None, config: Path, in_namespace: InNamespace
) -> None:
    def body() -> None:
        found, server, mount = started(config)
        volume = Path(found.volume)
        for part in ("public", "private"):
            (volume / part / "f").write_text(part)
            assert (Path(found.flash, part, "f")).read_text() == part
            assert (
                os.statvfs(volume / part).f_flag & (os.ST_NOSUID | os.ST_NODEV) == os.ST_NOSUID | os.ST_NODEV
            )
        with pytest.raises(OSError, match="Read-only"):
            (volume / "f").touch()
        for ours, theirs in (("public", "private"), ("private", "public")):
            with pytest.raises(OSError, match="cross-device"):
                (volume / ours / "f").rename(volume / theirs / "g")
            with pytest.raises(OSError, match="cross-device"):
                os.link(volume / ours / "f", volume / theirs / "g")
        mount.stop()
        server.stop()

    in_namespace(body)


@pytest.mark.parametrize("there", [True, False])
def test_a_dead_mount_that_something_else_covers_is_left(
    fuse_usable: None, config: Path, in_namespace: InNamespace, there: bool
) -> None:
    def body() -> None:
        volume = config.parent / "above" / "volume"
        config.write_text(config.read_text().replace(f"{config.parent}/volume", str(volume)))
        found, server, mount = started(config)
        mount.process.kill()
        mount.process.wait()
        syscalls.mount("tmpfs", volume.parent, "tmpfs")
        if there:
            volume.mkdir()
        again = DeviceMount(found)
        assert sorted(path.name for path in volume.iterdir()) == ["private", "public"]
        again.stop()
        server.stop()

    in_namespace(body)


def test_a_dead_mount_that_may_not_be_taken_away_is_an_error(
    fuse_usable: None, config: Path, in_namespace: InNamespace
) -> None:
    def body() -> None:
        found, server, mount = started(config)
        mount.stop()
        server.stop()
        command = [sys.executable, "-m", "millpond.fs.mount.device", found.flash, found.volume]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout and process.stdout.readline().startswith(b"ready")
            process.kill()
        enter_user_namespace(0, syscalls.CLONE_NEWNS)  # which locks the mounts that it begins with
        with pytest.raises(LocalError, match="must be an empty directory"):
            DeviceMount(found)

    in_namespace(body)
