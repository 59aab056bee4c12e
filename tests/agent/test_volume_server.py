"""The process that serves the public part: what it has given up before it serves anybody."""

from __future__ import annotations

from pathlib import Path

import pytest

from millpond.agent.config import read
from millpond.agent.gate import Tally
from millpond.agent.volume import VolumeServer
from millpond.fs.layout import prepare
from millpond.linux import landlock


def test_it_says_whether_it_is_restricted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    try:
        said = f"on, version {landlock.version()}"
    except OSError:
        said = "off: "
    prepare(tmp_path / "flash")
    tmp_path.chmod(0o755)
    config = tmp_path / "agent.toml"
    link = f'[link]\nsocket = "{tmp_path}/socket"\naddress = "10.77.0.2/30"\n'
    config.write_text(f'name = "csd0"\nflash = "{tmp_path}/flash"\n{link}')
    server = VolumeServer(read(config), config, Tally.in_memory())
    server._socket.close()  # it ends by itself when the agent does
    assert server.process.wait(60) == 0
    server.stop()
    assert f"volume: Landlock: {said}" in capfd.readouterr().err
