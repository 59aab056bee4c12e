# SPDX-License-Identifier: Apache-2.0
"""The process that serves the public part: its privileges, which it drops before it serves."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from millpond.agent.config import read
from millpond.agent.gate import LedgerCounters
from millpond.agent.volume import VolumeServer
from millpond.base.errors import LocalError
from millpond.fs.store.layout import prepare
from millpond.fs.store.usage import public_usage
from millpond.linux.confinement import landlock


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The configuration of a device whose kernel must be able to restrict the server."""
    prepare(tmp_path / "flash")
    tmp_path.chmod(0o755)
    config = tmp_path / "agent.toml"
    config.write_text(
        f'name = "csd0"\nflash = "{tmp_path}/flash"\nstate = "{tmp_path}"\npublic_quota = 1_000_000\n'
        f'[link]\nsocket = "{tmp_path}/socket"\naddress = "10.77.0.2/30"\n'
    )
    return config


def run(config: Path) -> None:
    """Have a server begin and end on any kernel."""
    config.write_text(f'{config.read_text()}[privacy]\nlandlock = "best-effort"\n')
    server = VolumeServer(read(config), config, LedgerCounters.in_memory())
    server._socket.close()  # it ends by itself when the agent does
    assert server.process.wait(60) == 0
    server.stop()


def test_it_says_whether_it_is_restricted_and_what_its_quota_has(
    tmp_path: Path, config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        said = f"on, version {landlock.version()}"
    except OSError:
        said = "off: "
    (tmp_path / "flash" / "public" / "f").write_bytes(bytes(10_000))
    used, _ = public_usage(tmp_path / "flash")
    run(config)
    told = capfd.readouterr().err
    assert f"volume: Landlock: {said}" in told
    assert f"volume: the quota of the public part is 1000000 bytes, of which {used} are taken" in told


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, 0])
def test_a_kernel_that_cannot_restrict_it_is_refused_unless_that_is_configured(
    config: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Before: it served without Landlock, which one line in the device's log told."""

    def version() -> int:
        if number:
            raise OSError(number, os.strerror(number))
        return 1

    monkeypatch.setattr(landlock, "version", version)
    with pytest.raises(LocalError, match=r"cannot be restricted by Landlock: the kernel.*'best-effort'"):
        VolumeServer(read(config), config, LedgerCounters.in_memory())
    run(config)
