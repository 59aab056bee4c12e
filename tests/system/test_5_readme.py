# SPDX-License-Identifier: Apache-2.0
"""The first pages tell the truth: their commands and examples run as they are printed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .support import Emulation

pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).parents[2]
FIRST_JOB = (ROOT / "README.md").read_text().partition("\n## Your first job")[2].partition("\n## ")[0]
FILES = re.findall(r"^<!-- file: (\S+) -->\n```\w+\n(.*?)^```$", FIRST_JOB, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^```bash\n(.*?)^```$", FIRST_JOB, re.MULTILINE | re.DOTALL)
EXAMPLE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def bash(commands: str, folder: Path, fleet: Emulation) -> subprocess.CompletedProcess[str]:
    """Run what a user types, with the commands of this Python."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "MILLPOND_FLEET": str(fleet.directory)}
    argv = ["bash", "-euo", "pipefail", "-c", commands]
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=200)


def test_the_first_job_of_the_readme(fleet: Emulation, tmp_path: Path) -> None:
    """Its fleet is on already. The private rows lie on the devices alone, and the model learns from them."""
    begin, commands = COMMANDS
    assert "millpond emulate\n" in begin and [name for name, _ in FILES] == ["data.py", "task.py", "job.toml"]
    for name, contents in FILES:
        (tmp_path / name).write_text(contents)
    flashes = [fleet.fleet.device_directory(name) / "flash" for name in ("csd0", "csd1", "csd2")]
    try:
        done = bash(commands, tmp_path, fleet)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{fleet.logs()}"
        for flash in flashes:
            assert len((flash / "private" / "iris" / "rows.csv").read_text().splitlines()) in (37, 38)
    finally:
        for flash in flashes:
            shutil.rmtree(flash / "private" / "iris", ignore_errors=True)
    assert re.search(r"^the job ends: accuracy has reached 0\.95$", done.stdout, re.MULTILINE), done.stdout


def test_the_command_of_the_hosts_readme(fleet: Emulation, tmp_path: Path) -> None:
    (example,) = EXAMPLE.findall((ROOT / "host" / "README.md").read_text())
    (tmp_path / "names.py").write_text(f'{example}\nif __name__ == "__main__":\n    app()\n')
    done = bash('python names.py --fleet "$MILLPOND_FLEET"', tmp_path, fleet)
    assert (done.returncode, done.stdout) == (0, "csd0\ncsd1\ncsd2\n"), done.stderr
