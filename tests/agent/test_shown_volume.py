# SPDX-License-Identifier: Apache-2.0
"""What foreign code sees of a private part that is shown as a whole."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from millpond.agent.policy.shown_volume import showing
from millpond.linux.confinement.sandbox import Sandbox, exit_code, python_binds, spawn, system_binds


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    for part in ("public", "private/digits"):
        (tmp_path / part).mkdir(parents=True)
    return tmp_path.resolve()


def shown(volume: Path) -> Sandbox:
    binds = (*system_binds(), *python_binds())
    own = Sandbox(binds=binds, own_pids=True)
    return showing(own, volume, {volume / part: volume / part for part in ("public", "private")})


@pytest.mark.parametrize("name", [".millpond", ".millpond-logs"])
def test_what_the_agent_keeps_is_hidden_also_where_it_is_made_later(volume: Path, name: str) -> None:
    kept = volume / "private" / name / "job/state"

    def look() -> int:
        while not (volume / "private/digits/made").exists():
            time.sleep(0.01)
        return int(kept.exists())

    pid = spawn(shown(volume), look)
    kept.parent.mkdir(parents=True)
    kept.write_text("kept by a job")
    (volume / "private/digits/made").touch()
    assert exit_code(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("name", [".millpond", ".millpond-logs", ".millpond-trial1234"])
def test_a_plain_file_of_such_a_name_keeps_no_sandbox_from_starting(volume: Path, name: str) -> None:
    (volume / "private" / name).write_text("x")
    (volume / "private/.millpond-link").symlink_to("nowhere")
    (volume / "private/.millpond-old/job").mkdir(parents=True)

    def look() -> int:
        return len(list((volume / "private/.millpond-old").iterdir()))

    assert exit_code(os.waitpid(spawn(shown(volume), look), 0)[1]) == 0
