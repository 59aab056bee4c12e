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
from millpond.base.errors import ConfigError, LocalError
from millpond.fs.store.layout import prepare
from millpond.fs.store.usage import public_usage
from millpond.linux.confinement import landlock


def test_it_says_whether_it_is_restricted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    try:
        said = f"on, version {landlock.version()}"
    except OSError:
        said = "off: "
    prepare(tmp_path / "flash")
    tmp_path.chmod(0o755)
    config = tmp_path / "agent.toml"
    link = f'[link]\nsocket = "{tmp_path}/socket"\naddress = "10.77.0.2/30"\n'
    link += '[privacy]\nlandlock = "best-effort"\n'
    config.write_text(f'name = "csd0"\nflash = "{tmp_path}/flash"\nstate = "{tmp_path}"\n{link}')
    server = VolumeServer(read(config), config, LedgerCounters.in_memory())
    server._socket.close()  # it ends by itself when the agent does
    assert server.process.wait(60) == 0
    server.stop()
    assert f"volume: Landlock: {said}" in capfd.readouterr().err


def test_it_counts_for_its_quota_what_it_may_see(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prepare(tmp_path / "flash")
    tmp_path.chmod(0o755)
    (tmp_path / "flash" / "public" / "f").write_bytes(bytes(10_000))
    used, _ = public_usage(tmp_path / "flash")
    config = tmp_path / "agent.toml"
    link = f'[link]\nsocket = "{tmp_path}/socket"\naddress = "10.77.0.2/30"\n'
    link += '[privacy]\nlandlock = "best-effort"\n'
    config.write_text(
        f'name = "csd0"\nflash = "{tmp_path}/flash"\nstate = "{tmp_path}"\npublic_quota = 1_000_000\n{link}'
    )
    server = VolumeServer(read(config), config, LedgerCounters.in_memory())
    server._socket.close()
    assert server.process.wait(60) == 0
    server.stop()
    said = f"volume: the quota of the public part is 1000000 bytes, of which {used} are taken"
    assert said in capfd.readouterr().err


def test_a_quota_of_nothing_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "agent.toml"
    link = '[link]\nsocket = "/s"\naddress = "10.77.0.2/30"\n'
    config.write_text(f'name = "csd0"\npublic_quota = 0\n{link}')
    with pytest.raises(ConfigError, match=r"agent\.toml: public_quota must be a number of bytes above 0"):
        read(config)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, 0])
def test_a_kernel_that_cannot_restrict_it_is_refused_unless_that_is_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Before: it served without Landlock, which one line in the device's log told."""

    def version() -> int:
        if number:
            raise OSError(number, os.strerror(number))
        return 1

    prepare(tmp_path / "flash")
    tmp_path.chmod(0o755)
    config = tmp_path / "agent.toml"
    text = f'name = "csd0"\nflash = "{tmp_path}/flash"\nstate = "{tmp_path}"\n'
    text += '[link]\nsocket = "/s"\naddress = "10.77.0.2/30"\n'
    config.write_text(text)
    monkeypatch.setattr(landlock, "version", version)
    with pytest.raises(LocalError, match=r"cannot be restricted by Landlock: the kernel.*'best-effort'"):
        VolumeServer(read(config), config, LedgerCounters.in_memory())
    config.write_text(f'{text}[privacy]\nlandlock = "best-effort"\n')
    server = VolumeServer(read(config), config, LedgerCounters.in_memory())
    server._socket.close()
    assert server.process.wait(60) == 0
    server.stop()
