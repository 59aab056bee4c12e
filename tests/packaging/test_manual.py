# SPDX-License-Identifier: Apache-2.0
"""The man pages and the completion, which are generated from the command line."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that is generated."""
    folder = tmp_path_factory.mktemp("share")
    argv = [sys.executable, ROOT / "images/packages/manual.py", folder]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(map(str, (path for path in folder.rglob("*") if path.is_file()))) == sorted(
        done.stdout.splitlines()
    )
    return folder


def helped(*words: str) -> str:
    argv = [sys.executable, "-m", "millpond.host.main", *words, "--help"]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def test_every_command_has_a_page_with_all_its_options(share: Path) -> None:
    pages = {path.name.removesuffix(".1"): path.read_text() for path in (share / "man/man1").iterdir()}
    commands = re.findall(r"^  ([a-z][a-z-]+)  ", helped(), re.M)
    assert len(commands) > 20 and {f"millpond-{name}" for name in commands} < pages.keys()
    assert {"millpond", "millpond-agent", "millpond-jobs-prune"} < pages.keys()
    assert "millpond-demo-inside" not in pages
    assert "-o OPTIONS" in (share / "man/man8/mount.millpond.8").read_text().replace("\\-", "-")
    for words in (("demo",), ("jobs", "prune")):
        text = pages["-".join(("millpond", *words))].replace("\\-", "-")
        assert all(option in text for option in re.findall(r"--[a-z]+", helped(*words)))


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_the_pages_are_sound_roff(share: Path) -> None:
    for path in (share / "man").glob("*/*"):
        argv = ["groff", "-man", "-Tutf8", "-ww", "-z", path]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), path.name


USES = {
    "bash": "source {file}; COMP_WORDS=(millpond dem); COMP_CWORD=1; _millpond_completion millpond;"
    ' echo "${{COMPREPLY[@]}}"',
    "zsh": "compdef() {{ :; }}; source {file}; _arguments() {{ echo $*; }}; _describe() {{ echo $*; }};"
    " words=(millpond dem); CURRENT=2; _millpond_completion",
    "fish": "source {file}; complete -C 'millpond dem'",
}


@pytest.mark.parametrize("shell", USES)
def test_a_shell_completes_commands(share: Path, shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    program = tmp_path / "millpond"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m millpond.host.main "$@"\n')
    program.chmod(0o755)
    (file,) = (path for path in share.rglob("*millpond*") if path.is_file() and shell in str(path))
    script = USES[shell].format(file=file)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        [shell, "-c", script],
        capture_output=True,
        text=True,
        env=os.environ | {"PATH": path, "HOME": str(tmp_path)},
    )
    assert "demo" in done.stdout, done.stdout + done.stderr
