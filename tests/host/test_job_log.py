# SPDX-License-Identifier: Apache-2.0
"""The log of a job on a device: who may read it, and where it is looked for."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from millpond.host.remote import job_log

from .daemon_rig import Rig, open_rig, rig

__all__ = ["open_rig", "rig"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ("--device", "csd0", "1"),
            "only root of csd0 can read that log: there it is /flash/private/.millpond-logs/a.b.log",
        ),
        (("--device", "csd9", "1"), "no device 'csd9' in this fleet; it has csd0, csd1, csd2"),
        (("--device", "csd0", "99"), "there is no job 99"),
        (("--device", "csd0", "launch-a.py"), "there it is /flash/private/.millpond-logs/launch-a.py.log"),
        (("--device", "csd0", "launch-/../a"), "'launch-/../a' is no job's number"),
        (
            ("--device", "csd0", "csd1"),
            "'csd1' is no job's number, such as in: millpond logs --device csd0 3",
        ),
    ],
)
def test_what_cannot_be_read_is_one_line(rig: Rig, arguments: tuple[str, ...], error: str) -> None:
    rig.submit("--set", "name=a.b")
    code, out, err = rig.command("logs", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1) and error in err


@pytest.mark.parametrize("config", ['name = "csd0"\nflash = "{}/own"\n[link]\n', ""])
def test_the_log_is_in_the_private_part_of_the_flash(tmp_path: Path, config: str) -> None:
    folder = tmp_path / ("own" if config else "usual") / "private" / ".millpond-logs"
    folder.mkdir(parents=True)
    (tmp_path / "agent.toml").write_text(config.format(tmp_path))
    script = job_log._SCRIPT.format(
        config=tmp_path / "agent.toml", flash=tmp_path / "usual", name="'a b'", no_file=66, lines=2, follow=""
    )

    def run() -> tuple[int, str]:
        done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    assert run() == (66, "")
    (folder / "a b.log").write_text("1\n2\n3\n")
    assert run() == (0, "2\n3\n")
