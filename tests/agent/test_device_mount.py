# SPDX-License-Identifier: Apache-2.0
"""The device's own mount of its volume, as the agent starts and stops it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from millpond.agent.config import AgentConfig, read
from millpond.agent.gate import LedgerCounters
from millpond.agent.volume import DeviceMount, VolumeServer
from millpond.fs.fuse import mounts
from millpond.fs.store.layout import prepare
from millpond.linux import syscalls
from millpond.linux.confinement.sandbox import enter_user_namespace

InNamespace = Callable[[Callable[[], None]], None]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    tmp_path.chmod(0o755)
    prepare(tmp_path / "flash")
    file = tmp_path / "agent.toml"
    places = "".join(f'{name} = "{tmp_path}/{name}"\n' for name in ("flash", "volume", "state"))
    (tmp_path / "state").mkdir()
    file.write_text(f'name = "csd0"\n{places}[link]\nsocket = "/s"\naddress = "10.77.0.2/30"\n')
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
        assert mounts.is_volume(volume)
        os.kill(mount.process.pid, signal.SIGSTOP)
        mount.stop()
        server.stop()
        assert not mounts.is_volume(volume)
        assert list(volume.iterdir()) == []

    in_namespace(body)


def test_what_a_killed_agent_left_mounted_is_taken_away(
    fuse_usable: None, config: Path, in_namespace: InNamespace
) -> None:
    def body() -> None:
        found, server, mount = started(config)
        mount.process.kill()
        mount.process.wait()
        assert mounts.is_volume(Path(found.volume))
        again = DeviceMount(found)
        assert sorted(path.name for path in Path(found.volume).iterdir()) == ["private", "public"]
        again.stop()
        server.stop()
        assert not mounts.is_volume(Path(found.volume))

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
        with pytest.raises(OSError, match="not connected"):
            DeviceMount(found)

    in_namespace(body)
