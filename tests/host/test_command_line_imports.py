# SPDX-License-Identifier: Apache-2.0
"""What the command line imports before it knows the command: each takes longer than most commands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from millpond.host import quick_copy
from millpond.host.quick_copy import CopyCommand

LOADED = "import sys, millpond.host.cli.app; print(*sys.modules)"
COPYING = """
import os, sys
exit = os._exit
os._exit = lambda code: (print(*sys.modules, flush=True), exit(code))
sys.argv = ["millpond", "cp", "--fleet", sys.argv[1], "-r", "a", "csd0:b"]
from millpond.host.main import main
main()
"""


def test_ctrl_c_is_set_up_before_anything_that_takes_long_is_imported() -> None:
    before = "import sys, millpond.host.main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", before], capture_output=True, text=True, check=True)
    found = {name for name in done.stdout.split() if name.startswith("millpond")}
    assert found == {"millpond", "millpond.host", "millpond.host.main"}


@pytest.fixture(scope="module")
def loaded() -> set[str]:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_a_plain_copy_does_not_load_the_command_line(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", COPYING, tmp_path], capture_output=True, text=True)
    assert done.returncode == 2 and f"{tmp_path} holds no fleet" in done.stderr, done
    found = set(done.stdout.split())
    assert "millpond.fs.client.remote_fs" in found
    assert not found & {
        "typer",
        "rich",
        "pydantic",
        "ssl",
        "millpond.host.api.daemon",
        "millpond.host.cli.app",
    }


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("-r a csd0:b", CopyCommand(("a", "csd0:b"), recursive=True)),
        ("a b csd0:c --recursive", CopyCommand(("a", "b", "csd0:c"), recursive=True)),
        ("--fleet F a csd0:b --format json", CopyCommand(("a", "csd0:b"), "F", as_json=True)),
        ("--format text a csd0:b", CopyCommand(("a", "csd0:b"))),
        *((line, None) for line in ("", "a", "--help", "-h a b", "a b --nonsense", "a b --format xml")),
        *((line, None) for line in ("a -- -b", "--fleet=F a b", "a b --fleet", "-rx a b")),
    ],
)
def test_a_plain_copy_is_parsed_and_all_else_is_left(line: str, expected: CopyCommand | None) -> None:
    assert quick_copy.parse(line.split()) == expected


@pytest.mark.parametrize(
    "module", ["cryptography", "numpy", "paramiko", "torch", "millpond.fs.client", "millpond.host.daemon"]
)
def test_only_the_commands_that_need_it_import(loaded: set[str], module: str) -> None:
    assert "millpond.host.client" in loaded
    assert module not in loaded
