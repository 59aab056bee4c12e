# SPDX-License-Identifier: Apache-2.0
"""What the command line imports before it knows the command: each takes longer than most commands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from millpond.host.cli import app

LOADED = "import sys, millpond.host.cli.app; print(*sys.modules)"
RUNNING = """
import sys, millpond.host.main
sys.argv = ["millpond", *sys.argv[1:]]
try:
    millpond.host.main.main()
finally:
    print(*sys.modules)
"""


def loaded_by(*words: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", RUNNING, *words], capture_output=True, text=True)
    assert done.returncode == 2 and "holds no fleet" in done.stderr, done
    return set(done.stdout.split())


def test_ctrl_c_is_set_up_before_anything_that_takes_long_is_imported() -> None:
    before = "import sys, millpond.host.main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", before], capture_output=True, text=True, check=True)
    found = {name for name in done.stdout.split() if name.startswith("millpond")}
    assert found == {"millpond", "millpond.host", "millpond.host.main"}


@pytest.fixture(scope="module")
def loaded() -> set[str]:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_a_command_loads_no_module_of_another(tmp_path: Path) -> None:
    copying = loaded_by("cp", "--fleet", str(tmp_path), "a", "csd0:b")
    assert "millpond.fs.client.remote_fs" in copying
    assert not copying & {"rich", "millpond.host.api.daemon", "millpond.host.cli.jobs"}
    listing = loaded_by("devices", "--fleet", str(tmp_path))
    assert not listing & {"numpy", "paramiko", "millpond.fs.client", "millpond.host.cli.jobs"}


def test_a_command_is_added_by_one_file() -> None:
    file = Path(app.__file__).with_name("greet.py")
    text = [
        "from millpond.host.cli.options import new_app",
        "app = new_app()",
        "@app.command()",
        "def greet() -> None:",
        '    """Greet the user."""',
        "    print('hello')",
    ]
    try:
        file.write_text("\n".join(text))
        run = [sys.executable, "-m", "millpond.host.main"]
        assert subprocess.check_output([*run, "greet"], text=True) == "hello\n"
        assert "Greet the user." in subprocess.check_output([*run, "--help"], text=True)
    finally:
        file.unlink()


@pytest.mark.parametrize(
    "module", ["cryptography", "numpy", "paramiko", "torch", "millpond.fs.client", "millpond.host.daemon"]
)
def test_only_the_commands_that_need_it_import(loaded: set[str], module: str) -> None:
    assert module not in loaded
